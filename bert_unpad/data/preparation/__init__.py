"""Prepares a corpus in blocks: reads, removes duplicates, trains a vocabulary, makes examples."""
