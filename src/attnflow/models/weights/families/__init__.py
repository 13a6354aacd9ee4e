"""Families of models: which tensors are queries, keys and feed-forward maps, and how their rows are ordered.

Files come without code, so these tables read them. A model in memory is probed; the tables serve where the probe
cannot: sharded weights, modules that bypass transformers' attention interface or do not run alone, and latent
attention, whose rotations reorder rows.

`table.py` is the registry and counts heads, `find.py` reads a model's names, shapes and config by it, `rows.py` says
how a projection is stored. To add a family, give its `model_type` a row in `table.py` and a tiny model in tests/models.
"""
