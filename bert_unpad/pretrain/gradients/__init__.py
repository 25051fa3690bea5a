"""From a step's inputs to the clipped average gradient on every rank."""
