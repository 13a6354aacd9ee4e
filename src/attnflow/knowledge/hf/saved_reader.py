"""Readers of a store in a folder of their own: safetensors and JSON, with the model and the encoder they belong to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attnflow._core.checks import preview
from attnflow._core.errors import WrongBase
from attnflow._core.files import SEAL, seal, sealed, write_folder
from attnflow._core.markup import plural
from attnflow.knowledge.hf.store_reader import CHILD, StoreReader, store_readers
from attnflow.knowledge.store import Store
from attnflow.models.addons import same_weights
from attnflow.models.layers import Stack, stack_of

WEIGHTS: Final = "reader.safetensors"
_FORMAT: Final = "attnflow-reader"
_VERSION: Final = 1
_TYPES: Final = {"base": Mapping, "encoder": str, "entry_dim": int, "layers": list, "key_dim": int, "num_heads": int}


def encoder_of(store: Store) -> str:
    """The one encoder that made the entries of a store; "" where they do not say.

    Raises:
        ValueError: several did: their scores do not compare.
    """
    encoders = store.stats().encoders
    if len(encoders) > 1:
        raise ValueError(
            f"the entries of {store.uri} were made by {len(encoders)} encoders ({preview(encoders)}), and their scores "
            f"do not compare: build a store of their texts by one encoder"
        )
    return next(iter(encoders), "")


def check_store(store: Store, entry_dim: int, encoder: str) -> None:
    """Refuse a store whose entries readers for others cannot read."""
    if store.dim != entry_dim:
        raise ValueError(f"the reader reads entries of width {entry_dim}, those of {store.uri} have {store.dim}")
    here = encoder_of(store)
    if here != encoder:
        raise ValueError(
            f"the reader was made for entries by {encoder or 'an encoder without a name'}, those of {store.uri} are by "
            f"{here or 'an encoder without a name'}: build a store of the same texts by the first"
        )


def save_reader(model: nn.Module, folder: Path) -> Path:
    """Write the readers of a model to a folder, which they replace, and return it."""
    readers = store_readers(model)
    if not readers:
        raise ValueError(f"{type(model).__name__} has no reader that `attach` put into it: there is nothing to save")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors_of(readers).items()}
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ValueError(f"the reader holds NaN or infinity in {', '.join(bad[:3])}, which is not saved")
    first = readers[0]
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "base": stack_of(model).identity(CHILD),
        "encoder": first.source.encoder,
        "entry_dim": first.attention.entry_dim,
        "layers": [reader.layer for reader in readers],
        "key_dim": first.attention.key_dim,
        "num_heads": first.attention.num_heads,
    }
    with write_folder(folder) as new:
        save_file(tensors, new / WEIGHTS, metadata={"format": "pt"})
        seal(new, about)
    return folder


def tensors_of(readers: Sequence[StoreReader]) -> dict[str, Tensor]:
    """The tensors of readers by layer number and name; none is copied."""
    return {f"layers.{one.layer}.{name}": tensor for one in readers for name, tensor in one.state_dict().items()}


@dataclass(frozen=True)
class SavedReader:
    """What a folder says of the readers in it."""

    folder: Path
    base: Mapping[str, Any]
    encoder: str
    entry_dim: int
    layers: list[int]
    key_dim: int
    num_heads: int

    @classmethod
    def read(cls, folder: Path) -> SavedReader:
        """Of a folder that `save_reader` wrote.

        Raises:
            FileNotFoundError: no reader was saved there.
            ValueError: files that are damaged, of something else, or of a newer version.
        """
        if not (folder / SEAL).is_file() and not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(f"{folder} holds no saved reader: the handle of knowledge.attach saves one")
        about = sealed(folder)
        if about.get("format") != _FORMAT:
            raise ValueError(f"{folder} holds no saved reader but {about.get('format') or 'something else'}")
        if about.get("version") != _VERSION:
            raise ValueError(
                f"{folder} has version {about.get('version')}, this release reads {_VERSION}: update attnflow"
            )
        wrong = [name for name, kind in _TYPES.items() if not isinstance(about.get(name), kind)]
        samples = [] if wrong else about["base"].get("samples")
        if not isinstance(samples, list) or not all(isinstance(one, int | float) for one in samples):
            wrong.append("base")
        if wrong:
            raise ValueError(f"{folder} is damaged: {', '.join(wrong)} cannot be read")
        return cls(folder, *(about[name] for name in _TYPES))

    def check(self, stack: Stack, store: Store) -> None:
        """Refuse a model or a store that the readers do not belong to.

        Raises:
            WrongBase: another model, with what differs.
            ValueError: a store of another width or encoder.
        """
        here: dict[str, Any] = stack.identity(CHILD)
        named = f" ({self.base.get('name')})" if self.base.get("name") else ""
        for name in ("model_type", "num_layers", "width"):
            if self.base.get(name) != here[name]:
                raise WrongBase(
                    f"the reader in {self.folder} is for another model{named}: {name} is {self.base.get(name)} there "
                    f"and {here[name]} here"
                )
        if not same_weights(here["samples"], self.base.get("samples", [])):
            raise WrongBase(
                f"the reader in {self.folder} was made for other weights of this architecture{named}; load those"
            )
        check_store(store, self.entry_dim, self.encoder)

    def fill(self, readers: Sequence[StoreReader]) -> None:
        """Give readers the values that were saved; a ValueError where they do not fit."""
        path = self.folder / WEIGHTS
        try:
            saved = load_file(os.fspath(path))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        tensors = tensors_of(readers)
        wrong = sorted(set(tensors) ^ set(saved)) or [n for n in tensors if tensors[n].shape != saved[n].shape]
        bad = wrong or [name for name, tensor in saved.items() if not bool(torch.isfinite(tensor).all())]
        if bad:
            raise ValueError(f"{path} does not fit, or holds NaN or infinity: {plural(len(bad), 'tensor')}, {bad[0]}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(saved[name])
