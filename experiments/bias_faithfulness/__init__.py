"""Asymmetric attention, sec. 5: whether the bias explains, what its signs do, and what ALiBi attends to."""
