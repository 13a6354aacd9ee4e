"""Noise through an attention module: what enters it, its submodules, and the attention interface.

Sixteen sequences of one token run through the model; attention modules that they do not reach, such as a vision
tower's, are called alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.models.anatomy.sites import Site, models_around
from attnflow.models.passes.evaluation import REFUSALS, refusal
from attnflow.models.passes.interception import AttentionCall, Output, Proceed
from attnflow.models.passes.trial import read, trial
from attnflow.models.passes.watching import Arguments, Call, Watch
from attnflow.models.placement import bare
from attnflow.models.subject import Subject

TOKENS: Final = 16  # so many numbers by which a component is recognised
# Shapes of the tokens that modules take when they are called alone, and whether with a rotation: sequences of one
# token, packed sequences, a batch of these, images of one patch, and sequences with an embedding of positions to add.
_ALONE: Final = (
    *((shape, True) for shape in ((TOKENS, 1), (TOKENS,), (1, TOKENS), (TOKENS, 1, 1))),
    ((TOKENS, 1), False),
)
_KEYS: Final = ("key_value_states", "encoder_hidden_states", "key", "value")  # arguments that keys are made of
_HEADS: Final = ("num_heads", "num_attention_heads")  # what a module may say of its query heads

_Vectors = Float[Tensor, "tokens features"]


@dataclass(eq=False)
class NoiseTrace:
    """The observations of one attention module; `why` explains missing calls.

    For each submodule, `inputs` are its inputs in each call, `results` its first outputs, and `outputs` the noise that
    replaced them in all calls.
    """

    calls: list[tuple[Tensor, Tensor]] = field(default_factory=lambda: list[tuple[Tensor, Tensor]]())  # query and key
    arguments: dict[str, _Vectors] = field(default_factory=lambda: dict[str, Tensor]())
    inputs: dict[str, list[_Vectors]] = field(default_factory=lambda: dict[str, list[Tensor]]())
    results: dict[str, _Vectors] = field(default_factory=lambda: dict[str, Tensor]())
    outputs: dict[str, _Vectors] = field(default_factory=lambda: dict[str, Tensor]())
    module: nn.Module | None = None  # the copy that was observed, where the weights are not here
    why: str = "no call of it was seen when the model read one token"

    def clear(self) -> None:
        for part in (self.calls, self.arguments, self.inputs, self.results, self.outputs):
            part.clear()


def traces(subject: Subject, sites: Sequence[Site]) -> dict[str, NoiseTrace]:
    """Trace each attention module, by name; of those whose weights are elsewhere, one for all that are built alike."""
    if not subject.weights_elsewhere:
        return _traces(subject.model, sites)
    built = {site.name: (str(site.module), *(p.shape for p in site.module.parameters())) for site in sites}
    first = {built[site.name]: site for site in reversed(sites)}
    made: dict[object, NoiseTrace] = {}
    for form, site in first.items():
        copied = _empty(site)
        made[form] = _traces(subject.model, [copied], alone=True)[site.name]
        made[form].module = copied.module
    return {site.name: made[built[site.name]] for site in sites}


def _empty(site: Site) -> Site:
    """Copy an attention module whose weights are not here with random ones: noise replaces what they make."""
    config, generator = site.owner.config, torch.Generator().manual_seed(0)

    def numbers(tensor: Tensor) -> Tensor:
        if tensor.is_meta or not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        return torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor.dtype)

    module = bare(site.module, numbers, {id(config): config})
    return replace(site, module=module.eval())


def _traces(model: nn.Module, sites: Sequence[Site], alone: bool = False) -> dict[str, NoiseTrace]:
    around = models_around(sites)[0]
    traced = {site.name: NoiseTrace() for site in sites}
    of = {site.module: traced[site.name] for site in sites}

    def watch(call: AttentionCall, proceed: Proceed) -> Output:
        of[call.module].calls.append((call.query, call.key))
        if proceed.following:  # a bias on the module expects to be called
            proceed(call)
        value = call.value[:, :, -1:].repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
        return value.transpose(1, 2).expand(-1, call.query.shape[2], -1, -1), None

    exact = torch.autocast(Subject(sites[0].module).device.type, enabled=False)
    with trial(model, dict.fromkeys(sites, watch), role="pool", implementation="sdpa"), _noise(sites, traced), exact:
        try:
            if not alone:
                read(around, [Subject(around).ordinary_tokens(1)] * TOKENS)
        except REFUSALS as error:  # one token of text alone is no input of some models
            for trace in traced.values():
                trace.why = f"the model did not run on one token ({type(error).__name__}: {refusal(error)})"
        for site in sites:
            if not traced[site.name].calls:
                _call_alone(site.module, traced[site.name])
    return traced


def _call_alone(module: nn.Module, trace: NoiseTrace) -> None:
    weight = next((p for p in module.parameters() if p.ndim == 2 and p.is_floating_point()), None)
    if weight is None:
        return
    transposed = any(getattr(part, "weight", None) is weight and hasattr(part, "nf") for part in module.modules())
    width, why = weight.shape[0 if transposed else 1], trace.why  # Conv1D of transformers is stored (in, out)
    heads = next((n for word in _HEADS if isinstance(n := getattr(module, word, None), int)), None)
    for shape, rotated in _ALONE:
        trace.clear()
        try:
            module(**_arguments(module, weight.new_zeros(*shape, width), rotated))
        except (*REFUSALS, NameError) as error:  # after the attention, too: its output is of another shape
            trace.why = f"{why}; called alone, it did not run ({type(error).__name__}: {refusal(error)})"
        queries = [query for query, _ in trace.calls]
        split = all(query.ndim == 4 and heads in (None, query.shape[1]) for query in queries)
        if split and sum(query.shape[0] * query.shape[2] for query in queries) == TOKENS:
            return
    trace.clear()


def _arguments(module: nn.Module, tokens: Tensor, rotated: bool) -> dict[str, object]:
    """Make arguments of the module's signature: the tokens first, no rotation, sequences of one token."""
    made: dict[str, object] = {}
    cosine = tokens.new_ones(1, 1)
    for name, parameter in inspect.signature(module.forward).parameters.items():
        required = parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not made or (name in _KEYS and required):
            made[name] = tokens.clone()
        elif name == "position_embeddings":
            made[name] = (cosine, torch.zeros_like(cosine)) if rotated else None
        elif name.startswith("cu_seq"):
            made[name] = torch.tensor([0, TOKENS], dtype=torch.int32, device=tokens.device)
        elif required:
            made[name] = None
    return made


def _noise(sites: Sequence[Site], traced: Mapping[str, NoiseTrace]) -> Watch:
    """Replace what modules read and submodules return by noise; norms and rotations become the identity."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    def enter(call: Call) -> Arguments | None:
        site, path = call.name
        if path:
            return None
        trace, names = traced[site], list(inspect.signature(call.module.forward).parameters)

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
        trace, given = traced[site], call.args[0] if call.args and isinstance(call.args[0], Tensor) else None
        norm = "norm" in f"{path} {type(call.module).__name__}".lower()
        if norm and given is not None and given.shape == output.shape:
            return given
        result = _vectors(call.module, output)
        if result is None:
            return None
        before = trace.outputs.get(path)
        if before is None or before.shape != result.shape:
            trace.results[path], trace.outputs[path], trace.inputs[path] = result, noise(result), []
        vectors = None if given is None else _vectors(call.module, given)
        trace.inputs[path].append(result.new_empty(TOKENS, 0) if vectors is None else vectors)
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
    """Replace pairs of cosines and sines by ones and zeros; at position 0 sines are 0, which tells (sin, cos) apart."""
    if isinstance(value, Mapping):
        return {name: _no_rotation(pair) for name, pair in cast(Mapping[str, object], value).items()}
    if isinstance(value, tuple) and len(pair := cast(tuple[object, ...], value)) == 2:
        first, second = pair
        if isinstance(first, Tensor) and isinstance(second, Tensor) and not first.is_complex():
            swapped = not first.any() and bool(second.any())
            return torch.full_like(first, float(not swapped)), torch.full_like(second, float(swapped))
    return value
