"""Where the feed-forward layers of a transformers model are, and which matrices of its layers they do not cover.

Linear maps are known by name. Experts stored together are recognised by shape, then by comparing each possible reading
with what the module computes.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.anatomy.mixing import CONVOLUTIONS, attends, moves_between_positions
from attnflow.models.passes.evaluation import evaluating

_BESIDE: Final = re.compile(r"Norm|Embedding|Router|HyperConnection|AltUp", re.IGNORECASE)
_MAY_BE: Final = re.compile(r"MLP|FFN|Experts|FeedForward", re.IGNORECASE)
_ROUTER: Final = re.compile(r"Router")
_LAYER: Final = re.compile(r"\.\d+(?=\.|$)")
_BIAS: Final = "_bias"
_JOINT: Final = "_apply_gate"  # transformers' name for a function of gate and up scores, as they lie in the module
_ACTIVATIONS: Final = ("act_fn", "act", "activation_fn")
_TOKENS: Final = 5


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One feed-forward layer: its linear maps, as paths below their common parent."""

    first: tuple[str, ...]  # into the neurons: one; or gate and up; or, where it is gated, one with both side by side
    last: str  # out of them
    gated: bool = False
    name: str = ""  # path of the parent in a model

    @property
    def fused(self) -> bool:
        return self.gated and len(self.first) == 1


PER_LAYER: Final = ("per_layer_input_gate",)
ADAPTED: Final = "base_layer"  # of an adapter (PEFT): the module that it changes
# The first that fits holds, in names and in shapes.
FEED_FORWARD: Final = (
    FeedForward(("gate_proj", "up_proj"), "down_proj", gated=True),
    FeedForward(("gate_proj.linear", "up_proj.linear"), "down_proj.linear", gated=True),
    FeedForward(("wi_0", "wi_1"), "wo", gated=True),
    FeedForward(("w1", "w3"), "w2", gated=True),
    FeedForward(("gate_up_proj",), "down_proj", gated=True),
    FeedForward(("Wi",), "Wo", gated=True),
    FeedForward(("w_in.w_0", "w_in.w_1"), "w_out", gated=True),
    FeedForward(("fc1",), "fc2", gated=True),
    FeedForward(("c_fc",), "c_proj"),
    FeedForward(("fc1",), "fc2"),
    FeedForward(("linear_fc1",), "linear_fc2"),
    FeedForward(("fc_in",), "fc_out"),
    FeedForward(("dense_h_to_4h",), "dense_4h_to_h"),
    FeedForward(("intermediate.dense",), "output.dense"),
    FeedForward(("intermediate",), "output"),
    FeedForward(("dense.dense",), "output.dense"),
    FeedForward(("layer_1",), "layer_2"),
    FeedForward(("lin1",), "lin2"),
    FeedForward(("linear1",), "linear2"),
    FeedForward(("linear_left",), "linear_right"),  # of low rank, without an activation between (Gemma 3n)
    FeedForward(PER_LAYER, "per_layer_projection"),  # times what a table holds for the token (Gemma 3n)
    FeedForward(("ffn",), "ffn_output"),
    FeedForward(("wi",), "wo"),
    FeedForward(("up_proj",), "down_proj"),
)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One module of E experts, with parameters `first` [E, parts * n, d] and `last` [E, d, n], each or both transposed.

    An expert writes act(h W_first^T + b) W_last^T + b2, times the router's weight for it.
    """

    name: str  # path in a model
    first: str  # the parameter into the neurons
    last: str  # and out of them
    num_experts: int
    neurons: int  # n, of each expert
    width: int  # d
    gated: bool  # whether a neuron has two keys: gate and up
    transposed: bool  # stored as [E, in, out]
    interleaved: bool = False  # gate and up of a neuron lie side by side, not all gates before all ups
    joint: bool = False  # the module has a function of gate and up scores; else act(gate) * up
    sorted: bool = False  # called with the tokens of each expert one after another, and no weights; else as (h, i, w)

    @property
    def parts(self) -> int:
        return 1 + self.gated

    def keys(self, module: object) -> Tensor:
        """Keys, [E, parts, n, d], a view."""
        weight = cast(Tensor, getattr(module, self.first))
        return self._by_part(weight.transpose(1, 2) if self.transposed else weight)

    def thresholds(self, module: object) -> Tensor | None:
        """Biases of `first`, [E, parts, n], a view; None without."""
        bias = cast("Tensor | None", getattr(module, self.first + _BIAS, None))
        return None if bias is None else self._by_part(bias)

    def values(self, module: object) -> Tensor:
        """Values, [E, n, d], a view."""
        weight = cast(Tensor, getattr(module, self.last))
        return weight if self.transposed else weight.transpose(1, 2)

    def output_bias(self, module: nn.Module) -> Tensor | None:
        """Biases of `last`, [E, d], or None."""
        return cast("Tensor | None", getattr(module, self.last + _BIAS, None))

    def parameters(self, module: nn.Module) -> list[Tensor]:
        stored = (getattr(module, name + end, None) for name in (self.first, self.last) for end in ("", _BIAS))
        return [parameter for parameter in stored if isinstance(parameter, Tensor)]

    def stored(self, keys: Tensor, values: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `first`, `last` and the bias of `first` as the module stores them: the views' inverse."""
        weight, bias = self._side_by_side(keys), self._side_by_side(thresholds)
        return (weight.transpose(1, 2), values, bias) if self.transposed else (weight, values.transpose(1, 2), bias)

    def weigh(self, module: nn.Module, scores: Sequence[Tensor]) -> Tensor:
        """Compute the neurons' weights [..., n] from each part's scores [..., n] by the module's own functions."""
        if self.joint:
            joined = torch.stack(list(scores), dim=-1).flatten(-2) if self.interleaved else torch.cat(list(scores), -1)
            return getattr(module, _JOINT)(joined)
        activation: Any = next(getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name))
        return activation(scores[0]) * scores[1] if self.gated else activation(scores[0])

    def _by_part(self, rows: Tensor) -> Tensor:
        if self.interleaved:
            return rows.unflatten(1, (self.neurons, self.parts)).transpose(1, 2)
        return rows.unflatten(1, (self.parts, self.neurons))

    def _side_by_side(self, rows: Tensor) -> Tensor:
        return (rows.transpose(1, 2) if self.interleaved else rows).flatten(1, 2)


def find_feed_forward(model: nn.Module) -> list[FeedForward | PackedExperts]:
    """List the feed-forward layers of a model in order; a model without any raises `UnsupportedArchitecture`."""
    layers: list[FeedForward | PackedExperts] = []
    for name, module in _beside_routers(model):
        kind = next((kind for kind in FEED_FORWARD if _fits(module, kind)), None)
        layer = packed_experts(module, name) if kind is None else replace(kind, name=name)
        if layer is not None:
            layers.append(layer)
    if not layers:
        near = sorted({type(m).__name__ for m in model.modules() if _MAY_BE.search(type(m).__name__)})
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no feed-forward layers that are known (modules that may be: "
            f"{', '.join(near) or 'none'}), and nothing was converted"
        )
    return layers


def uncovered(model: nn.Module, sites: Sequence[FeedForward | PackedExperts]) -> dict[str, Tensor]:
    """Return the matrices, by name, of layers, and of modules built as the feed-forward ones, that no site covers."""
    covered = {id(parameter) for site in sites for parameter in _parameters(model, site)}
    rest: dict[str, Tensor] = {}
    names = [name for name, module in model.named_modules() if attends(module)]
    lists = _lists([*names, *(site.name for site in sites)])
    mixers = _lists(name for name, module in model.named_modules() if moves_between_positions(module))
    children = ((at, model.get_submodule(at).named_children()) for at in dict.fromkeys([*lists, *mixers]))
    for path, layer in ((f"{at}.{name}", layer) for at, layers in children for name, layer in layers):
        beside = tuple(_beside(layer, path, sites))
        here = {
            name: parameter
            for name, parameter in layer.named_parameters(prefix=path)
            if parameter.ndim > 1 and id(parameter) not in covered and not name.startswith(beside)
        }
        if path.rpartition(".")[0] not in lists:
            linear = {id(part.weight) for part in layer.modules() if isinstance(part, nn.Linear | Conv1D)}
            here = {name: parameter for name, parameter in here.items() if id(parameter) in linear}
        rows = set(_choices(here, [site for site in sites if site.name.startswith(f"{path}.")]))
        rest |= {
            name: p
            for name, p in here.items()
            if not (p.ndim == 2 and (len(p) == 1 or any(len(p) == n and name.startswith(at) for at, n in rows)))
        }
    covered |= {id(parameter) for parameter in rest.values()}
    maps: dict[type, set[str]] = {}
    for site in sites:
        if isinstance(site, FeedForward):
            maps.setdefault(type(model.get_submodule(site.name)), set()).update((*site.first, site.last))
    for path, module in _beside_routers(model):  # built as another, but such that its output has another width
        for name in sorted(maps.get(type(module), ())):
            part = _linear(module, name)
            if part is not None and id(part.weight) not in covered:
                rest[f"{path}.{name}.weight"] = cast(Tensor, part.weight)
    return rest


def stored(module: nn.Module) -> Tensor:
    weight = cast(Tensor, module.weight)
    return weight.T if isinstance(module, Conv1D) else weight


def applied(module: nn.Module) -> Tensor:
    """The matrix [out, in] that a linear map applies: of one in adapters, what it makes of the rows of an identity."""
    inner = stored(getattr(module, ADAPTED, module)).detach()
    if isinstance(module, nn.Linear | Conv1D):
        return inner
    identity = torch.eye(inner.shape[1], dtype=inner.dtype, device=inner.device)
    with evaluating(module), torch.no_grad():
        return (module.forward(identity) - module.forward(0 * identity[:1])).T


def _beside_routers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside of routers, which may have layers of their own (Zaya), by name."""
    routers: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if _ROUTER.search(type(module).__name__):
            routers += (f"{name}.",)
        if not f"{name}.".startswith(routers):
            yield name, module


def _parameters(model: nn.Module, site: FeedForward | PackedExperts) -> Iterator[Tensor]:
    if isinstance(site, PackedExperts):
        yield from site.parameters(model.get_submodule(site.name))
        return
    for path in (*site.first, site.last):
        yield from model.get_submodule(f"{site.name}.{path}".strip(".")).parameters()


def _choices(rest: Mapping[str, Tensor], sites: Sequence[FeedForward | PackedExperts]) -> Iterator[tuple[str, int]]:
    """Yield prefixes beside the experts where a router may be, with its number of rows, one for each expert."""

    def beside(path: str) -> str:
        return f"{path.rpartition('.')[0]}.".lstrip(".")

    lists = Counter(site.name.rpartition(".")[0] for site in sites)
    yield from ((beside(path), count) for path, count in lists.items())
    yield from ((beside(site.name), site.num_experts) for site in sites if isinstance(site, PackedExperts))
    yield from ((beside(name.rpartition(".")[0]), len(p)) for name, p in rest.items() if p.ndim > 2)


def _lists(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name[: match.start()] for name in names if (match := _LAYER.search(name))))


def _beside(layer: nn.Module, path: str, sites: Sequence[FeedForward | PackedExperts]) -> Iterator[str]:
    if attends(layer) and sum(attends(module) for module in layer.modules()) == 1:  # a list of attention modules
        yield f"{path}."
    for name, module in layer.named_modules(prefix=path):
        inside = module is not layer and not any(f"{site.name}.".startswith(f"{name}.") for site in sites)
        if inside and (attends(module) or _BESIDE.search(type(module).__name__)):
            yield f"{name}."
        elif inside and moves_between_positions(module):
            block = name.rpartition(".")[0]  # what stands beside a convolution belongs to it, except in a layer
            convolution = isinstance(module, CONVOLUTIONS) and not block.rpartition(".")[2].isdigit()
            yield f"{block if convolution else name}."


def _fits(module: nn.Module, layer: FeedForward) -> bool:
    out = _linear(module, layer.last)
    if out is None:
        return False
    width, neurons = stored(out).shape
    rows = 2 * neurons if layer.fused else neurons
    maps = (_linear(module, path) for path in layer.first)
    return all(part is not None and stored(part).shape == (rows, width) for part in maps)


def _linear(module: nn.Module, path: str) -> nn.Module | None:
    inner: nn.Module | None = module
    for name in path.split("."):
        inner = None if inner is None else inner._modules.get(name)
    inner = getattr(inner, ADAPTED, inner)
    return inner if isinstance(inner, nn.Linear | Conv1D) else None


def packed_experts(module: nn.Module, name: str = "") -> PackedExperts | None:
    """Find how a module of experts is read, by comparing on random tokens (on meta: the first way); or None."""
    readings = list(_readings(module, name))
    if readings and any(parameter.is_meta for parameter in module.parameters()):
        return readings[0]
    return next((reading for reading in readings if _agrees(module, reading)), None)


def by_expert(index: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (expert, tokens, places) for a router's index [tokens, places]; numbers of no expert are skipped."""
    for expert in cast("list[int]", index.unique().tolist()):
        if 0 <= expert < num_experts:
            tokens, places = torch.where(index == expert)
            yield expert, tokens, places


def neuron_weights(module: nn.Module, experts: PackedExperts, number: int, hidden: Tensor) -> Tensor:
    """Compute the weights of one expert's neurons [..., n] for its tokens [..., d], before the router's weight."""
    thresholds = experts.thresholds(module)
    scores = [
        functional.linear(hidden, key, None if thresholds is None else thresholds[number, part])
        for part, key in enumerate(experts.keys(module)[number])
    ]
    return experts.weigh(module, scores)


def _readings(module: nn.Module, name: str) -> Iterator[PackedExperts]:
    stored = [(key, p) for key, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.is_floating_point()]
    if len(stored) != 2 or len({len(p) for _, p in stored}) > 1:
        return
    taken = len(inspect.signature(module.forward).parameters)
    if taken == 2:
        return
    (first, into), (last, out) = stored
    count = len(into)
    for transposed in (False, True):
        rows, width = tuple(into.shape[1:])[:: -1 if transposed else 1]
        there, neurons = tuple(out.shape[1:])[:: -1 if transposed else 1]
        if there == width and rows in (neurons, 2 * neurons):
            gated = rows != neurons
            for joint, interleaved in product((True, False), (False, True)) if gated else ((False, False),):
                form = (gated, transposed, interleaved, joint, taken == 1)
                yield PackedExperts(name, first, last, count, neurons, width, *form)


@torch.no_grad()
def _agrees(module: nn.Module, experts: PackedExperts) -> bool:
    example = getattr(module, experts.first)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(example)

    scores = drawn(experts.parts, _TOKENS, experts.neurons)
    other = scores.clone()
    other[..., ::2] = drawn(experts.parts, _TOKENS, len(range(0, experts.neurons, 2)))
    index = torch.stack([torch.arange(_TOKENS), torch.arange(1, _TOKENS + 1)], dim=1) % experts.num_experts
    index, routing = index.to(example.device), drawn(_TOKENS, 2).sigmoid()
    with evaluating(module):
        try:
            weights, beside = experts.weigh(module, list(scores)), experts.weigh(module, list(other))
            rolled = experts.weigh(module, list(scores.roll(1, dims=-1)))
            if weights.shape != scores.shape[1:] or not _close(rolled, weights.roll(1, dims=-1)):
                return False
            if experts.neurons > 1 and not _close(beside[:, 1::2], weights[:, 1::2]):
                return False
            if experts.sorted:
                hidden = drawn(experts.num_experts, 2, experts.width)
                ours = torch.stack([_written(module, experts, number, tokens) for number, tokens in enumerate(hidden)])
                return _close(cast(Any, module)(hidden.flatten(0, 1)), ours.flatten(0, 1))
            hidden = drawn(_TOKENS, experts.width)
            ours = torch.zeros_like(hidden)
            for number, tokens, places in by_expert(index, experts.num_experts):
                written = _written(module, experts, number, hidden[tokens])
                ours.index_add_(0, tokens, (written * routing[tokens, places, None]).to(ours.dtype))
            return _close(cast(Any, module)(hidden, index, routing), ours)
        except (AttributeError, IndexError, RuntimeError, StopIteration, TypeError, ValueError):
            return False  # a reading of the shapes that the module's code is not of


def _written(module: nn.Module, experts: PackedExperts, number: int, hidden: Tensor) -> Tensor:
    """Compute one expert's output for its tokens, before the router's weight."""
    weights, bias = neuron_weights(module, experts, number, hidden), experts.output_bias(module)
    return functional.linear(weights, experts.values(module)[number].T, None if bias is None else bias[number])


def _close(ours: object, theirs: Tensor) -> bool:
    if not isinstance(ours, Tensor) or ours.shape != theirs.shape:
        return False
    rounding = max(torch.finfo(theirs.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    return bool((ours - theirs).abs().amax() <= rounding * theirs.abs().amax())
