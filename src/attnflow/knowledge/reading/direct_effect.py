"""Splits a logit into the contributions of embedding, attention and entries, with the final norm frozen."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.knowledge.layered import LayerReader, numbering
from attnflow.models.anatomy.mixing import attends
from attnflow.models.passes.watching import Call, Watch, calls_of

Kind = Literal["embedding", "attention", "entries"]
Add = Callable[[Kind, int, Tensor], object]

_SUM: Final = 32  # units of rounding by which a sum over all layers may differ from the model's own
_NORM: Final = re.compile(r"norm", re.IGNORECASE)
_ELEMENT: Final = re.compile(r"\.\d+(?:\.|$)")  # of a list of blocks
_VOCABULARY: Final = 1 << 14  # tokens whose unembedding is held at once
_LARGE: Final = 1e2  # size of a norm's probe: the constant beside the variance vanishes


class Stream:
    """What a model adds to its residual stream at some positions; `paths` has the modules that read entries."""

    def __init__(self, model: nn.Module, positions: Sequence[int]) -> None:
        self.model, self.positions = model, list(positions)
        self.paths = {part.layer: name for name, part in model.named_modules() if isinstance(part, LayerReader)}

    @cached_property
    def numbers(self) -> dict[LayerReader, tuple[int, int]]:
        """By reader: the number of its layer in the model, and that of its first entry there."""
        return numbering(self.model)

    @contextmanager
    def watching(self, add: Add) -> Generator[None]:
        """Call `add(kind, layer, [positions, model_dim])` for each addition, in order; the embedding comes once."""
        ends = {layer: place.end() for layer, path in self.paths.items() if (place := _ELEMENT.search(path))}
        blocks = {layer: self.model.get_submodule(self.paths[layer][:end].rstrip(".")) for layer, end in ends.items()}
        firsts = {block: layer for layer, block in reversed(blocks.items())}  # a block's first
        adders = {("entries", layer): self.model.get_submodule(self.paths[layer]) for layer in blocks}
        for block, layer in firsts.items():
            attending = [child for child in block.children() if attends(child)]
            adders |= {("attention", layer, place): child for place, child in enumerate(attending)}
        entered: list[nn.Module] = []

        def leave(call: Call, output: Any) -> None:
            kind, layer = call.name[:2]
            hidden = output[0] if isinstance(output, tuple) else output
            add(kind, layer, self.pick(call.module.added(hidden) if isinstance(call.module, LayerReader) else hidden))

        def enter(call: Call) -> None:
            if not entered:
                entered.append(call.module)
            if entered[0] is call.module:  # the first block that runs
                add("embedding", call.name, self.pick(call.args[0] if call.args else call.kwargs["hidden_states"]))

        with Watch(adders, leave=leave), Watch({layer: block for block, layer in firsts.items()}, enter):
            yield

    def pick(self, hidden: Tensor) -> Tensor:
        return hidden.reshape(-1, hidden.shape[-1])[self.positions].to(wide(hidden.dtype))


class _Norm(NamedTuple):
    """A layer norm or RMS norm with its scale [positions, 1] frozen: gain * centred(x) / scale + shift."""

    gain: Tensor
    shift: Tensor
    centred: bool
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Directions:
    rows: Tensor  # one for each position, [positions, model_dim]; the effect of c is c . row
    constant: Tensor  # what the biases of the final norm and of the unembedding add
    effects: dict[tuple[Kind, int], Tensor]  # direct effects by kind and layer, [positions], on the CPU
    norm: _Norm  # the final norm
    unembedding: Tensor  # its rows w

    def pushes(self, values: Tensor) -> Float[Tensor, "values vocabulary"]:
        """Return what each value adds to the logits of all tokens, where the norm's scale is 1."""
        normed = _centred(values.to(self.rows), self.norm.centred) * self.norm.gain
        blocks = self.unembedding.detach().split(_VOCABULARY)
        return torch.cat([normed @ block.to(normed).T for block in blocks], dim=-1)


def directions(
    stream: Stream, run: Callable[[], object], targets: Callable[[Tensor], Sequence[int]], against: Sequence[int] = ()
) -> Directions | str:
    """Return the directions of direct effects, or a text that says why they do not exist.

    A forward pass, by `run`, checks that the logits come from a final norm whose input is the sum of the embedding and
    what attention and entries add. This holds for pre-norm decoders, not for post-norm models (BERT) or scaled outputs.
    `targets` chooses target ids from the logits of the last token; effects are those on them less `against`.
    """
    find = getattr(stream.model, "get_output_embeddings", None)
    head = cast("nn.Module | None", find() if callable(find) else None)
    weight = getattr(head, "weight", None)
    outer = {
        name: part
        for name, part in stream.model.named_modules()
        if part is head or (not _ELEMENT.search(name) and _NORM.search(type(part).__name__))
    }
    added: list[tuple[tuple[Kind, int], Tensor]] = []
    said: list[object] = []
    with stream.watching(lambda kind, layer, value: added.append(((kind, layer), value.detach()))):
        calls = calls_of(outer, lambda: said.append(getattr(run(), "logits", None)))
    if head is None or not isinstance(weight, Tensor):
        return "the model has no unembedding, so tokens have no logits"
    unembedded = next(call for call in calls if call.module is head)
    entered, logits = unembedded.first.detach(), unembedded.output.detach()
    last = entered[0, -1]
    norms = [call for call in calls if call.module is not head and torch.equal(call.output[0, -1], last)]
    if not norms or not added:
        return "its unembedding does not read the output of a final norm"
    module, before = norms[-1].module, norms[-1].first.detach()
    x, y = stream.pick(before), stream.pick(norms[-1].output.detach())
    total = torch.stack([value for _, value in added if value.shape == x.shape]).sum(dim=0)
    error = float(((total - x).norm(dim=-1) / x.norm(dim=-1)).max())
    if not error <= _SUM * _rounding(before.dtype):
        return (
            "the input of its final norm is not the sum of the embedding and of what attention and entries add (off by "
            f"{100 * error:.2g} %): norms or scales lie between"
        )
    factor = _factor(logits, said[0])
    if factor is None:
        return "its logits are neither the outputs of its unembedding nor a multiple of them (they may be capped)"
    norm = _frozen(module, x, y, before)
    if norm is None:
        return f"its final norm, {type(module).__name__}, is neither a layer norm nor an RMS norm"
    ids = torch.tensor(targets(logits[0, -1]), device=weight.device)
    bias = cast("Tensor | None", getattr(head, "bias", None))
    rows, biases = (factor * _towards(table, ids, against) for table in (weight, bias))
    constant = (rows @ norm.shift + biases).expand(len(ids))
    back = _centred(rows * norm.gain, norm.centred) / norm.scale  # the gradient of row . norm(x), the scale held still
    effects: dict[tuple[Kind, int], Tensor] = {}
    for place, value in added:
        effects[place] = effects.get(place, 0) + (value * back).sum(dim=-1).cpu()
    return Directions(back, constant, effects, norm, weight)


def _factor(read: Tensor, said: object) -> float | None:
    """Return the factor between the unembedding's outputs and the logits (Cohere, Granite); None if none fits."""
    if not isinstance(said, Tensor) or said.shape != read.shape or torch.equal(said, read):
        return 1.0
    kind = wide(read.dtype)
    one, other = read.to(kind), said.detach().to(kind)
    factor = float((one * other).sum() / one.square().sum())
    off = (other - factor * one).norm() / other.norm()
    return factor if bool(off < 8 * torch.finfo(read.dtype).eps) else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounding(dtype: torch.dtype) -> float:
    """Return the rounding unit of a norm, at least float32's, since many norms compute in float32."""
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)


def _towards(table: Tensor | None, targets: Tensor, against: Sequence[int]) -> Tensor:
    """Return the rows of targets minus the mean row, of all or of `against`; zero without a table."""
    if table is None:
        return torch.zeros((), device=targets.device)
    dtype = wide(table.dtype)
    others = table.detach()[list(against)] if against else table.detach()
    return table.detach()[targets].to(dtype) - others.mean(dim=0, dtype=dtype)


def _frozen(module: nn.Module, x: Tensor, y: Tensor, like: Tensor) -> _Norm | None:
    """Infer a norm's gain, shift and scale from its outputs, as norm classes differ; None if it is not a norm."""
    signs = torch.ones_like(like[0, 0])
    signs[1::2] = -1
    with torch.no_grad():
        zero, same, mixed = module(torch.stack([signs * 0, signs.abs() * _LARGE, signs * _LARGE])).to(x)
    centred = bool((same - zero).norm() < 0.5 * (mixed - zero).norm())
    # Signs in equal number have mean zero; where their number is odd, centring shrinks them by a known amount.
    flat = _centred(signs.to(x), centred)
    gain = (mixed - zero) * flat.square().mean().sqrt() / flat
    straight = gain * _centred(x, centred)
    scale = straight.square().sum(dim=-1, keepdim=True) / (straight * (y - zero)).sum(dim=-1, keepdim=True)
    off = (straight / scale + zero - y).norm(dim=-1) / y.norm(dim=-1)
    return _Norm(gain, zero, centred, scale) if bool((off < 8 * _rounding(like.dtype)).all()) else None


def _centred(rows: Tensor, centred: bool) -> Tensor:
    return rows - rows.mean(dim=-1, keepdim=True) if centred else rows
