"""Geometry, props. 2.1 and S1.10: what attention of real models combines, and what roles the tokens of a text have."""
