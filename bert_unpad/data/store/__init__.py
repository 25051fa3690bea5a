"""Examples on disk and in memory, and the cache folder."""
