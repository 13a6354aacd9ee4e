"""Finds the parts of a model: where it attends, its feed-forward layers, and what mixes positions."""
