"""Geometry, Fig. 2, S1: symmetry and directionality of real checkpoints, as published and corrected."""
