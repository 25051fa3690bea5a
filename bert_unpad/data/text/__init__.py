"""From documents to tokenized sentence pairs."""
