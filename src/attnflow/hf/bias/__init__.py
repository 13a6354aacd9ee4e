"""Biases on transformers models: attach, run beside caches and masks, save, load, look at."""
