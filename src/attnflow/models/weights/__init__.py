"""Reads the weights of queries and keys: of a model, by a probe, or of files, by tables of families."""
