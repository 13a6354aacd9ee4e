"""Entries of a tensor in a store, with the thresholds that several layers give them."""

import torch

from attnflow.knowledge import Store
from attnflow.knowledge.store.source import EntrySource


def indexed(readers, entries):
    columns = torch.cat([reader.threshold_columns(entries) for reader in readers], dim=1).detach()
    store = Store.open("memory", dim=entries.shape[1], num_thresholds=columns.shape[1])
    store.insert(embeddings=entries.detach(), ids=range(len(entries)), thresholds=columns)
    return EntrySource(store)
