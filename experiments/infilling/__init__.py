"""Hasse, sec. 4.2.1 used: gaps of a text filled by models that were trained to."""
