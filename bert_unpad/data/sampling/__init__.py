"""Which examples each rank trains on in each step, and the lengths that this depends on."""
