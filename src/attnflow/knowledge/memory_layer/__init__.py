"""What a model reads: which entries of a tensor, an index or a store, by which search, and what was read."""
