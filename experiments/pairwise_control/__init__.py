"""A positive control for pairwise biases: a task that attention without one cannot do, and a ladder of depth."""
