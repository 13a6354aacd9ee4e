"""Noise through an attention module: what enters it, its submodules, and the attention interface.

Sixteen sequences of one token run through the model; attention modules that they do not reach, such as a vision
tower's, are called alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnflow.models.evaluation import REFUSALS, refusal
from attnflow.models.interception import AttentionCall, Output, Proceed
from attnflow.models.loaded import ordinary_tokens
from attnflow.models.offload import device_of, without_numbers
from attnflow.models.sites import Site, models_around
from attnflow.models.trial import read, trial
from attnflow.models.watching import Arguments, Call, Watch

TOKENS: Final = 16  # so many numbers by which a component is recognised
_ALONE: Final = "called alone, it did not run"
# Shapes of the tokens and of what rotates them that modules take when they are called alone, the usual ones first.
_TOKENS_LIKE: Final = ((TOKENS, 1), (TOKENS,), (1, TOKENS), (TOKENS, 1, 1))  # the last are images of one patch
_HEADS: Final = ("num_heads", "num_attention_heads")  # what a module may say of its query heads
_ROTATION_LIKE: Final = ((1, 1), (1, 1, 1), None)  # or none

_Vectors = Float[Tensor, "tokens features"]


@dataclass(eq=False)
class Trace:
    """The observations of one attention module.

    `calls` holds queries and keys at the attention interface, [batch, heads, positions, head_dim]. For each submodule,
    `inputs` are its inputs in each call, `results` its first outputs, and `outputs` the noise that replaced them in all
    calls. `why` explains missing calls.
    """

    calls: list[tuple[Tensor, Tensor]] = field(default_factory=lambda: list[tuple[Tensor, Tensor]]())
    arguments: dict[str, _Vectors] = field(default_factory=lambda: dict[str, Tensor]())
    inputs: dict[str, list[_Vectors]] = field(default_factory=lambda: dict[str, list[Tensor]]())
    results: dict[str, _Vectors] = field(default_factory=lambda: dict[str, Tensor]())
    outputs: dict[str, _Vectors] = field(default_factory=lambda: dict[str, Tensor]())
    why: str = "no call of it was seen when the model read one token"

    def clear(self) -> None:
        """Forget everything seen."""
        for part in (self.calls, self.arguments, self.inputs, self.results, self.outputs):
            part.clear()


def traces(model: nn.Module, sites: Sequence[Site]) -> dict[str, Trace]:
    """Trace each attention module, by name, and leave the model unchanged.

    Costs one forward pass of 16 sequences of one token; modules that it misses are called by themselves. So are copies
    of those whose weights are not here (on the meta device, or sharded over devices), one for all that are built alike.
    """
    if not (without_numbers(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters())):
        return _traces(model, sites)
    built = {site.name: (str(site.module), *(p.shape for p in site.module.parameters())) for site in sites}
    first = {form: site for site in reversed(sites) for form in [built[site.name]]}
    seen = {form: _traces(model, [_empty(site)], alone=True)[site.name] for form, site in first.items()}
    return {site.name: seen[built[site.name]] for site in sites}


def _empty(site: Site) -> Site:
    """Copy an attention module whose weights are not here with zeros for weights: noise replaces what they make."""
    config = site.owner.config
    own = {
        id(p): nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device="cpu"), p.requires_grad)
        for p in site.module.parameters()
    }
    own |= {id(buffer): torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu") for buffer in site.module.buffers()}
    return replace(site, module=copy.deepcopy(site.module, {id(config): config, **own}).eval())


def _traces(model: nn.Module, sites: Sequence[Site], alone: bool = False) -> dict[str, Trace]:
    around = models_around(sites)[0]
    seen = {site.name: Trace() for site in sites}
    of = {site.module: seen[site.name] for site in sites}

    def watch(call: AttentionCall, proceed: Proceed) -> Output:
        of[call.module].calls.append((call.query, call.key))
        if proceed.following:  # a bias on the module expects to be asked
            proceed(call)
        value = call.value[:, :, -1:].repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
        return value.transpose(1, 2).expand(-1, call.query.shape[2], -1, -1), None

    exact = torch.autocast(device_of(sites[0].module).type, enabled=False)
    with trial(model, dict.fromkeys(sites, watch), role="pool", implementation="sdpa"), _noise(sites, seen), exact:
        try:
            if not alone:
                read(around, [ordinary_tokens(around, 1)] * TOKENS)
        except REFUSALS as error:  # one token of text alone is no input of some models
            for trace in seen.values():
                trace.why = f"the model did not run on one token ({type(error).__name__}: {refusal(error)})"
        for site in sites:
            if not seen[site.name].calls:
                _call_alone(site, seen[site.name])
    return seen


def _call_alone(site: Site, trace: Trace) -> None:
    weight = next((p for p in site.module.parameters() if p.ndim == 2 and p.is_floating_point()), None)
    if weight is None:
        return
    why = trace.why
    part = next((m for m in site.module.modules() if getattr(m, "weight", None) is weight), None)
    width = weight.shape[0 if hasattr(part, "nf") else 1]
    heads = next((n for word in _HEADS if isinstance(n := getattr(site.module, word, None), int)), None)
    for tokens, rotation in product(_TOKENS_LIKE, _ROTATION_LIKE):
        trace.clear()
        arguments = _arguments(
            site.module, weight.new_zeros(*tokens, width), None if rotation is None else weight.new_ones(rotation)
        )
        try:
            site.module(**arguments)
        except Exception as error:  # after the attention, too: an output of another shape than the module expects
            trace.why = f"{why}; {_ALONE} ({type(error).__name__}: {refusal(error)})"
        if _seen_tokens([query for query, _ in trace.calls], heads) == TOKENS:
            return
    trace.clear()


def _seen_tokens(queries: Sequence[Tensor], heads: int | None) -> int:
    """Count the tokens of queries [batch, heads, positions, head_dim]; 0 for anything else."""
    if any(query.ndim != 4 or query.shape[1] != (heads or query.shape[1]) for query in queries):
        return 0
    return sum(query.shape[0] * query.shape[2] for query in queries)


def _arguments(module: nn.Module, tokens: Tensor, rotation: Tensor | None) -> dict[str, object]:
    """Make a module's arguments: the tokens first, no rotation, sequences of one token."""
    made: dict[str, object] = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not made:
            made[name] = tokens
        elif name == "position_embeddings":
            made[name] = None if rotation is None else (rotation, torch.zeros_like(rotation))
        elif name.startswith("cu_seq"):
            made[name] = torch.tensor([0, TOKENS], dtype=torch.int32, device=tokens.device)
        elif (
            name in ("key_value_states", "encoder_hidden_states", "key", "value")
            and parameter.default is parameter.empty
        ):
            made[name] = tokens.clone()
        elif parameter.default is parameter.empty:
            made[name] = None
    return made


def _noise(sites: Sequence[Site], seen: Mapping[str, Trace]) -> Watch:
    """Replace what modules read and submodules return by noise; norms and rotations become the identity."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    def enter(call: Call) -> Arguments | None:
        site, path = call.name
        if path:
            return None
        trace, names = seen[site], list(inspect.signature(call.module.forward).parameters)

        def replaced(name: str, value: object) -> object:
            if name == "position_embeddings":
                return _no_rotation(value)
            if not isinstance(value, Tensor) or value.shape[-1:] in ((), (1,)) or _vectors(call.module, value) is None:
                return value
            made = noise(value)
            trace.arguments[name] = made.reshape(TOKENS, -1)
            return made

        trace.clear()
        positional = tuple(replaced(name, value) for name, value in zip(names, call.args, strict=False))
        named = {name: replaced(name, value) for name, value in call.kwargs.items()}
        return (*positional, *call.args[len(names) :]), named

    def leave(call: Call, output: object) -> Tensor | None:
        site, path = call.name
        if not path or not isinstance(output, Tensor):
            return None
        trace, args = seen[site], call.args
        norm = "norm" in f"{path} {type(call.module).__name__}".lower()
        if norm and args and isinstance(args[0], Tensor) and args[0].shape == output.shape:
            return args[0]
        result = _vectors(call.module, output)
        if result is None:
            return None
        again = trace.outputs.get(path)
        if again is None or again.shape != result.shape:
            trace.results[path], trace.outputs[path] = result, noise(result)
            trace.inputs[path] = []
        read = _vectors(call.module, args[0]) if args and isinstance(args[0], Tensor) else None
        trace.inputs[path].append(result.new_empty(TOKENS, 0) if read is None else read)
        return trace.outputs[path].reshape(output.shape)

    return Watch(
        {(site.name, path): part for site in sites for path, part in site.module.named_modules()}, enter, leave
    )


def _vectors(module: nn.Module, value: Tensor) -> _Vectors | None:
    """Return one vector for each token, or None; a convolution has its channels before the positions."""
    if not value.is_floating_point() or value.ndim < 2:
        return None
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        single = value.shape[0] == TOKENS and value.shape[2:].numel() == 1
        return value.reshape(TOKENS, -1) if single else None
    return value.reshape(TOKENS, -1) if value.numel() == TOKENS * value.shape[-1] else None


def _no_rotation(value: object) -> object:
    """Replace a pair of cosines and sines, or each pair of a mapping, by ones and zeros.

    At position 0 sines are 0, which tells pairs of (sin, cos) from the usual ones.
    """
    if isinstance(value, Mapping):
        return {name: _no_rotation(one) for name, one in cast(Mapping[str, object], value).items()}
    if isinstance(value, tuple) and len(cast(tuple[object, ...], value)) == 2:
        first, second = cast(tuple[object, object], value)
        if isinstance(first, Tensor) and isinstance(second, Tensor) and not first.is_complex():
            swapped = not first.any() and bool(second.any())
            return torch.full_like(first, float(not swapped)), torch.full_like(second, float(swapped))
    return value
