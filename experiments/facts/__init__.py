"""Facts as entries: a language model and an encoder trained together, then facts edited in a store at run time."""
