"""What computes attention with a bias. `reference` defines correctness; the others agree with it, faster."""
