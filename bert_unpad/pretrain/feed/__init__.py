"""What each rank trains on in each step, by the batching strategy."""
