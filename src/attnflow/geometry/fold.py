"""The norms around queries and keys, whose gains belong to the form that a model computes.

A norm before attention gives gain * normed(x) + bias, so scores are a form of normed tokens with W diag(gain) for W,
and with W diag(gain) (I - 11^T/d) where it takes the mean away. Gains of norms of queries and keys multiply rows. What
divides in a norm depends on the token, and biases add terms of one side alone: neither is part of a form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.checks import preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.wrappers import own_name
from attnflow.geometry.in_use import source_of
from attnflow.models.passes.evaluation import REFUSALS, refusal
from attnflow.models.passes.processes import whole
from attnflow.models.passes.reads import ModuleCall, hold, may_be_norm
from attnflow.models.passes.watching import Call, Watch
from attnflow.models.placement import bare
from attnflow.models.subject import Subject, Text
from attnflow.models.weights.attention import AttentionLayer
from attnflow.models.weights.checkpoints import Weights
from attnflow.models.weights.families.find import Stem, inside, part_of
from attnflow.models.weights.families.rows import Selected

if TYPE_CHECKING:
    from attnflow.models.passes.interception import AttentionCall

_TOKENS: Final = 8
_CLOSE: Final = 1e-3  # of vectors up to a factor, in half precision
# For files: the norm before attention, what its weight says, and the families. "rms" divides only, "plus" has the gain
# 1 + weight, and "mean" takes the mean away. "<" is in the layer before; the first one has what follows "|".
_BEFORE: Final = """
    input_layernorm rms llama mistral mixtral qwen2 qwen2_moe qwen2_vl_text qwen2_5_vl_text qwen3 qwen3_moe
        qwen3_vl_text phi3 granite granitemoe smollm3 gpt_oss olmoe jamba
    input_layernorm plus gemma gemma2 gemma3_text qwen3_next qwen3_5_text qwen3_5_moe_text
    input_layernorm mean cohere cohere2 phi phimoe starcoder2 stablelm gpt_neox bloom
    ln_1 mean gpt2 gpt_neo gptj codegen gpt_bigcode
    self_attn_layer_norm mean whisper pegasus m2m_100 mbart blenderbot
    layer_norm rms t5 mt5
    layernorm_before mean vit deit vit_mae beit audio-spectrogram-transformer
    layer_norm1 mean clip_text_model clip_vision_model siglip_text_model siglip_vision_model
    norm1 mean dinov2 dinov2_with_registers dinov3_vit
    <output.LayerNorm|embeddings.LayerNorm mean bert roberta xlm-roberta electra roformer mpnet
    <output_layer_norm|embeddings.LayerNorm mean distilbert
    - rms olmo2 olmo3 exaone4
"""
# Type of model -> (norm, what its weight says).
_FAMILIES: Final = {
    kind: (name, what)
    for name, what, *kinds in (line.split() for line in re.split(r"\n    (?! )", _BEFORE) if line)
    for kind in kinds
}
# GGUF's architectures whose norms of queries and keys are of the kind of the norm before, and come before rotation.
_NORMED: Final = ("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "gemma3", "glm4moe")


class NotFolded(Exception):
    """Why the norms of a layer are not known."""


@dataclass(frozen=True, eq=False)
class Norm:
    name: str  # path of its module
    gain: Tensor  # [..., width]
    centred: bool  # whether it takes the mean away


@dataclass(frozen=True, eq=False)
class Norms:
    """The norm before the weight of queries, or keys, and the norm after it; None for a norm that is absent."""

    before: Norm | None
    after: Norm | None

    def fold(self, weight: Tensor) -> Tensor:
        """W P diag(gain) from the right, and diag(gain) P from the left, with P = I - 11^T/n of a centred norm."""
        if self.before is not None:
            weight = weight * self.before.gain.reshape(-1).to(weight)
            weight = weight - weight.mean(1, keepdim=True) if self.before.centred else weight
        if self.after is not None:
            gain = self.after.gain.to(weight)
            parts = weight.unflatten(0, (-1, gain.shape[-1]))
            parts = parts - parts.mean(1, keepdim=True) if self.after.centred else parts
            weight = (parts * gain.reshape(-1, gain.shape[-1], 1)).flatten(0, 1)
        return weight


Pair = tuple[Norms, Norms]


def folded(layer: AttentionLayer, norms: Pair | NotFolded | None) -> tuple[Tensor, Tensor]:
    """The weights of queries and keys, with the gains of their norms where these are known."""
    weights = layer.query().detach(), layer.key().detach()
    if norms is None or isinstance(norms, NotFolded):
        return weights
    query, key = (norm.fold(weight.to(torch.promote_types(weight.dtype, torch.float32)))
                  for norm, weight in zip(norms, weights, strict=True))  # fmt: skip
    return query, key


def starred(path: str) -> str:
    return re.sub(r"\d+", "*", own_name(path))


def told(norms: Mapping[str, Pair | NotFolded]) -> list[str]:
    """Say which norms were folded, and which layers have none or were not folded."""
    names: dict[str, None] = {}
    others: dict[str, list[str]] = {}
    for layer, found in norms.items():
        if isinstance(found, NotFolded):
            others.setdefault(f"not folded: {found}", []).append(layer)
            continue
        every = (norm for side in found for norm in (side.before, side.after) if norm is not None)
        names.update(dict.fromkeys(starred(norm.name) for norm in every))
        if not any(side.before for side in found):
            others.setdefault("attention reads the residual stream, without a norm before it", []).append(layer)
    more = [what if len(at) == len(norms) else f"{what} ({preview(at, 2)})" for what, at in others.items()]
    return [f"folded: the gains of {', '.join(names)}"] * bool(names) + more


@dataclass(eq=False)
class NormPass:
    """What weights read and made, what modules that may be norms did, and how many of them before each attention."""

    read: dict[str, list[Tensor]] = field(default_factory=lambda: dict[str, list[Tensor]]())
    made: dict[str, Tensor] = field(default_factory=lambda: dict[str, Tensor]())
    small: list[tuple[str, ModuleCall]] = field(default_factory=lambda: list[tuple[str, ModuleCall]]())
    attention: dict[str, tuple[int, AttentionCall]] = field(
        default_factory=lambda: dict[str, tuple[int, "AttentionCall"]]()
    )


def norms_of(
    weights: Weights, layers: Sequence[AttentionLayer], seen: NormPass | NotFolded | None
) -> dict[str, Pair | NotFolded]:
    """Find the norms of each layer, by name: by a pass of a model in memory, else by the names of its family."""
    found: dict[str, Pair | NotFolded] = {}
    for layer in layers:
        reached = isinstance(seen, NormPass) and source_of(layer.query_rows) in seen.read
        try:
            found[layer.name] = _in_pass(layer, cast(NormPass, seen), weights) if reached else _by_name(layer, weights)
        except NotFolded as why:
            unseen = seen if isinstance(seen, NotFolded) else "the model's pass did not reach it"
            found[layer.name] = why if reached or seen is None else NotFolded(f"{unseen}, and {why}")
    return found


def pass_of(subject: Subject, layers: Sequence[AttentionLayer], inputs: Text | None) -> NormPass | NotFolded:
    """Watch a model read a few tokens, or inputs."""
    if subject.sharded_by not in ("", "FSDP2"):
        return NotFolded(f"{subject.sharded_by} leaves no process a whole pass")
    if subject.without_numbers:
        return NotFolded("its weights are not here")
    found: NormPass | NotFolded = NotFolded("no pass was made")
    for given in (None,) if inputs is None else (None, inputs):
        try:
            found = _pass(subject, layers, given)
        except Exception as error:  # a model that cannot be run is scored as stored, and says why
            what = f"{_TOKENS} tokens" if given is None else "the inputs"
            found = NotFolded(f"the model did not run on {what} ({refusal(error)})")
        if isinstance(found, NormPass) and all(source_of(layer.query_rows) in found.read for layer in layers):
            break
    return found


def _pass(subject: Subject, layers: Sequence[AttentionLayer], inputs: Text | None) -> NormPass:
    from attnflow.models.passes.interception import Output, Proceed
    from attnflow.models.passes.trial import read, trial

    seen, model = NormPass(), subject.model
    sources = {source_of(rows) for layer in layers for rows in (layer.query_rows, layer.key_rows)}
    watched = {name: one for name, one in model.named_modules() if name in sources or (name and may_be_norm(one))}
    sites: Sequence[Any] = ()
    with suppress(ValueError, UnsupportedArchitecture):  # attention that does not call the interface
        sites = subject.sites

    def leave(call: Call, output: object) -> None:
        given = next((one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor)), None)
        if given is not None and call.name in sources:
            seen.read.setdefault(call.name, []).append(given)
            if isinstance(output, Tensor):
                seen.made[call.name] = output
        elif given is not None and isinstance(output, Tensor) and output.shape == given.shape:
            seen.small.append((call.name, ModuleCall(call.module, given, output)))

    def watch(name: str) -> Any:
        def around(call: AttentionCall, proceed: Proceed) -> Output:
            seen.attention[name] = len(seen.small), call
            return proceed(call)

        return around

    with trial(model, {site: watch(site.name) for site in sites}, role="pool"), Watch(watched, leave=leave):
        if inputs is None:
            inner = cast(Any, subject.model if subject.sharded_by else subject.transformer)
            read(inner, [Subject(inner).ordinary_tokens(_TOKENS)])
        else:
            model(**subject.read(inputs), **subject.sparing)
    return seen


def _in_pass(layer: AttentionLayer, seen: NormPass, weights: Weights) -> Pair:
    if not isinstance(layer.query_rows, Selected) or not isinstance(layer.key_rows, Selected):
        raise NotFolded("queries or keys are products of several weights, with norms in between")
    sides = [(_before(rows, seen), after(rows, seen)) for rows in (layer.query_rows, layer.key_rows)]
    known = [call for pair in sides for _, call in pair]
    end, attention = seen.attention.get(layer.name, (len(seen.small), None))
    for name, call in seen.small[:end]:
        if not inside(name, layer.name) or name == layer.name or call in known:
            continue
        if attention is not None and _shares(call.output, attention.value):
            continue
        norm = _held(name, call)
        if norm is not None and (norm.centred or norm.gain.min() != norm.gain.max()):
            raise NotFolded(f"{starred(name)} is a norm inside the attention whose place is not known")
    given = () if attention is None else (attention.query, attention.key)
    for rows, (_, (_, call)), received in zip((layer.query_rows, layer.key_rows), sides, given, strict=False):
        if not _keeps_lengths(rows, call, received, seen):
            raise NotFolded("attention receives queries or keys of other lengths than its weights and norms make")
    query, key = (Norms(before, after) for (before, _), (after, _) in sides)
    reads_stream = query.before is None and key.before is None and _FAMILIES.get(_kind(layer, weights), "?")[0] == "-"
    if (query.before is None or key.before is None) and not reads_stream:
        raise NotFolded("no norm was seen to put out what its queries and keys read")
    return query, key


def _keeps_lengths(rows: Selected, norm: ModuleCall | None, received: Tensor, seen: NormPass) -> bool:
    """Whether heads keep their lengths up to one factor: a rotation does, a norm does not."""
    made = made_by(rows, seen) if norm is None else norm.output
    if made is None or made.numel() != received.numel():
        return True  # of another pass, or of keys that were there before
    one, other = (each.reshape(-1, received.shape[-1]).double().norm(dim=1).sort().values for each in (made, received))
    close = 0.05 if in_half(received) else _CLOSE
    return bool((one / one.mean() - other / other.mean()).abs().max() < close)


def made_by(rows: Selected, seen: NormPass) -> Tensor | None:
    """What these rows of a weight made of each token, [tokens, rows]; None if the pass did not reach it."""
    made = seen.made.get(source_of(rows))
    if made is None or made.shape[-1] <= int(rows.index.max()):
        return None
    return made.reshape(-1, made.shape[-1])[:, rows.index.to(made.device)]


def in_half(values: Tensor) -> bool:
    return torch.finfo(values.dtype).eps > 1e-6


def _held(name: str, call: ModuleCall) -> Norm | None:
    module, given, output = call.module, call.input, call.output
    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        module = bare(module, whole)
    if in_half(given):  # half precision would hide whether the formula holds
        module, given = deepcopy(module).float(), given.float()
        with torch.no_grad():
            output = module(given)
    try:
        held = hold(module, given, output)
    except REFUSALS:  # it takes more than a tensor, or one of another shape: no norm
        return None
    return None if held is None else Norm(name, held.gain.detach(), held.centred)


_Found = tuple[Norm | None, ModuleCall | None]


def _before(rows: Selected, seen: NormPass) -> _Found:
    """The norm that put out what a weight reads, up to a factor; None if no norm did."""
    path = source_of(rows)
    found: list[_Found] = []
    for given in seen.read.get(path, ()):
        put = [(name, call) for name, call in seen.small if _shares(call.output, given)]
        put = put or [(name, call) for name, call in seen.small if _alike(call.output, given)]
        norms = [(norm, call) for name, call in put if (norm := _held(name, call)) is not None]
        if put and (not norms or norms[-1][0].gain.numel() != given.shape[-1]):
            raise NotFolded(f"{starred(put[-1][0])} puts out what {starred(path)} reads, and its norm is not known")
        found.append(norms[-1] if norms else (None, None))
    if len({None if norm is None else norm.name for norm, _ in found}) != 1:
        raise NotFolded(f"{path} is called {len(found)} times, after several norms")
    return found[0]


def after(rows: Selected, seen: NormPass) -> _Found:
    """The norm after a weight, per head or of all heads together; None if it is absent."""
    made, columns = seen.made.get(source_of(rows)), made_by(rows, seen)
    if made is None or columns is None:
        return None, None
    for name, call in seen.small:
        width = call.input.shape[-1]
        if not _shares(call.input, made) or len(rows.index) % width:
            continue
        if _same_vectors(columns.reshape(-1, width), call.input) and (norm := _held(name, call)) is not None:
            return norm, call
    return None, None


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same vectors, in any order, or in one order and up to a factor."""
    if one.numel() != other.numel() or one.shape[-1] != other.shape[-1] or not one.is_floating_point():
        return False
    cosine = nn.functional.cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0)
    return bool(1 - cosine.abs() < _CLOSE**2) or _same_vectors(one, other)


def _same_vectors(one: Tensor, other: Tensor) -> bool:
    first, second = (each.reshape(-1, other.shape[-1]).unique(dim=0) for each in (one, other))
    return first.shape == second.shape and torch.equal(first, second)


def _kind(layer: AttentionLayer, weights: Weights) -> str:
    part = part_of(weights.config, Stem(layer.name, "", ""))
    return str(part.get("model_type") or weights.config.get("model_type"))


def _by_name(layer: AttentionLayer, weights: Weights) -> Pair:
    """By the names of its family, in a file or in a part of a model that a pass did not reach."""
    config, shapes = weights.config, weights.shapes
    place = re.match(r"(?:.*?\.)??(\d+)(?=\.|$)", layer.name)
    if layer.kind != "self" or place is None:
        raise NotFolded("tables tell the norms of self-attention in a list of layers only")
    kind = _kind(layer, weights)
    if kind == "gguf":
        name, what = f"{place[0]}.attn_norm", "rms" if "rms_norm_eps" in config else "mean"
        inner = {side: f"{place[0]}.attn_{side}_norm" for side in "qk"}
        if f"{name}_2.weight" in shapes:
            raise NotFolded(f"{starred(name)} and {starred(name)}_2 are two norms, and one of them is before attention")
        if f"{inner['q']}.weight" in shapes and config.get("architecture") not in _NORMED:
            raise NotFolded(
                "no table says what its norms of queries and keys are, and whether they come after rotation"
            )
    else:
        if kind not in _FAMILIES:
            raise NotFolded(f"no table says which norm is before the attention of models of type {kind!r}")
        name, what = _FAMILIES[kind]
        inner = {side: f"{layer.name}.{side}_norm" for side in "qk"}
        if name.startswith("<"):
            (previous, first), stack = name[1:].split("|"), place[0][: place.start(1)]
            root = re.sub(r"(encoder|transformer)\.layers?\.$", "", stack)
            name = f"{stack}{int(place[1]) - 1}.{previous}" if int(place[1]) else f"{root}{first}"
        elif name != "-":
            above = layer.name.rpartition(".")[0]
            name = next((at for at in (f"{place[0]}.{name}", f"{above}.{name}") if f"{at}.weight" in shapes), name)
    known = (name, *inner.values())
    within = (at for at in shapes if kind != "gguf" and at.startswith(f"{layer.name}.") and "norm" in at)
    if strange := next((at for at in within if at.rpartition(".")[0] not in known), None):
        raise NotFolded(f"{starred(strange)} is a norm inside the attention whose place is not known")

    def norm(at: str) -> Norm | None:
        if f"{at}.weight" not in shapes:
            return None
        return Norm(at, layer.read(f"{at}.weight", None) + float(what == "plus"), what == "mean")

    before = norm(name)
    if name != "-" and (before is None or before.gain.numel() not in shapes[layer.query_rows.tensors[0]]):
        raise NotFolded(f"{starred(name)}.weight, the norm before its queries, is not there or of another width")
    query, key = (Norms(before, norm(inner[side])) for side in "qk")
    return query, key
