"""The tensors of a transcoder or a sparse autoencoder, under the names and in the orders that files have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from attnflow._core.checks import preview

Tensors = Mapping[str, Tensor]

NAMES: Final = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold", "W_skip", "b_gate", "b_mag", "r_mag")
# By lower-case name: SAELens and Gemma Scope; circuit-tracer; nn.Linear, as sparsify and dictionary_learning have it.
_NAMES: Final = {
    **{name.lower(): name for name in NAMES},
    "activation_function.threshold": "threshold",
    "affine_skip_connection": "W_skip",  # of Gemma Scope 2, stored as [in, out]
    "encoder.weight": "W_enc",
    "encoder.bias": "b_enc",
    "decoder.weight": "W_dec",
}
_GATED: Final = frozenset(NAMES[-3:])


def feature_tensors(given: Tensors | str | os.PathLike[str], width: int, out: int) -> dict[str, Tensor]:
    """Return W_enc [features, width], W_dec [features, out] and W_skip [out, width], and vectors by SAELens' names.

    Raises:
        ValueError: an unknown name, as its tensor could change what is computed; a wrong shape; a square matrix whose
            name does not say which axis has the features; NaN or infinity; or another kind of file.
    """
    tensors = _loaded(given)
    if unknown := [name for name in tensors if name.lower() not in _NAMES]:
        known = ", ".join(NAMES)
        raise ValueError(f"tensors {preview(unknown)} are not known: leave out what encoding does not use; of {known}")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind = _NAMES[name.lower()]
        if kind in found:
            raise ValueError(f"{kind} is given twice, the second time as {name}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} must hold finite floating-point numbers, got {tensor.dtype} with others")
        found[kind] = tensor.detach()
        if kind in ("W_enc", "W_dec"):
            found[kind] = _by_feature(name, found[kind], width if kind == "W_enc" else out)
        elif name == "affine_skip_connection":
            found[kind] = found[kind].T
    if missing := {"W_enc", "W_dec"} - set(found):
        raise ValueError(f"{' and '.join(sorted(missing))} is missing among the tensors {preview(tensors)}")
    gated = _GATED & set(found)
    if gated and (gated != _GATED or {"b_enc", "threshold"} & set(found)):
        raise ValueError(
            f"a gated encoder has {preview(NAMES[-3:])} and no b_enc or threshold, got {preview(list(found))}"
        )
    if "threshold" in found and bool((found["threshold"] < 0).any()):
        raise ValueError("a threshold is negative, where readers differ on what JumpReLU is: it must be 0 or more")
    features = len(found["W_enc"])
    sizes = {"W_enc": (features, width), "W_dec": (features, out), "b_dec": (out,), "W_skip": (out, width)}
    for name in NAMES:
        size = sizes.get(name, (features,))
        if name in ("b_enc", "b_dec"):
            found.setdefault(name, found["W_enc"].new_zeros(size))
        if name in found and tuple(found[name].shape) != size:
            raise ValueError(f"{name} must have shape {list(size)} here, got {list(found[name].shape)}")
    return found


def _loaded(given: Tensors | str | os.PathLike[str]) -> Tensors:
    if isinstance(given, Mapping):
        for name, tensor in cast("Mapping[str, object]", given).items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"expected tensors by name, got {type(tensor).__name__} for {name!r}")
        return given
    path = Path(given)
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    raise ValueError(f"expected tensors by name, or a .safetensors or .npz file, got {path}: pickles are not opened")


def _by_feature(name: str, matrix: Tensor, width: int) -> Tensor:
    """Turn a matrix so that its rows are the features."""
    if matrix.ndim != 2 or width not in matrix.shape:
        raise ValueError(f"{name} must have an axis of {width}, the model's width, got shape {list(matrix.shape)}")
    if name.lower().endswith(".weight"):  # as nn.Linear stores it: [out, in]
        return matrix.T if name.lower().startswith("decoder") else matrix
    if matrix.shape[0] == matrix.shape[1]:
        raise ValueError(
            f"{name} is square, so its shape does not say which axis has the features: give it as encoder.weight "
            f"[features, {width}] or decoder.weight [{width}, features]"
        )
    return matrix if matrix.shape[1] == width else matrix.T
