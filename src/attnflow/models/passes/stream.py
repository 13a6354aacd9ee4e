"""The recorded pass: what each sublayer added to the stream before one attention, and that attention's call.

`ResidualStream` runs a model up to one attention module, and a `Recorder` notes its summands. Afterwards it can run the
same code again with each sublayer replaced by a given output, and with norms held. Queries and keys are then an affine
function of those outputs, whatever lies between them (residual sums, norms after sublayers, rotations, projections).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.anatomy.mixing import moves_between_positions
from attnflow.models.anatomy.sites import Site, models_around, one_owner
from attnflow.models.passes.evaluation import REFUSALS, refusal
from attnflow.models.passes.interception import (
    AttentionCall,
    Output,
    Proceed,
    in_force,
    intercept,
    readable_implementation,
)
from attnflow.models.passes.reads import HeldNorm, Reads, hold, may_be_norm
from attnflow.models.passes.recording import LARGE, Component, ComponentName, Keep, Recorder
from attnflow.models.passes.watching import (
    Arguments,
    Call,
    Watch,
    handed_again,
    hidden_of,
    mapped,
    with_hidden,
    with_tensor,
)
from attnflow.models.subject import Subject

_Norms = dict[tuple[str, int], HeldNorm | None]  # by path and number of a call


class _Reached(Exception):
    pass


@dataclass(frozen=True, eq=False)
class RecordedCall:
    call: AttentionCall
    output: Tensor
    added: Tensor | None  # what an attached bias adds to the scores, [batch or 1, heads or 1, queries, keys]
    query: Tensor  # that of the call, differentiable by the matrices of `reads`
    key: Tensor


@dataclass(eq=False)
class ResidualStream:
    """The summands of a model's stream before the attention at `site`, and passes with other values for them.

    `lists` are the paths of the lists of layers whose sublayers count; `labels` names each of them ("" or "encoder").
    """

    model: nn.Module
    inputs: Mapping[str, object]
    site: Site
    sites: Sequence[Site]
    lists: Mapping[str, str]
    components: list[Component] = field(default_factory=lambda: list[Component]())
    reads: Reads = field(default_factory=Reads)
    large: bool = False  # whether the values of components were dropped

    @property
    def implementation(self) -> str:
        return readable_implementation(self.site.owner.config)

    # -------- passes

    def record(self, keep: Keep | None = None, limit: float = LARGE) -> RecordedCall:
        """Run the model up to the site, and keep what its sublayers put out.

        `keep` receives each output in place of that, and its results are kept. Without it, a pass of more than `limit`
        tokens keeps none.
        """
        copies = {  # of tensors that cannot be differentiated
            name: value.clone()
            for name, value in self.inputs.items()
            if isinstance(value, Tensor) and value.is_inference()
        }
        self.inputs = {**self.inputs, **copies}
        attention = {site.module for site in self.sites}
        recorder = Recorder(self.lists, self._layers(), self._modules(), attention, self.site.module, keep, limit)
        calls: list[RecordedCall] = []

        def record(call: AttentionCall, proceed: Proceed) -> None:
            plain = call.replace(**{name: getattr(call, name).detach() for name in ("query", "key", "value")})
            with torch.no_grad():
                added = added_to(plain)  # before the call, which uses up what its hooks have seen
                calls.append(RecordedCall(plain, proceed(plain)[0], added, call.query, call.key))

        with Watch(self._modules(), recorder.enter, recorder.leave):
            self._reach(record)
        self.components, self.reads, self.large = recorder.components, recorder.reads, recorder.dropped
        return calls[0]

    def held_pass(self) -> tuple[list[Tensor | None], AttentionCall, AttentionCall]:
        """Return the values of the components, the site's call as an affine function of them, and its call at zero.

        Every norm keeps its scale in the pass with the recorded values. Values that were dropped are recorded again.
        """
        if all(component.value is None for component in self.components):
            self.record(limit=float("inf"))
        leaves = [None if c.value is None else c.value.clone().requires_grad_() for c in self.components]
        norms: dict[tuple[str, int], HeldNorm | None] = {}
        call = self._call_with(leaves, norms)
        with torch.no_grad():
            return leaves, call, self._call_with([None if x is None else torch.zeros_like(x) for x in leaves], norms)

    def _call_with(self, values: Sequence[Tensor | None], norms: _Norms) -> AttentionCall:
        given = list(zip(self.components, values, strict=True))
        outputs = {
            (c.path, c.number): c.output if v is None else with_tensor(c.output, c.value, v)
            for c, v in given
            if c.number >= 0
        }
        first = {c.path: v for c, v in given if c.number < 0}
        modules = {path: self.model.get_submodule(path) for path, _ in outputs}

        def leave(call: Call, output: object) -> object:
            return outputs.get((call.name, call.number))  # once more, as hooks of others may have changed it

        calls: list[AttentionCall] = []
        saved = {path: module.__dict__.get("forward") for path, module in modules.items()}
        try:
            for path, module in modules.items():
                module.forward = _Stub(path, outputs, module.forward)
            with Watch(modules, leave=leave), self._first(first), self._held_norms(norms):
                self._reach(lambda call, _: calls.append(call))
                return calls[0]
        finally:
            for path, module in modules.items():
                module.__dict__.pop("forward", None)
                if (forward := saved[path]) is not None:
                    module.forward = forward

    def _reach(self, see: Callable[[AttentionCall, Proceed], None]) -> None:
        def look(call: AttentionCall, proceed: Proceed) -> Output:
            see(call, proceed)
            raise _Reached

        around = models_around(self.sites)
        interception = intercept(around, {self.site.module: look}, role="pool", implementation=self.implementation)
        try:
            self.model(**self.inputs)
        except _Reached:
            return
        except REFUSALS as error:
            raise UnsupportedArchitecture(
                f"{type(self.model).__name__} does not run on these inputs ({type(error).__name__}: {refusal(error)})"
            ) from error
        finally:
            interception.remove()
        raise UnsupportedArchitecture(
            f"{self.site.name} did not attend in this pass, so that it has no scores of these inputs"
        )

    # -------- parts

    def _modules(self) -> dict[str, nn.Module]:
        return {
            path: module
            for prefix in self.lists
            for path, module in self.model.get_submodule(prefix).named_modules(prefix=prefix)
            if path != prefix or not isinstance(module, nn.ModuleList)
        }

    def _layers(self) -> dict[str, nn.Module]:
        return {
            f"{prefix}.{name}": layer
            for prefix in self.lists
            for name, layer in self.model.get_submodule(prefix).named_children()
        }

    @contextmanager
    def _first(self, values: Mapping[str, Tensor | None]) -> Generator[None]:
        prefixes = {path.rpartition(".")[0] for path in values}
        given: dict[str, tuple[Tensor, Tensor]] = {}

        def enter(call: Call) -> Arguments | None:
            prefix = str(call.name).rpartition(".")[0]
            value = values.get(call.name) if call.number == 0 else None
            if value is None:
                return handed_again(call, *given[prefix]) if prefix in given else None
            given[prefix] = hidden_of(call).detach(), value
            return with_hidden(call, value.clone())

        layers = {path: layer for path, layer in self._layers().items() if path.rpartition(".")[0] in prefixes}
        with Watch(layers, enter):
            yield

    @contextmanager
    def _held_norms(self, norms: _Norms) -> Generator[None]:
        def leave(call: Call, output: object) -> Tensor | None:
            given, key = (*call.args, *call.kwargs.values()), (str(call.name), call.number)
            if len(given) != 1 or not isinstance(x := given[0], Tensor) or not isinstance(output, Tensor):
                return None
            if key not in norms:
                if not x.requires_grad:
                    return None
                norms[key] = hold(call.module, x.detach(), output.detach())
            norm = norms[key]
            return None if norm is None else norm(x)

        with Watch({name: m for name, m in self.model.named_modules() if may_be_norm(m)}, leave=leave):
            yield

    def names(self, used: Sequence[int]) -> dict[int, ComponentName]:
        names = {n: self._name(self.components[n]) for n in used}
        counts = Counter(str(name) for name in names.values())
        for n, name in names.items():
            if counts[str(name)] > 1:
                component = self.components[n]
                call = f", call {component.number + 1}" if component.number else ""
                names[n] = replace(name, which=component.path.rpartition(".")[2] + call)
        return names

    def _name(self, component: Component) -> ComponentName:
        path = component.path
        prefix = max((listed for listed in self.lists if path.startswith(listed)), key=len)
        half = self.lists[prefix]
        if component.number < 0:
            return ComponentName(None, "embedding", path, half)
        parts = path[len(prefix) + 1 :].split(".")
        for end in range(len(parts), 1, -1):
            module = self.model.get_submodule(".".join([prefix, *parts[:end]]))
            kinds = {site.kind for site in self.sites if site.module in set(module.modules())}
            if kinds and not isinstance(module, nn.ModuleList):
                kind = "cross-attention" if kinds == {"cross"} else "attention"
                return ComponentName(int(parts[0]), kind, path, half)
        mixes = any(map(moves_between_positions, self.model.get_submodule(path).modules()))
        return ComponentName(int(parts[0]), "mixer" if mixes else "feed-forward", path, half)


class _Stub:
    stands_in = True  # for whoever expects that the module attended

    def __init__(self, path: str, outputs: Mapping[tuple[str, int], object], forward: Callable[..., Any]) -> None:
        self._path, self._outputs, self._forward, self._next = path, outputs, forward, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self._next = self._next, self._next + 1
        if (self._path, number) not in self._outputs:
            return self._forward(*args, **kwargs)
        return mapped(self._outputs[self._path, number], Tensor.clone)  # hooks of others may write to it


def added_to(call: AttentionCall) -> Tensor | None:
    """Add up what the attached biases add to scores: their interceptors tell by a function `added`."""
    tellers = [getattr(interceptor, "added", None) for interceptor in in_force(call.module, "bias")]
    parts: list[Tensor] = [part for teller in tellers if teller is not None and (part := teller(call)) is not None]
    return sum(parts[1:], start=parts[0]) if parts else None


def lists_of(subject: Subject) -> dict[str, str]:
    """The lists of layers between the inputs and the logits: those of the model that reads tokens, both halves."""
    sites = [site for site in subject.sites if site.kind == "self"]
    reading = [s for s in sites if subject.embedding is not None and Subject(s.owner).embedding is subject.embedding]
    decoding = any(site.part == "decoder" for site in sites) and all(site.part == "encoder" for site in reading)
    if not decoding:  # else the decoder reads tokens by a table of its own
        sites = reading or sites  # beside the towers of images and sounds
    own = one_owner([site for site in sites if site.part == "decoder"] or sites)
    lists = {site.layers: "" for site in subject.sites if site.owner is own[0].owner}
    if any(site.kind == "cross" for site in subject.sites):
        lists |= {site.layers: "encoder" for site in subject.sites if site.part == "encoder"}
    flat = [path for path in lists if not isinstance(subject.model.get_submodule(path), nn.ModuleList)]
    if flat:
        raise UnsupportedArchitecture(f"the attention of {subject.kind} lies in no list of layers ({flat[0]})")
    return lists
