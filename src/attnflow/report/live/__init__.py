"""A mask under one's hands: the state that pages and widgets show, the operations on it, and what is drawn of it."""
