"""Changing what a model answers: `facts` are taught by `edit`, which finds what to add with `edit_targets`."""
