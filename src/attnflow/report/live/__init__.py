"""Interactive masks: the state that pages and widgets show, the operations on it, and the answers about it."""
