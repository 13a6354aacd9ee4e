"""Splits what one component writes into a score: attention by head and source token, feed-forward by its entries.

With norms held, a score is affine in the component's value at one position, so its share is the product of the value
and the gradient of the score. The model then runs again, up to the component's output, which is a sum over the output
of its attention, or over the input of its last matrix. That tensor is made a leaf of automatic differentiation. The
gradient by it gives the share of each head and source token, or of each entry. A last run with zeros in its place
gives what biases write, and everything must add up to the share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core.checks import integer, preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.attribution import ComponentZoom, Part, ScoreAttribution, Share
from attnflow.geometry.row import check_again, row_of
from attnflow.models.feed_forward import PackedExperts, neuron_weights, packed_experts
from attnflow.models.interception import AttentionCall, Interceptor, Output, Proceed, intercept
from attnflow.models.recording import Component, owns_matrix
from attnflow.models.sites import Site, models_around
from attnflow.models.stream import ResidualStream, Seen, added_to
from attnflow.models.watching import Arguments, Call, Watch, hidden_of, tensors_in, with_hidden

Side = Literal["query", "key"]
Texts = Callable[[Seen, Literal["self", "cross"]], Sequence[str]]  # "cross": the keys are the encoder's
_CLOSE: Final = 1e-5  # of the sum of magnitudes: how far the parts may be from the share
_TITLE: Final = re.compile(r"layer (\d+) (\S+)")
_EXPERT: Final = re.compile(r"\.(\d+)\.")


class _Done(Exception):
    """The component has its output."""


@dataclass(frozen=True, eq=False)
class _Block:
    """Parts of one head, or of one expert; `places` are source tokens or entries."""

    places: Tensor
    weights: Tensor
    shares: Tensor  # [2, parts]: centred, raw
    head: int | None = None
    expert: int | None = None


@dataclass(frozen=True, eq=False)
class _Leaf:
    tensor: Tensor
    zero: Tensor  # stands in for it in the pass that gives what biases write
    split: Callable[[Tensor], list[_Block]]  # from the gradients by the tensor, [2, ...]: of centred and raw scores
    seen: Seen | None = None  # the call of attention


def zoomed(
    stream: ResidualStream,
    seen: Seen,
    titles: Mapping[int, str],
    texts: Texts,
    result: ScoreAttribution,
    component: str,
    side: Side,
    key: int,
    head: int,
    count: int | None,
) -> ComponentZoom:
    """Split the share of a component in the score of one head and key of a recorded pass.

    `texts` names the keys of a call of attention.
    """
    names = result.components if side == "query" else result.key_components
    if component not in names:
        raise ValueError(f"component must be one of {preview(names)} on the side of the {side}, got {component!r}")
    index = next(number for number, title in titles.items() if title == component)
    found = _TITLE.search(component)
    kind = "attention" if found is not None and found[2].endswith("attention") else "feed-forward"
    if found is None or found[2] == "mixer":
        raise UnsupportedArchitecture(
            f"{component!r} is {'one vector of each token' if found is None else 'a recurrence or convolution'}, which "
            "has no heads or entries to split it by; zoom into an attention or a feed-forward component"
        )
    position = result.query if side == "query" else key
    stream.complete()
    with stream.still():
        gradient, value = _gradient(stream, seen, index, side, result.query, key, head)
        parts = _Pass(replace(stream, _norms={}), stream.components[index], kind, position)
        blocks, rest, read = parts.split(gradient)
    total = (gradient * value).flatten(1).sum(1)
    shares = torch.cat([total.new_zeros(2, 0), *(block.shares for block in blocks)], dim=1)
    difference = (shares.sum(1) + rest - total).abs().amax()
    size = float(shares.abs().sum(1).amax() + rest.abs().amax()) or 1.0
    if not difference <= _CLOSE * size:
        raise UnsupportedArchitecture(
            f"{component} ({parts.component.path}): its parts do not add up to its share of the score (they differ by "
            f"{float(difference) / size:.2g} of their size, {_CLOSE:g} is allowed), so that it is not split"
        )
    most = shares.shape[1] if count is None else min(integer("count", count, 1), shares.shape[1])
    order = shares[0].abs().argsort(descending=True, stable=True)
    listed = _listed(blocks, order[:most].tolist(), [] if read is None else _sources(stream, read, texts))
    others = shares[:, order[most:]].sum(1)
    return ComponentZoom(
        result.model, result.layer, head, result.attention, result.query, key, component, int(found[1]), side, position,
        cast(Any, kind), listed, shares.shape[1] - most, *(Share(*pair.tolist()) for pair in (others, rest, total)),
    )  # fmt: skip


def _gradient(
    stream: ResidualStream, seen: Seen, index: int, side: Side, query: int, key: int, head: int
) -> tuple[Tensor, Tensor]:
    """Differentiate the score by a component: the gradients [2, ...] of centred and raw score, and its value."""
    row = row_of(seen.call, seen.output, head, query, seen.added)
    component = stream.components[index]
    leaf = cast(Tensor, component.value).clone().requires_grad_()
    call = stream.query_and_key([leaf if one is component else one.value for one in stream.components])
    kv = head // (call.query.shape[1] // call.key.shape[1])
    keys, queries = call.key[0, kv].double(), call.query[0, head, query].double()
    if side == "query":
        products = row.scaling * (keys.detach() @ queries)
        centred = float(row.slope[key]) * products[key] - (row.weights * row.slope).to(products.device) @ products
    else:  # the component is at each key, and its mean over the row would be one over all of them
        products = row.scaling * (keys @ queries.detach())
        centred = products[key]
    check_again(products.detach().cpu(), row.product)
    grads = [torch.autograd.grad(one, leaf, retain_graph=True)[0] for one in (centred, products[key])]
    return torch.stack(grads).double(), leaf.detach().double()


@dataclass(eq=False)
class _Pass:
    """Passes of a model up to the output of one component, with leaves inside it and norms held after them."""

    stream: ResidualStream
    component: Component
    kind: str
    position: int
    leaves: dict[tuple[str, int], _Leaf] = field(default_factory=dict[tuple[str, int], _Leaf])
    zeros: Mapping[tuple[str, int], Tensor] = field(default_factory=dict[tuple[str, int], Tensor])
    experts: dict[str, PackedExperts | None] = field(default_factory=dict[str, "PackedExperts | None"])

    def split(self, gradient: Tensor) -> tuple[list[_Block], Tensor, Seen | None]:
        """Return the parts, what biases write [2], and the call if they are of attention."""
        inner = self.stream.model.get_submodule(self.component.path).named_modules(prefix=self.component.path)
        if self.kind == "feed-forward":  # before they are watched, since the readings are tried on the modules
            self.experts = {name: packed_experts(module, name) for name, module in inner if _packed(module)}
        output = self._output()
        keys, tensors = list(self.leaves), [leaf.tensor for leaf in self.leaves.values()]
        grads = [
            torch.autograd.grad(output, tensors, one.to(output.dtype), retain_graph=True, allow_unused=True)
            if tensors and output.requires_grad
            else [None] * len(tensors)
            for one in gradient
        ]
        used = [key for key, grad in zip(keys, grads[1], strict=True) if grad is not None]
        used = used[-1:] if self.kind == "attention" else used  # earlier ones act through the stream, as for a gate
        if not used:
            raise UnsupportedArchitecture(
                f"{self.component.path} does not write a sum over "
                + ("tokens by an attention on the interface" if self.kind == "attention" else "entries of a matrix")
            )
        pulled = {key: torch.stack([cast(Tensor, grad[keys.index(key)]) for grad in grads]).double() for key in used}
        blocks = [block for key, grad in pulled.items() for block in self.leaves[key].split(grad)]
        if sum(block.head is None and block.expert is None for block in blocks) > 1:
            raise UnsupportedArchitecture(
                f"{self.component.path} writes by several matrices, so its entries have no numbers"
            )
        seen = self.leaves[used[-1]].seen
        self.zeros = {key: self.leaves[key].zero for key in used}
        rest = self._output().detach().double()
        return blocks, (gradient * rest).flatten(1).sum(1), seen

    def _output(self) -> Tensor:
        stream, path = self.stream, self.component.path
        self.leaves = {}
        prefix = max((one for one in stream.lists if path.startswith(one)), key=len)
        layer = ".".join([prefix, path[len(prefix) + 1 :].split(".")[0], ""])
        sites = [site for site in stream.sites if site.name.startswith(layer) and self.kind == "attention"]
        looks: dict[nn.Module, Interceptor] = {site.module: self._look(site) for site in sites}
        module = stream.model.get_submodule(path)
        inner = module.named_modules(prefix=path) if self.kind == "feed-forward" else ()
        watched = {name: one for name, one in inner if owns_matrix(one)} | {path: module}
        found: list[Tensor] = []

        def leave(call: Call, output: object) -> object:
            inside = self.kind == "feed-forward" and self._inside(call)
            changed = self._after_matrix(call, output) if inside and owns_matrix(call.module) else None
            if call.module is module and call.number == self.component.number:
                found.append(self._main(output if changed is None else changed))
                raise _Done
            return changed

        interception = intercept(
            models_around(stream.sites),
            looks or {stream.site.module: _through},  # it sets the implementation, as in the other passes
            role="pool",
            implementation=stream.implementation,
        )
        with ExitStack() as stack:
            stack.callback(interception.remove)
            stack.enter_context(stream._held())
            stack.enter_context(Watch(watched, self._before_matrix, leave))
            try:
                stream.model(**stream.inputs)
            except _Done:
                return found[0]
        raise UnsupportedArchitecture(f"{path} was not called again in a second pass, so that it is not split")

    def _main(self, output: object) -> Tensor:
        value = cast(Tensor, self.component.value)
        recorded = tensors_in(self.component.output)
        place = next(n for n, one in enumerate(recorded) if one.shape == value.shape and torch.equal(one, value))
        return tensors_in(output)[place]

    def _inside(self, call: Call) -> bool:
        one: Call | None = call
        while one is not None and (one.name, one.number) != (self.component.path, self.component.number):
            one = one.caller
        return one is not None

    def _leaf(self, key: tuple[str, int], tensor: Tensor, zero: Tensor, split: Any, seen: Seen | None = None) -> Tensor:
        leaf = self.zeros.get(key, tensor).detach().clone().requires_grad_()
        self.leaves[key] = _Leaf(leaf, zero, split, seen)
        return leaf

    # -------- attention

    def _look(self, site: Site) -> Interceptor:
        calls = 0

        def look(call: AttentionCall, proceed: Proceed) -> Output:
            nonlocal calls
            added = added_to(call)  # before the call, which uses up what its hooks have seen
            output, weights = proceed(call)
            key, calls = (site.name, calls), calls + 1
            seen = Seen(call, output.detach(), added)
            leaf = self._leaf(key, output, torch.zeros_like(output), partial(self._heads, seen), seen)
            return leaf, weights

        return look

    @torch.no_grad()
    def _heads(self, seen: Seen, gradient: Tensor) -> list[_Block]:
        """Split by head and source token: a_pt * (gradient of the head's output . v_t)."""
        call = seen.call
        num_heads, num_values = call.query.shape[1], call.value.shape[1]
        gradient = gradient.reshape(2, call.query.shape[0], call.query.shape[2], num_heads, -1)
        self._check_place(_row(gradient.flatten(1, 2).flatten(2)))
        blocks: list[_Block] = []
        for head in range(num_heads):
            row = row_of(call, seen.output, head, self.position, seen.added)
            value = call.value[0, head * num_values // num_heads].double()
            shares = row.weights * (gradient[:, 0, self.position, head] @ value.mT)
            sources = row.allowed.nonzero().flatten()
            blocks.append(_Block(sources, row.weights[sources], shares[:, sources], head=head))
        return blocks

    def _check_place(self, row: int | None) -> None:
        if row is not None and row != self.position:
            raise UnsupportedArchitecture(
                f"{self.component.path} writes at position {self.position} what attention read at {row}: its order of "
                "positions is another one, so that it is not split"
            )

    # -------- feed-forward

    def _before_matrix(self, call: Call) -> Arguments | None:
        """Make the input of a matrix a leaf: the output depends on the leaves of the last matrices alone."""
        if self.kind != "feed-forward" or not owns_matrix(call.module) or _packed(call.module):
            return None
        if not self._inside(call):
            return None
        hidden = hidden_of(call)
        match = _EXPERT.search(call.name[len(self.component.path) :] + ".")
        expert = None if match is None else int(match[1])

        def split(gradient: Tensor) -> list[_Block]:
            row = _row(gradient.flatten(1, -2))
            if row is None:
                return []
            weights = hidden.detach().double().flatten(0, -2)[row]
            shares = gradient.flatten(1, -2)[:, row] * weights
            return [_Block(torch.arange(len(weights), device="cpu"), weights, shares, expert=expert)]

        return with_hidden(call, self._leaf((call.name, call.number), hidden, torch.zeros_like(hidden), split))

    def _after_matrix(self, call: Call, output: object) -> object:
        """Drop the leaf of a matrix that does not write into the stream; make one of what stored experts put out."""
        key, width = (str(call.name), call.number), cast(Tensor, self.component.value).shape[-1]
        if not _packed(call.module):
            if not isinstance(output, Tensor) or output.shape[-1] != width:  # a router, or an earlier matrix
                self.leaves.pop(key, None)
            return None
        experts = self.experts[key[0]]
        given = [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor)]
        index = next((one for one in given if not one.is_floating_point()), None)
        weights = [one for one in given if index is not None and one is not index and one.shape == index.shape]
        if experts is None or index is None or not weights or not isinstance(output, Tensor):
            raise UnsupportedArchitecture(
                f"{key[0]} has a parameter of three dimensions, such as experts stored together, in a form that is not "
                f"read, so that {self.component.path} is not split into entries"
            )
        index, routing, hidden = (one.detach().flatten(0, -2) for one in (index, weights[-1], hidden_of(call)))
        routing = routing.where(index < experts.num_experts, 0.0)
        bias, zero = experts.output_bias(call.module), torch.zeros_like(output)
        if bias is not None:
            zero = (routing[..., None] * bias[index.clamp(max=experts.num_experts - 1)]).sum(-2).to(output)

        @torch.no_grad()
        def split(gradient: Tensor) -> list[_Block]:
            row = _row(gradient.flatten(1, -2))
            blocks: list[_Block] = []
            for expert, factor in [] if row is None else zip(index[row].tolist(), routing[row].double(), strict=True):
                if 0 <= expert < experts.num_experts:
                    factors = factor * neuron_weights(call.module, experts, expert, hidden[row]).double()
                    values = experts.values(call.module)[expert].double()
                    shares = factors * (gradient.flatten(1, -2)[:, row] @ values.mT)
                    blocks.append(_Block(torch.arange(len(factors), device="cpu"), factors, shares, expert=expert))
            return blocks

        return self._leaf(key, output, zero.reshape(output.shape), split)


def _sources(stream: ResidualStream, seen: Seen, texts: Texts) -> Sequence[str]:
    site = next(site for site in stream.sites if site.module is seen.call.module)
    return texts(seen, "cross" if site.kind == "cross" or site.part == "encoder" else "self")


def _through(call: AttentionCall, proceed: Proceed) -> Output:
    return proceed(call)


def _packed(module: nn.Module) -> bool:
    return any(p is not None and p.ndim == 3 for p in module._parameters.values())


def _row(gradient: Tensor) -> int | None:
    """The one row of [2, rows, width] that is not zero; None if all are."""
    rows: list[int] = gradient.abs().amax((0, 2)).nonzero().flatten().tolist()
    if len(rows) > 1:
        raise UnsupportedArchitecture(
            "what the component writes at one position was made of several, so it is not split"
        )
    return rows[0] if rows else None


def _listed(blocks: Sequence[_Block], order: Sequence[int], texts: Sequence[str]) -> tuple[Part, ...]:
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block.places))
    listed: list[Part] = []
    for number in order:
        which = next(n for n, end in enumerate(starts[1:]) if number < end)
        block, at = blocks[which], number - starts[which]
        place, weight, shares = int(block.places[at]), float(block.weights[at]), block.shares[:, at].tolist()
        if block.head is None:
            listed.append(Part(None, None, "", block.expert, place, weight, *shares))
        else:
            listed.append(Part(block.head, place, texts[place], None, None, weight, *shares))
    return tuple(listed)
