"""Checkpoints of every format behind one small interface: names, shapes, and tensors read one at a time."""
