"""The held pass: a forward pass that makes a logit an affine function of its sources, and backward passes of it.

Scales of norms, weights of attention, activations of feed-forward layers and gates keep their values in the pass. What
remains between the first layer and the logits is affine, and its derivative times each source says what that source
carries to the answer (explain.md, "The mathematics"). The forward pass is the model's own: only derivatives are held,
and a `Switch` sends a backward pass either along the held derivatives or along those of the model.

A sublayer is found by its place. What calls the attention interface passes derivatives through its values. The
`writers` that the caller names write entries. Every other module of a layer that owns a matrix, and lies in no block
that attends, is a whole source (mixers). It is a gate if its output is not a vector of the stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.anatomy.mixing import moves_between_positions
from attnflow.models.anatomy.sites import Site, models_around
from attnflow.models.passes.beside import weighed
from attnflow.models.passes.evaluation import REFUSALS, refusal, still
from attnflow.models.passes.interception import (
    AttentionCall,
    Output,
    Proceed,
    intercept,
    readable_implementation,
)
from attnflow.models.passes.reads import HeldNorm, hold, may_be_norm
from attnflow.models.passes.recording import alike, owns_matrix
from attnflow.models.passes.stream import added_to, lists_of
from attnflow.models.passes.switch import Constant, Either, Route, Routed, Secants, Stop, Switch, carried
from attnflow.models.passes.watching import (
    Arguments,
    Call,
    Watch,
    handed_again,
    hidden_of,
    mapped,
    tensors_in,
    with_hidden,
)
from attnflow.models.subject import Subject


@dataclass(frozen=True, eq=False)
class HeldAttention:
    """One call of an attention in the pass; weights [heads, queries, keys], values [heads, keys, value_dim]."""

    site: Site
    layer: int
    kind: str  # "" for the answering stream's own, "encoder" for an encoder's, "cross" for that to an encoder
    first_head: int  # number of its first head among those of the layer, which may attend more than once
    weights: Tensor
    values: Tensor
    output: Tensor  # of the graph, [1, queries, heads, value_dim]
    added: Tensor | None  # what an attached bias adds to the scores, [1, heads or 1, queries, keys]


@dataclass(frozen=True, eq=False)
class Written:
    """What one call of a module wrote, as a source: entries, or a whole vector for each position."""

    path: str
    prefix: str  # the path of the list of layers that it lies in
    layer: int
    output: Tensor  # of the graph
    value: Tensor  # the same, before the model wrote into it
    call: Call  # its arguments are those of the pass
    whole: bool


@dataclass(frozen=True, eq=False)
class Arrival:
    """The stream where it enters a layer; `first` is a source."""

    prefix: str
    layer: int
    hidden: Tensor
    first: bool


@dataclass(eq=False)
class Derivatives:
    """Gradients of one number by all that a `HeldPass` recorded, in its order; zeros where nothing reaches it."""

    arrivals: list[Tensor]
    attentions: list[Tensor]
    written: list[Tensor]
    ends: Mapping[str, Tensor]  # by path of the list of layers
    constants: dict[str, float]  # what biases carry, by the path of their layer; "" outside of layers


class HeldPass:
    """One forward pass of a model with its graph; `with` frees it. Memory is that of a step of training.

    `writers` are the modules, by path, whose outputs are sums of entries; calls of `scorers` are kept in `scored`. With
    `gated`, nothing but values passes through an attention module: it must not add its input to its output. Unless
    `whole`, a model that can computes the logits of the last position alone. The call itself runs inside `watching`.
    """

    def __init__(
        self,
        subject: Subject,
        inputs: Mapping[str, Tensor],
        writers: Mapping[str, nn.Module],
        scorers: Mapping[str, nn.Module] = MappingProxyType({}),
        *,
        gated: bool = False,
        whole: bool = False,
        watching: AbstractContextManager[object] | None = None,
    ) -> None:
        self.subject, self.switch = subject, Switch()
        self.arguments = {**(subject.uncached if whole else subject.sparing), **inputs}
        self.attentions: list[HeldAttention] = []
        self.written: list[Written] = []
        self.arrivals: list[Arrival] = []
        self.routes: list[Route] = []
        self.halves = lists_of(subject)  # {path of a list of layers: "" or "encoder"}
        self.sites = {s.module: s for s in subject.sites if s.layers in self.halves and s.name != s.layers}
        self._writers = {module: path for path, module in writers.items() if self.prefix(path)}
        self._scorers = {path: module for path, module in scorers.items() if self.prefix(path)}
        self.scored: dict[tuple[str, int], Call] = {}  # calls of scorers, by path and layer
        self.final_norm: HeldNorm | None = None  # between the last layer and the unembedding
        self._biases: dict[int, Constant] = {}
        self._norms: list[Constant] = []  # biases of norms, one for each call
        self._entered: list[tuple[nn.Module, list[tuple[Tensor, Tensor]]]] = []
        self._first: dict[str, tuple[Tensor, Tensor]] = {}
        self.ends: dict[str, Tensor] = {}  # what the last layer of each list put out
        self._open: list[tuple[str, int]] = []  # the layers that are being computed: path, and number
        with still(subject.model), self._watched(gated), self._with_biases(), watching or nullcontext():
            try:
                self.output = cast(Callable[..., Any], subject.model)(**self.arguments)
            except REFUSALS as error:
                raise UnsupportedArchitecture(
                    f"{subject.kind} does not run on these inputs ({type(error).__name__}: {refusal(error)})"
                ) from error
        if not self._first:
            raise UnsupportedArchitecture(f"no layer of {subject.kind} ran on these inputs")

    def prefix(self, path: str) -> str:
        """The list of layers that a module lies in; "" for none."""
        return max((p for p in self.halves if path.startswith(f"{p}.")), key=len, default="")

    def number(self, path: str) -> int:
        return int(path[len(self.prefix(path)) + 1 :].split(".")[0])

    def derivatives(self, value: Tensor, held: bool) -> Derivatives:
        """Differentiate a number of the pass by what was recorded: one backward pass."""
        points = [
            *(arrival.hidden for arrival in self.arrivals),
            *(attention.output for attention in self.attentions),
            *(written.output for written in self.written),
            *self.ends.values(),
        ]
        reached = [point for point in points if point.requires_grad]
        constants = [*self._biases.values(), *self._norms]
        for route in self.routes:
            route.constant = 0.0
        self.switch.held = held
        grads = cast(Any, torch.autograd.grad)(
            value, [*reached, *(c.edge for c in constants)], retain_graph=True, allow_unused=True
        )
        places: dict[str, float] = defaultdict(float)
        for constant, amount in zip(constants, carried(constants, grads[len(reached) :]), strict=True):
            places[constant.place] += amount
        for route in self.routes:
            places[route.place] += route.constant
        of = dict(zip(map(id, reached), grads, strict=False))
        filled = [torch.zeros_like(p) if (grad := of.get(id(p))) is None else grad for p in points]
        rest, parts = iter(filled), (self.arrivals, self.attentions, self.written, self.ends)
        arrivals, attentions, written, ends = ([next(rest) for _ in part] for part in parts)
        return Derivatives(arrivals, attentions, written, dict(zip(self.ends, ends, strict=True)), places)

    # -------- the forward pass

    @contextmanager
    def _watched(self, gated: bool) -> Generator[None]:
        model = self.subject.model
        layers = {f"{p}.{name}": layer for p in self.halves for name, layer in model.get_submodule(p).named_children()}
        whole = {path: m for prefix in self.halves for path, m in self._whole(prefix)}
        cut = (*whole.values(), *self._writers, *self._scorers.values())
        quiet = {inner for module in cut for inner in module.modules()}  # nothing held passes
        small = {n: m for n, m in model.named_modules() if may_be_norm(m) and m not in quiet}
        with ExitStack() as stack:
            stack.enter_context(Watch(small, leave=self._held_small))
            stack.enter_context(Watch(layers, self._enter_layer, self._leave_layer))
            written = {path: m for m, path in self._writers.items()} | whole
            stack.enter_context(Watch(written, leave=self._leave_written))
            stack.enter_context(
                Watch(self._scorers, lambda c: self.scored.update({(str(c.name), self._open[-1][1]): c}))
            )
            if gated:
                sites = {s.name: s.module for s in self.sites.values()}
                stack.enter_context(Watch(sites, self._enter_site, self._leave_site))
            around = models_around(list(self.sites.values()))
            (implementation, *_) = [readable_implementation(site.owner.config) for site in self.sites.values()]
            interceptors = dict.fromkeys(self.sites, self._attend)
            looking = intercept(around, interceptors, role="look", implementation=implementation)
            stack.callback(looking.remove)
            stack.enter_context(Secants(self.secant))
            yield

    @contextmanager
    def _with_biases(self) -> Generator[None]:
        """Let constants be differentiated: they carry a part of the value."""
        model = self.subject.model
        owners = [module for module in model.modules() if owns_matrix(module) or not may_be_norm(module)]
        every = (*model.named_parameters(), *model.named_buffers())
        mine = {id(t) for m in owners for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
        named = {n: t for n, t in every if id(t) in mine and n.endswith("bias") and t.is_floating_point()}
        flags = [(bias, bias.requires_grad) for bias in named.values()]
        try:
            for name, bias in named.items():
                bias.requires_grad_(True)
                place = f"{self.prefix(name)}.{self.number(name)}" if self.prefix(name) else ""
                self._biases[id(bias)] = Constant(bias.detach(), get_gradient_edge(bias), place)
            yield
        finally:
            for bias, flag in flags:
                bias.requires_grad_(flag)

    def _whole(self, prefix: str) -> Generator[tuple[str, nn.Module]]:
        """The modules of a list's layers that are neither attention nor writers, the outermost of each."""
        kept = {*self.sites, *self._writers, *self._scorers.values()}

        def below(path: str, module: nn.Module, passes: bool) -> Generator[tuple[str, nn.Module]]:
            for name, child in module.named_children():
                place, parts = f"{path}.{name}", set(child.modules())
                if child in kept or not any(map(owns_matrix, parts)):
                    continue
                if not parts & kept and (not passes or moves_between_positions(child)):
                    yield place, child
                elif parts & kept:
                    listed = isinstance(child, nn.ModuleList)
                    yield from below(place, child, passes or bool(parts & set(self.sites) and not listed))

        for name, layer in self.subject.model.get_submodule(prefix).named_children():
            yield from below(f"{prefix}.{name}", layer, False)

    def _enter_layer(self, call: Call) -> Arguments | None:
        path = str(call.name)
        prefix, hidden = path.rpartition(".")[0], hidden_of(call)
        # a layer that runs again counts as a further one
        number = self.number(path) + call.number * len(cast(nn.ModuleList, self.subject.model.get_submodule(prefix)))
        self._open.append((path, number))
        continues = any(self.halves[other] == self.halves[prefix] for other in self._first) and hidden.requires_grad
        first = not continues and prefix not in self._first
        if first:
            leaf = hidden.detach().requires_grad_()
            self._first[prefix] = hidden.detach(), leaf
            hidden = leaf
        self.arrivals.append(Arrival(prefix, number, hidden, first))
        if first:
            return with_hidden(call, hidden.clone())
        return handed_again(call, *self._first[prefix]) if prefix in self._first else None

    def _leave_layer(self, call: Call, output: object) -> None:
        self._open.pop()
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if tensors:
            self.ends[str(call.name).rpartition(".")[0]] = tensors[0]

    def _leave_written(self, call: Call, output: object) -> object:
        path = str(call.name)
        prefix = self.prefix(path)

        def begun(tensor: Tensor) -> Tensor:
            cut = Stop.apply(self.switch, tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
            return cast(Tensor, cut)

        cut = mapped(output, begun)
        tensors = tensors_in(cut)
        stream = self._first[prefix][0].shape if prefix in self._first else torch.Size()
        whole = call.module not in self._writers
        main = next((t for t in tensors if not whole or alike(t.shape, stream)), None)
        if main is not None:
            self.written.append(Written(path, prefix, self._open[-1][1], main, main.detach().clone(), call, whole))
        return cut

    def _held_small(self, call: Call, output: object) -> Tensor | None:
        """Hold a norm at its scale; outside of layers, an activation at its quotient."""
        given = (*call.args, *call.kwargs.values())
        if len(given) != 1 or not isinstance(x := given[0], Tensor) or not isinstance(output, Tensor):
            return None
        if not x.requires_grad or not output.requires_grad:
            return None
        norm = hold(call.module, x.detach(), output.detach())
        if norm is None:
            flat = not any(True for _ in call.module.parameters())
            return self.secant(x, output) if flat and x.shape == output.shape else None
        if not self._open and any(torch.equal(x, end) for end in self.ends.values() if end.shape == x.shape):
            self.final_norm = norm
        bias = norm.bias.detach().requires_grad_()
        self._norms.append(Constant(bias.detach(), get_gradient_edge(bias), self._open[-1][0] if self._open else ""))
        return Either.apply(self.switch, output, norm.gain * norm.reduced(x) * norm.scale + bias)

    def secant(self, x: Tensor, real: Tensor) -> Tensor | None:
        """An activation between the last layer and the logits, linear at its quotient in this pass."""
        if self._open or not self.arrivals:
            return None
        small = x.detach().abs() < 1e-12
        quotient = (real / torch.where(small, torch.ones_like(x), x)).detach().masked_fill(small, 0.0)
        return Either.apply(self.switch, real, x * quotient)

    # -------- attention

    def _enter_site(self, call: Call) -> Arguments:
        entered: list[tuple[Tensor, Tensor]] = []

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            behind = Stop.apply(self.switch, value)
            entered.append((value, behind))
            return behind

        arguments = tuple(map(cut, call.args)), {name: cut(value) for name, value in call.kwargs.items()}
        self._entered.append((call.module, entered))
        return arguments

    def _leave_site(self, call: Call, output: object) -> None:
        self._entered.pop()

    def _attend(self, call: AttentionCall, proceed: Proceed) -> Output:
        entered = next((pairs for module, pairs in reversed(self._entered) if module is call.module), [])
        value = call.value
        if value.requires_grad and entered:
            inner = [self._biases[id(p)] for p in call.module.parameters() if id(p) in self._biases]
            route = Route(value, [cut for _, cut in entered], inner, self._open[-1][0])
            self.routes.append(route)
            value = Routed.apply(self.switch, value, route, *[outer for outer, _ in entered])
        with torch.no_grad():
            added = added_to(call)
        output, table = weighed(call.replace(value=value), proceed)
        values = value[0].repeat_interleave(len(table) // value.shape[1], 0)
        output = Either.apply(self.switch, output, (table @ values).transpose(0, 1)[None])
        site, number = self.sites[call.module], self._open[-1][1]
        same = (a for a in self.attentions if (a.layer, a.kind) == (number, self._kind(site)))
        first = sum(len(attention.weights) for attention in same)
        held = HeldAttention(site, number, self._kind(site), first, table, values.detach(), output, added)
        self.attentions.append(held)
        return output, None

    def _kind(self, site: Site) -> str:
        return "cross" if site.kind == "cross" else self.halves[site.layers]
