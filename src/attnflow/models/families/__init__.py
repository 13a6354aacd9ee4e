"""Families of models: which tensors are queries, keys and feed-forward maps, and how their rows are ordered.

`table.py` is the registry, `find.py` reads a model's names, shapes and config by it, `heads.py` counts heads, `rows.py`
says how a projection lies in what is stored. To add a family: give its `model_type` a row in `table.py` and a tiny
model in tests/models, where its scores are compared with what the model multiplies.
"""
