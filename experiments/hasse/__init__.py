"""Hasse, sec. 4: the derived masks trained on real text, and used."""
