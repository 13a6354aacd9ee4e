"""Small stores, readers that do something, and entries of a tensor in a store with the thresholds of several layers."""

import torch
from torch.nn import functional

from attnflow.knowledge import Store
from attnflow.knowledge.store.source import EntrySource

DIM = 8


def store_of(count=20, dim=DIM, encoder="x@1", seed=0):
    store = Store.open("memory", dim=dim)
    rows = functional.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed)), dim=1)
    store.insert(embeddings=rows, texts=[f"entry {i}" for i in range(count)], encoder=encoder)
    return store


def opened(handle, seed=0):
    """The readers moved away from their start, so that everything they have does something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for reader in handle.readers:
            for parameter in reader.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return handle


def indexed(readers, entries):
    columns = torch.cat([reader.threshold_columns(entries) for reader in readers], dim=1).detach()
    store = Store.open("memory", dim=entries.shape[1], num_thresholds=columns.shape[1])
    store.insert(embeddings=entries.detach(), ids=range(len(entries)), thresholds=columns)
    return EntrySource(store)
