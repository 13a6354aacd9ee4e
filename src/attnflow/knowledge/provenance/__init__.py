"""Traces: which entries fired for a text, how strongly, and what they did to the logits."""
