"""Examples without an index: each rank reads its own, and ranks exchange them."""
