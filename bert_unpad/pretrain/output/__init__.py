"""What a run writes: checkpoints, metrics, plots, the report."""
