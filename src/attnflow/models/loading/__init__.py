"""Gets a model, by name or from a folder, and saves and loads what was added to it."""
