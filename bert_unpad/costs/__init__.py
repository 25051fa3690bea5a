"""What a training step costs: computing, the network, memory, machines; what `simulate` and `plan` share."""
