"""What a training step costs; `simulate` and `plan` are commands over these models."""
