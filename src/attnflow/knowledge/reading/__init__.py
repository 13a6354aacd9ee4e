"""What a model reads: `attach` gives it a store, `trace`, `usage`, `entry` and `duplication` look at its entries."""
