"""Families of models: which tensors of a checkpoint are queries and keys, and how their rows are ordered."""
