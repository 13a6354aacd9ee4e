"""The residual stream of one forward pass: what each sublayer added, and queries and keys as a function of that.

`ResidualStream` runs a model up to one attention module. Afterwards it can run the same code again with each sublayer
replaced by a given output, and with norms held: queries and keys are then an affine function of those outputs, whatever
lies between them (residual sums, scales, norms after sublayers, rotations, latent projections).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.evaluation import REFUSALS, evaluating, precision, refusal, unchanged
from attnflow.models.held import HeldNorm, hold, may_be_norm
from attnflow.models.interception import (
    AttentionCall,
    Output,
    Proceed,
    in_force,
    intercept,
    readable_implementation,
)
from attnflow.models.mixing import moves_between_positions
from attnflow.models.offload import device_of
from attnflow.models.recording import LARGE, Component, ComponentName, Keep, Reads, Recorder
from attnflow.models.sites import Site, models_around
from attnflow.models.watching import (
    Arguments,
    Call,
    Watch,
    handed_again,
    hidden_of,
    mapped,
    with_hidden,
    with_tensor,
)


class _Reached(Exception):
    """The pass is at the attention module that it was for."""


@dataclass(frozen=True, eq=False)
class Seen:
    call: AttentionCall
    output: Tensor
    added: Tensor | None = None  # what an attached bias adds to the scores, [batch or 1, heads or 1, queries, keys]
    query: Tensor | None = None  # that of the call, differentiable by the matrices of `reads`; None in later passes
    key: Tensor | None = None


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
    large: bool = False  # whether the values of components were dropped; `complete` has them
    _norms: dict[tuple[str, int], HeldNorm | None] = field(default_factory=lambda: dict[Any, Any]())
    _scales_known: bool = False  # whether a held pass with the recorded values has been made

    @property
    def implementation(self) -> str:
        return readable_implementation(self.site.owner.config)

    # -------- passes

    @contextmanager
    def still(self) -> Generator[None]:
        """Hold the model in eval mode, eager and without gradients of parameters; everything is restored.

        A model in float64 computes all of itself in float64, its norms and softmax too.
        """
        with ExitStack() as stack:
            stack.enter_context(unchanged(self.model))  # threads take turns: what follows must not read another's state
            flags = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
            double = torch.float64 if flags[0][0].dtype == torch.float64 else None
            stack.enter_context(cast(Any, torch.compiler).set_stance("force_eager"))
            exact = torch.autocast(device_of(self.model).type, enabled=False)
            held = (evaluating(self.model), precision(self.model, double), exact)
            for one in (*held, torch.inference_mode(False), torch.enable_grad()):
                stack.enter_context(one)
            try:
                for parameter, _ in flags:
                    parameter.requires_grad_(False)
                yield
            finally:
                for parameter, flag in flags:
                    parameter.requires_grad_(flag)

    def record(self, keep: Keep | None = None, limit: float = LARGE) -> Seen:
        """Run the model up to the site, and keep what its sublayers put out.

        `keep` receives each output in place of that, and its results are kept. Without it, a pass of more than `limit`
        tokens keeps none.
        """
        given = cast("Mapping[str, Tensor]", {n: one for n, one in self.inputs.items() if isinstance(one, Tensor)})
        copies = {name: one.clone() for name, one in given.items() if one.is_inference()}  # these can be differentiated
        self.inputs = {**self.inputs, **copies}
        attention = {site.module for site in self.sites}
        recorder = Recorder(self.lists, self._layers(), self._modules(), attention, self.site.module, keep, limit)
        with Watch(self._modules(), recorder.enter, recorder.leave):
            seen = self._reach(recorded=True)
        self.components, self.reads, self.large = recorder.components, recorder.reads, recorder.dropped
        return seen

    def complete(self) -> None:
        """Record once more with all values, if they were dropped."""
        if all(one.value is None for one in self.components):
            with self.still():
                self.record(limit=float("inf"))

    def query_and_key(self, values: Sequence[Tensor | None]) -> AttentionCall:
        """Return the call that the site makes if the components have these values.

        Every norm keeps its scale in a pass with the recorded values, which is made first unless `values` are those,
        marked for differentiation.
        """
        if not self._scales_known:
            self._scales_known = True
            if not all(value is None or value.requires_grad for value in values):
                own = [one.value for one in self.components]
                with torch.enable_grad():
                    self.query_and_key([None if one is None else one.clone().requires_grad_() for one in own])
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

        saved = {path: module.__dict__.get("forward") for path, module in modules.items()}
        try:
            for path, module in modules.items():
                module.forward = _Stub(path, outputs, module.forward)
            with Watch(modules, leave=leave), self._first(first), self._held():
                return self._reach().call
        finally:
            for path, module in modules.items():
                module.__dict__.pop("forward", None)
                if (forward := saved[path]) is not None:
                    module.forward = forward

    def _reach(self, recorded: bool = False) -> Seen:
        seen: list[Seen] = []

        def look(call: AttentionCall, proceed: Proceed) -> Output:
            if not recorded:
                seen.append(Seen(call, proceed(call)[0]))
                raise _Reached
            plain = call.replace(**{name: getattr(call, name).detach() for name in ("query", "key", "value")})
            with torch.no_grad():
                added = added_to(plain)  # before the call, which uses up what its hooks have seen
                output, _ = proceed(plain)
            seen.append(Seen(plain, output, added, call.query, call.key))
            raise _Reached

        around = models_around(self.sites)
        interception = intercept(around, {self.site.module: look}, role="pool", implementation=self.implementation)
        try:
            self.model(**self.inputs)
        except _Reached:
            return seen[0]
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
    def _held(self) -> Generator[None]:
        def leave(call: Call, output: object) -> Tensor | None:
            given = (*call.args, *call.kwargs.values())
            x = given[0] if len(given) == 1 else None
            if not isinstance(output, Tensor) or not isinstance(x, Tensor) or not (x.requires_grad or known(call)):
                return None
            key = (str(call.name), call.number)
            if key not in self._norms:
                self._norms[key] = hold(call.module, x.detach(), output.detach())
            held = self._norms[key]
            return None if held is None else held(x)

        def known(call: Call) -> bool:
            return (str(call.name), call.number) in self._norms

        norms = {name: module for name, module in self.model.named_modules() if may_be_norm(module)}
        with Watch(norms, leave=leave):
            yield

    def names(self, used: Sequence[int]) -> dict[int, ComponentName]:
        around = {site.module: site.kind for site in self.sites}
        names = {n: self._name(self.components[n], around) for n in used}
        counts = Counter(str(name) for name in names.values())
        for n, name in names.items():
            if counts[str(name)] > 1:
                component = self.components[n]
                call = f", call {component.number + 1}" if component.number else ""
                names[n] = replace(name, which=component.path.rpartition(".")[2] + call)
        return names

    def _name(self, component: Component, around: Mapping[nn.Module, str]) -> ComponentName:
        path = component.path
        prefix = max((one for one in self.lists if path.startswith(one)), key=len)
        half = self.lists[prefix]
        if component.number < 0:
            return ComponentName(None, "embedding", path, half)
        parts = path[len(prefix) + 1 :].split(".")
        for end in range(len(parts), 1, -1):
            module = self.model.get_submodule(".".join([prefix, *parts[:end]]))
            kinds = {around[one] for one in module.modules() if one in around}
            if kinds and not isinstance(module, nn.ModuleList):
                kind = "cross-attention" if kinds == {"cross"} else "attention"
                return ComponentName(int(parts[0]), kind, path, half)
        mixes = any(moves_between_positions(one) for one in self.model.get_submodule(path).modules())
        return ComponentName(int(parts[0]), "mixer" if mixes else "feed-forward", path, half)


class _Stub:
    """Stands in for a sublayer: returns the output given for each call."""

    stands_in = True  # for whoever expects that the module attended

    def __init__(self, path: str, outputs: Mapping[tuple[str, int], object], forward: Callable[..., Any]) -> None:
        self._path, self._outputs, self._forward, self._next = path, outputs, forward, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number, self._next = self._next, self._next + 1
        if (self._path, number) not in self._outputs:
            return self._forward(*args, **kwargs)
        return mapped(self._outputs[self._path, number], Tensor.clone)  # hooks of others may write to it


def added_to(call: AttentionCall) -> Tensor | None:
    """What the attached biases add to the scores of a call: their interceptors say so by a function `added`."""
    found = [getattr(one, "added", None) for one in in_force(call.module, "bias")]
    with torch.no_grad():
        parts: list[Tensor] = [part for one in found if one is not None and (part := one(call)) is not None]
    return sum(parts[1:], start=parts[0]) if parts else None
