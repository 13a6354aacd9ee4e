"""Interactive masks: the state that a page shows, the operations on it, and the answers about it."""
