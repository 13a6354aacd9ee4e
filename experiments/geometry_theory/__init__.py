"""The theorems of the geometry paper, measured on a small language model."""
