"""Rows for tests of the index, and all scores by brute force."""

import numpy as np
import torch

from attnflow.knowledge.index import EntryIndex

MODES = ("exact", "approximate")


def clustered(count, dim=16, clusters=40, seed=0, spread=0.3):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, dim, generator=torch.Generator().manual_seed(99))
    which = torch.randint(clusters, (count,), generator=generator)
    return centres[which] + spread * torch.randn(count, dim, generator=generator)


def built(rows, num_thresholds=0):
    index = EntryIndex(rows.shape[1] - num_thresholds, num_thresholds)
    index.load(np.arange(len(rows)), rows.numpy())
    return index


def brute(rows, queries, dim, column=None):
    scores = queries.double() @ rows[:, :dim].double().T
    return scores if column is None else scores + rows[:, dim + column].double()
