"""Small stores, and readers that do something."""

import torch
from torch.nn import functional

from attnflow.knowledge import Store

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
