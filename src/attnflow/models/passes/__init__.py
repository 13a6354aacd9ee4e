"""Runs a model: attention intercepted, modules watched, everything restored, one pass recorded."""
