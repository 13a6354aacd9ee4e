"""A learned bias against its controls at equal parameters."""
