"""Diagnose a mask you were given: which known mask it equals, and what looks wrong with it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attnflow._core.checks import IntArray
from attnflow._core.files import to_read
from attnflow._core.markup import plural
from attnflow._core.plain import read_json
from attnflow._core.results import Result
from attnflow.masks import catalogue, export, streams
from attnflow.masks.batches import block_diagonal
from attnflow.masks.build import from_dense
from attnflow.masks.export.varlen import bands_of
from attnflow.masks.intervals import BoolArray, IntervalRows, offsets
from attnflow.masks.mask import Mask
from attnflow.masks.registry import named_masks
from attnflow.masks.spec import mask_from_dict

_CLOSE: Final = 0.02  # share of all pairs up to which a mask is taken for another one with mistakes
_MASKED: Final = -1e4  # additive values from here down forbid; what lies between them and 0 is a bias
_PAIRS: Final = 1 << 28  # of a tensor in a file: 4 GB while its values are checked
_SHOWN: Final = 3
_DOCUMENTED: Final = 1 << 13  # positions up to which the best documents are looked for, in seconds
_PER_MISTAKE: Final = 6  # pairs of two tokens that a mask must have for each pair that is off


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong."""

    kind: str  # "empty", "diagonal", "inverted", "transposed" or "nearly"
    message: str  # what is wrong, and its effect
    pairs: tuple[tuple[int, int], ...] = ()  # the first pairs (query, key) that show it


@dataclass(frozen=True)
class Diagnosis(Result):
    """The diagnosis of a mask you were given: what it is, what looks wrong, and which kernels can take it."""

    num_queries: int
    num_keys: int
    allowed_pairs: int
    same_as: str | None  # the mask of the catalogue that it equals
    findings: tuple[Finding, ...]
    formats: tuple[str, ...]  # those of `masks.export` that can express it

    @property
    def ok(self) -> bool:
        """Whether nothing looks wrong."""
        return not self.findings

    def rows(self) -> list[dict[str, object]]:
        """One row for each finding."""
        return [{"kind": f.kind, "message": f.message, "pairs": str(f.pairs)} for f in self.findings]

    def __str__(self) -> str:
        count = len(self.findings)
        verdict = f"{plural(count, 'thing')} look{'s' * (count == 1)} wrong" if count else "nothing looks wrong"
        lines = [
            ("queries x keys", f"{self.num_queries:,} x {self.num_keys:,}"),
            ("allowed pairs", f"{self.allowed_pairs:,} of {self.num_queries * self.num_keys:,}"),
            ("is", self.same_as or "not in the catalogue"),
            ("exports to", ", ".join(self.formats) or "none"),
            *((finding.kind, finding.message) for finding in self.findings),
        ]
        return "\n".join([verdict, *(f"{label:<16}{text}" for label, text in lines)])

    __repr__ = __str__


def read_mask(path: str | os.PathLike[str], masked_true: bool = False) -> Mask:
    """Reads a mask from JSON ("-": standard input) or one tensor; `masked_true`: True or 1 forbids."""
    if str(path) == "-" or Path(path).suffix == ".json":
        spec = read_json(path)
        return mask_from_dict(spec.get("mask", spec), str(path))
    tensor = _tensor(Path(path))
    try:
        return from_dense(_allowed(tensor, masked_true), Path(path).name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def diagnose(mask: Mask) -> Diagnosis:
    """Diagnoses a mask: finds the known mask that it equals and what looks wrong with it."""
    equal, formats = equal_to(mask), list[str]()
    for name, exported in export.FORMATS.items():
        with suppress(ValueError):  # the format cannot say it, or it takes too many intervals
            exported(mask)
            formats.append(name)
    same_as = None if equal is None else repr(equal)
    return Diagnosis(*mask.shape, mask.nnz, same_as, tuple(_findings(mask, equal)), tuple(formats))


def equal_to(mask: Mask) -> Mask | None:
    return next((candidate for candidate in _candidates(mask) if candidate == mask), None)


def _findings(mask: Mask, equal: Mask | None) -> Iterator[Finding]:
    counts = mask.row_counts()
    empty = np.flatnonzero(counts == 0)
    if len(empty) and mask.num_keys:
        which = _some(empty.tolist())
        message = f"{which} may attend to nothing: softmax gives NaN, or the mean of all values"
        yield Finding("empty", message, tuple((query, 0) for query in empty[:_SHOWN].tolist()))
    if mask.num_queries == mask.num_keys:
        blind = [int(q) for q in np.flatnonzero(counts) if not mask.allows(int(q), int(q))]
        if blind:
            itself = "itself" if len(blind) == 1 else "themselves"
            message = f"{_some(blind)} may attend to other keys but not to {itself}"
            yield Finding("diagonal", message, tuple((query, query) for query in blind[:_SHOWN]))
    if equal is None:
        yield from _mistaken(mask)


def _mistaken(mask: Mask) -> Iterator[Finding]:
    if (other := equal_to(~mask)) is not None and mask.nnz:
        yield Finding("inverted", f"its complement is {other!r}: true seems to mean masked (`mask` and `~mask`)")
        return
    if max(mask.shape) <= 1 << 12 and (other := equal_to(from_dense(mask.dense().T))) is not None:
        yield Finding("transposed", f"its transpose is {other!r}: rows are queries here, columns keys")
        return
    near: list[tuple[int, Mask, Mask]] = []
    blind = np.flatnonzero(mask.row_counts() == 0)  # as of padding: a finding of its own
    hidden = Mask(IntervalRows.build(blind, 0, mask.num_keys, *mask.shape), "of empty rows")
    candidates = [(other, mask.num_queries * mask.num_keys) for other in _candidates(mask)]
    # Between documents nearly everything is forbidden, so that their share is one of the allowed pairs.
    for other, pairs in [*candidates, *((documents, documents.nnz) for documents in _near_documents(mask))]:
        compared = other & ~hidden if len(blind) else other
        distance = (mask & ~compared).nnz + (compared & ~mask).nnz
        if not distance:
            return
        between = other.nnz - min(mask.shape)  # pairs of two tokens; a sparse mask would resemble many others
        # Layouts of several streams differ from one another by some pairs of each query: those are no mistakes.
        few = mask.num_queries // 8 if other.name in named_masks(streams.__name__) else int(_CLOSE * pairs)
        if distance <= max(1, few) and _PER_MISTAKE * distance <= between:
            near.append((distance, other, compared))
    if near:
        distance, other, compared = min(near, key=lambda candidate: candidate[0])
        pairs = mask.difference(compared, limit=_SHOWN)
        message = f"{plural(distance, 'pair')} away from {other!r}: {_said(mask, pairs)}"
        yield Finding("nearly", message, tuple(pairs))


def _candidates(mask: Mask) -> Iterator[Mask]:
    n, keys = mask.shape
    if not n or not keys:
        return
    yield catalogue.full(n, keys)
    try:
        bands = bands_of(mask, "documents")
    except export.NotExpressible:
        bands = None
    if bands is not None and bands.square and len(bands.queries) != 1:
        inner = catalogue.packed(np.array(bands.queries, np.int64), "causal" if bands.causal else "full")
        if bands.left is None and (bands.right is None or bands.causal):
            yield inner
        elif bands.left in (bands.right, None) or bands.causal:
            reach = max(bands.left or 0, bands.right or 0) + 1
            yield inner & catalogue.sliding_window(n, reach, causal=bands.causal)
        return
    if n != keys:
        return
    yield catalogue.causal(n)
    counts = mask.row_counts()
    middle = int(counts[n // 2])
    for usual in dict.fromkeys((middle, int(np.median(counts)), int(counts[-1]))):  # one of them may have the mistake
        yield catalogue.sliding_window(n, max(1, usual))
        yield catalogue.sliding_window(n, max(1, (usual + 1) // 2), causal=False)
    node = np.arange(n)
    for usual in dict.fromkeys((*_most(counts[counts > node + 1], 1), int(counts[0]), int(counts[min(1, n - 1)]))):
        yield catalogue.prefix_lm(n, min(n, usual))
    for block in dict.fromkeys((int(counts[0]), int(counts[min(1, n - 1)]), *_most(np.abs(np.diff(counts)), 3))):
        if block and n % block == 0:
            yield catalogue.block_causal(n, block)
            half, first = n // block // 2, n // block % 2 == 1
            yield streams.block_two_stream(half + 1, block, predict_first=first)
            if half and not first:
                yield streams.block_diffusion(half, block)
    run, other = _runs(mask)
    for window in _most(run, 1):
        for sinks in _most(other, 1):
            yield catalogue.attention_sink(n, sinks, window)


def _most(values: IntArray, how_many: int, least: int = 1) -> list[int]:
    """The most common of the values above 0, the most common first, that occur at least so often."""
    counts = np.bincount(values[values > 0], minlength=1)
    return [int(value) for value in np.argsort(-counts, kind="stable")[:how_many] if counts[value] >= least]


def _runs(mask: Mask) -> tuple[IntArray, IntArray]:
    """(keys of each query that end at its own, without a gap; its other keys before them)."""
    rows = mask.intervals()
    row, start = rows.row_index(), rows.starts.astype(np.int64)
    own = (start <= row) & (row < rows.ends)
    run, first = np.zeros((2, mask.num_queries), np.int64)
    run[row[own]] = row[own] + 1 - start[own]
    np.add.at(first, row[rows.ends <= row], (rows.ends - start)[rows.ends <= row])
    return run, np.where(run > 0, first, 0)


def _near_documents(mask: Mask) -> Iterator[Mask]:
    """Packed documents that differ from a square mask in few pairs, for the windows and sinks that it may have."""
    n = mask.num_queries
    if n != mask.num_keys or n < 2:
        return
    often, (run, other), short = max(1, n // 8), _runs(mask), n <= _DOCUMENTED
    table = mask.dense().numpy() if short else np.zeros((0, 0), np.bool_)
    begun = np.bincount(np.arange(n) + 1 - run, minlength=n) > 2  # in a long mask, where at least three runs begin
    cuts = np.concatenate([[0], np.flatnonzero(begun[1:n]) + 1, [n]])
    for window in (n, *_most(run, 2, often)):
        for causal in (True, False):
            lengths = _lengths_of(table, window, 0, causal) if short else np.diff(cuts)
            documents = catalogue.packed(lengths, "causal" if causal else "full")
            yield documents if window == n else documents & catalogue.sliding_window(n, window, causal)
        for sinks in _most(other, 1, often) if short and window < n else []:
            lengths = _lengths_of(table, window, sinks, True)
            yield block_diagonal([catalogue.attention_sink(length, sinks, window) for length in lengths.tolist()])
    if not short:
        return
    seen = np.tril(table).sum(axis=0) >= (1 - _CLOSE) * np.arange(n, 0, -1)
    if 0 < (shared := int(np.argmin(seen))) <= n // 2:  # first keys that all documents see
        lengths = _lengths_of(table[shared:, shared:], n, 0, True)
        yield catalogue.packed(np.append(shared, lengths), "causal") | catalogue.attention_sink(n, shared, 1)


def _lengths_of(table: BoolArray, window: int, sinks: int, causal: bool) -> IntArray:
    """Tokens of the documents that agree best with a table, by the best cut up to each token; O(n^2).

    In a document from `first` on, query q reads max(first, q - window + 1) .. q, and the first `sinks` keys; if not
    causal, the pairs (q, k) and (k, q) alike.
    """
    n = len(table)
    best, start, score = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64), np.zeros(n, np.int64)
    for end in range(1, n + 1):
        first = np.arange(end)
        low = np.maximum(first, end - window)
        sides = [table[end - 1, :end]] if causal else [table[end - 1, :end], table[:end, end - 1]]
        for side in sides:
            pairs = offsets(side)
            top = np.minimum(first + sinks, low)
            score[:end] += 2 * (pairs[end] - pairs[low] + pairs[top] - pairs[first]) - (end - low + top - first)
        total = best[:end] + score[:end]
        start[end] = total.argmax()
        best[end] = total[start[end]]
    lengths, end = list[int](), n
    while end:
        lengths.insert(0, end - int(start[end]))
        end = int(start[end])
    return np.array(lengths, np.int64)


def _tensor(path: Path) -> Tensor:
    if path.suffix not in (".npy", ".pt", ".safetensors"):
        raise ValueError(f"{path}: the name must end in .json, .npy, .pt or .safetensors, got {path.suffix!r}")
    to_read(path)
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False, mmap_mode="c"))
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: object = load_file(path)
        else:
            with warnings.catch_warnings():  # of kinds of tensors that are refused below
                warnings.simplefilter("ignore")
                content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # each reader has errors of its own for what it cannot read
        raise ValueError(f"cannot read {path}: {str(error).splitlines()[0] if str(error) else error!r}") from error
    tensors = list(content.values()) if isinstance(content, dict) else [content]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor):
        raise ValueError(f"{path}: expected one tensor, got {len(tensors)} or something else")
    return tensors[0]


def _allowed(tensor: Tensor, masked_true: bool) -> Tensor:
    """Converts values to bool, True = allowed; raises ValueError for other values or too many of them."""
    strange = tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta
    if strange or tensor.is_complex():
        kind = "nested" if tensor.is_nested else f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise ValueError(f"expected a dense tensor of bools, integers or floats with data, got one that is {kind}")
    if tensor.numel() > _PAIRS:
        raise ValueError(f"it has {tensor.numel():,} pairs, more than {_PAIRS:,}: save one head, or a slice")
    if tensor.dtype == torch.bool:
        return tensor ^ masked_true
    zero_one = (tensor == 0) | (tensor == 1)
    if not tensor.is_floating_point():
        _refuse(tensor, ~zero_one, "neither 0 nor 1")
        return (tensor != 0) ^ masked_true
    if zero_one.all() and (tensor == 1).any():
        raise ValueError("floats of 0 and 1: a kernel that adds them masks nothing; save tensor.bool()")
    what = f"neither 0 nor below {_MASKED:g}, so this is a bias rather than a mask, or NaN"
    _refuse(tensor, (tensor != 0) & ~(tensor <= _MASKED), what)
    return tensor > _MASKED


def _refuse(tensor: Tensor, strange: Tensor, what: str) -> None:
    if strange.any():
        place = strange.nonzero()[0].tolist()
        raise ValueError(f"{int(strange.sum()):,} values are {what}: {tensor[tuple(place)].item()} at {place}")


def _some(queries: list[int]) -> str:
    shown = ", ".join(map(str, queries[:_SHOWN]))
    more = f" and {len(queries) - _SHOWN:,} more" if len(queries) > _SHOWN else ""
    return f"{'query' if len(queries) == 1 else 'queries'} {shown}{more}"


def _said(mask: Mask, pairs: list[tuple[int, int]]) -> str:
    words = [f"{'allows' if mask.allows(q, k) else 'forbids'} query {q}, key {k}" for q, k in pairs]
    return ", ".join(words) + (", ..." if len(pairs) == _SHOWN else "")
