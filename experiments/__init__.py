"""The papers' experiments, made runnable: one folder each."""
