"""Features of transcoders and sparse autoencoders as entries: they name what a module of a model writes.

The model computes as before. A reader beside a layer encodes what enters the module, and splits what leaves it into
features, the decoder's bias, a skip, and an error: what the features do not reproduce. The parts sum to the output.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.checks import integer, preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow._core.per_thread import PerThread
from attnflow.knowledge.layered import LayerReader, numbering
from attnflow.knowledge.reader import LayerReading
from attnflow.knowledge.reading.feature_tensors import NAMES, Tensors, feature_tensors
from attnflow.knowledge.saving import FORMS
from attnflow.models.anatomy.feed_forward import FeedForward, stored
from attnflow.models.subject import Loaded, Subject

_CHILD: Final = "knowledge_features"  # of a layer


@dataclass(eq=False)
class _Entered:
    value: Tensor | None = None


class FeatureReader(nn.Module, LayerReader):
    """Reports y = sum_i a_i d_i + b_dec + W_skip x + error for each call of a module, and returns y itself.

    a is encoded from x: relu(z) with z = W_enc (x - c) + b_enc, c = b_dec if it is subtracted and else 0. With
    thresholds t (JumpReLU, arXiv:2407.14435) z counts where z > t; with k (TopK, arXiv:2406.04093) the k largest z do.
    Gated (arXiv:2404.16014): relu(exp(r_mag) W_enc x + b_mag) where W_enc x + b_gate > 0, which is the score.
    """

    letter = "F"
    W_enc: Tensor
    W_dec: Tensor
    b_enc: Tensor
    b_dec: Tensor
    threshold: Tensor | None
    b_gate: Tensor | None  # whose place b_enc takes in scores; with b_mag and r_mag
    b_mag: Tensor
    r_mag: Tensor
    W_skip: Tensor | None

    def __init__(self, layer: int, tensors: Tensors, k: int | None, centred: bool, covers: tuple[str, ...]) -> None:
        super().__init__()
        self.layer, self.k, self.centred, self.covers = layer, k, centred, covers
        self.retrieval, self.observer, self.entered = None, None, PerThread(_Entered)
        for name in NAMES:  # not persistent: the state of the model stays its own
            self.register_buffer(name, tensors.get(name), persistent=False)

    @property
    def num_entries(self) -> int:
        return len(self.W_dec)

    @property
    def output_bias(self) -> Tensor:
        return self.b_dec

    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        return positions

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "1 entries model_dim"]:
        return self.W_dec[positions][None]

    def keys(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "1 1 entries width"]:
        return self.W_enc[positions][None, None]

    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "1 1 entries"]:
        """What scores contain beside the product with x; a JumpReLU's thresholds are compared with scores instead."""
        bias = (self.b_enc if self.b_gate is None else self.b_gate)[positions]
        return (bias - self.W_enc[positions] @ self.b_dec if self.centred else bias)[None, None]

    def encode(self, hidden: Float[Tensor, "*tokens width"]) -> tuple[Tensor, Tensor]:
        """Return scores and weights, [*tokens, features], in float32 at least."""
        kind = torch.promote_types(hidden.dtype, self.W_enc.dtype)
        centred = hidden.to(kind) - self.b_dec if self.centred else hidden.to(kind)
        product = functional.linear(centred, self.W_enc.to(kind))
        if self.b_gate is not None:
            scores = product + self.b_gate
            return scores, (product * self.r_mag.exp() + self.b_mag).relu() * (scores > 0)
        scores = product + self.b_enc
        if self.threshold is not None:
            return scores, scores.relu() * (scores > self.threshold)
        if self.k is None:
            return scores, scores.relu()
        best = scores.topk(self.k, dim=-1)
        return scores, torch.zeros_like(scores).scatter(-1, best.indices, best.values.relu())

    def forward(
        self, hidden: Float[Tensor, "*tokens width"], written: Float[Tensor, "*tokens model_dim"]
    ) -> Float[Tensor, "*tokens model_dim"]:
        if self.observer is not None:
            with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
                self.observer(self.read(hidden.detach(), written.detach()))
        return written

    def read(self, hidden: Tensor, written: Tensor) -> LayerReading:
        """The active features of each token, and what else was written: "error", and "skip" if there is one."""
        scores, weights = self.encode(hidden)
        most = int((weights != 0).sum(-1).max()) if weights.numel() else 0
        kept, ids = weights.topk(most, dim=-1)
        table = torch.where(kept != 0, ids, -1)[..., None, :], scores.gather(-1, ids)[None, ..., None, :]
        beside = {"error": written.to(weights.dtype) - weights @ self.W_dec.to(weights) - self.b_dec}
        if self.W_skip is not None:
            beside["skip"] = functional.linear(hidden.to(weights), self.W_skip.to(weights))
            beside["error"] -= beside["skip"]
        return LayerReading(self.layer, *table, kept[..., None, :], beside=beside)


def attach_features(
    model: nn.Module | Loaded,
    layers: Mapping[int | str, Tensors | str | os.PathLike[str]],
    *,
    reads: str | None = None,
    writes: str | None = None,
    k: int | None = None,
    apply_b_dec_to_input: bool = False,
) -> AttachedFeatures:
    """Name what layers of a model write by the features of transcoders or sparse autoencoders, while it is attached.

    The model answers as before, bit for bit. `af.knowledge.trace`, `entry`, `writers` and `activity` and
    `af.explain.answer` read the features, "L12F4031", in place of the neurons. They name the error beside them: what
    the features do not reproduce of the module's true output, so that all sums stay exact, and a skip of its own.

    Args:
        model: a transformers model, or what `af.load_model` returned; also one that `from_ffn` converted.
        layers: by number, or by path of the layer, its tensors or a .safetensors or .npz file of them: W_enc, W_dec,
            b_enc, b_dec (zeros where there are none), threshold for JumpReLU (of BatchTopK too, which is JumpReLU once
            trained), W_skip [out, in], or b_gate, b_mag and r_mag. Either order of the axes of W_enc and W_dec is
            read. SAELens, circuit-tracer, sparsify and Gemma Scope use these names.
        reads: path within the layer of the module whose input is encoded.
        writes: path within the layer of the module whose output is decoded, "" for the layer itself, whose output is
            the residual stream. Without both it is the feed-forward part; with `writes` alone the features encode the
            output that they decode, as an autoencoder. Gemma Scope's transcoders of Gemma 2 and 3 have reads="mlp",
            writes="post_feedforward_layernorm"; its autoencoders of the stream, writes="".
        k: how many features a token may have (TopK); a value must be positive all the same.
        apply_b_dec_to_input: whether an autoencoder subtracts b_dec before it encodes (SAELens' config says so).

    Returns:
        A handle; `remove()` restores the model.

    Raises:
        ValueError: no such layer, module or file; unknown or missing tensors, or wrong shapes; a square W_enc, whose
            axes cannot be told apart; k together with thresholds, or more than the features; a layer that has features.
        UnsupportedArchitecture: no feed-forward part is known, or it has several: pass `reads` and `writes`.

    Cost: the tensors, in float32 at least. A reading computes all features of its tokens, once for each pass.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2))
    >>> with attach_features(model, {1: {"W_enc": torch.randn(16, 40), "W_dec": torch.randn(40, 16)}}) as handle:
    ...     print(handle)
    1 layer of LlamaForCausalLM is read as features: layer 1 (40)
    """
    subject = Subject.of(model)
    subject.require_unwrapped("features", heads=False)
    if not layers:
        raise ValueError("layers is empty: give tensors by the number of a layer")
    readers: list[FeatureReader] = []
    with ExitStack() as stack:  # an error undoes what was attached before it
        for key, given in layers.items():
            path, number = _layer(subject, key)
            layer = subject.model.get_submodule(path)
            read, write = _places(subject, path, reads, writes)
            reader = _reader(subject, path, number, read, write, given, k, apply_b_dec_to_input)
            readers.append(reader)
            layer.add_module(_CHILD, reader)
            stack.callback(delattr, layer, _CHILD)
            if read is not None:
                enter = partial(_enter, reader)
                stack.callback(layer.get_submodule(read).register_forward_pre_hook(enter, with_kwargs=True).remove)
            leave = partial(_leave, reader, read is not None)
            stack.callback(layer.get_submodule(write).register_forward_hook(leave).remove)
        return AttachedFeatures(subject.model, readers, stack.pop_all())


class AttachedFeatures(Handle):
    """The handle of `attach_features`; `readers` are the layers' readers."""

    def __init__(self, model: nn.Module, readers: Sequence[FeatureReader], undo: ExitStack) -> None:
        super().__init__(model)
        self.readers, self._undo, self._numbers = tuple(readers), undo, numbering(model)

    def _restore(self) -> None:
        self._undo.close()

    def _summary(self) -> str:
        listed = ", ".join(f"layer {self._numbers[reader][0]} ({reader.num_entries:,})" for reader in self.readers)
        verb = "is" if len(self.readers) == 1 else "are"
        return f"{plural(len(self.readers), 'layer')} of {self.kind} {verb} read as features: {listed}"


def _layer(subject: Subject, key: int | str) -> tuple[str, int]:
    every = subject.layers
    paths = [key] if isinstance(key, str) else [path for path, number in every.items() if number == key]
    if len(paths) != 1 or paths[0] not in every:
        raise ValueError(f"expected the number or path of one layer of {preview(list(every))}, got {key!r}")
    if hasattr(subject.model.get_submodule(paths[0]), _CHILD):
        raise ValueError(f"layer {key} has features already: remove the earlier handle first")
    return paths[0], every[paths[0]]


def _places(subject: Subject, path: str, reads: str | None, writes: str | None) -> tuple[str | None, str]:
    """Where features of a layer read (None: what they write) and write, as paths within the layer."""
    if writes is not None:
        return reads, writes
    every = [form.site for form in getattr(subject.model, FORMS, ())] or subject.feed_forward
    parts = [site for site in every if f"{site.name}.".startswith(f"{path}.")]
    if len(parts) != 1:
        raise UnsupportedArchitecture(
            f"expected one feed-forward part in {path}, got {preview([site.name for site in parts])}: pass the paths "
            'within the layer, such as reads="mlp", writes="mlp"'
        )
    site, within = parts[0], parts[0].name.removeprefix(path).lstrip(".")
    ends = (site.first[0], site.last) if isinstance(site, FeedForward) else ("", "")
    first, last = (".".join(filter(None, (within, end))) for end in ends)
    return first if reads is None else reads, last


def _reader(
    subject: Subject,
    path: str,
    number: int,
    read: str | None,
    write: str,
    given: Tensors | str | os.PathLike[str],
    k: int | None,
    centred: bool,
) -> FeatureReader:
    layer = subject.model.get_submodule(path)
    try:
        ends = [layer.get_submodule(place) for place in ((write if read is None else read), write)]
    except AttributeError as error:
        raise ValueError(f"{path} has no such module: {error}") from None
    if centred and read is not None:
        raise ValueError(
            "apply_b_dec_to_input is for autoencoders: a transcoder's b_dec is of its output, not its input"
        )
    weights = [getattr(end, "weight", None) for end in ends]
    sizes = [
        stored(end).shape if isinstance(weight, Tensor) and weight.ndim == 2 else [subject.text_config.hidden_size] * 2
        for end, weight in zip(ends, weights, strict=True)
    ]
    tensors = feature_tensors(given, sizes[0][0 if read is None else 1], sizes[1][0])
    if k is not None:
        integer("k", k, 1, len(tensors["W_enc"]), why=", the number of features")
        if {"threshold", "b_gate"} & set(tensors):
            raise ValueError("k is for a plain encoder, and these tensors have thresholds or gates: leave it out")
    example = next((p for p in layer.parameters() if p.is_floating_point()), torch.empty(0))
    kind = torch.promote_types(example.dtype, torch.float32)
    kinds = {name: torch.promote_types(tensor.dtype, kind) for name, tensor in tensors.items()}
    tensors = {name: tensor.to(subject.device, kinds[name]) for name, tensor in tensors.items()}
    covers = () if read is None and not write else tuple(dict.fromkeys(filter(None, (read, write))))
    inside = tuple(f"{path}.{place}." for place in covers)
    others = {f"{name}.": m.layer for name, m in subject.model.named_modules() if isinstance(m, LayerReader)}
    number = next((layer for name, layer in others.items() if name.startswith(inside)), number)
    if any(layer == number and not name.startswith(inside) for name, layer in others.items()):
        raise ValueError(
            f"other entries are read as layer {number}: attach features to the model before its conversion"
        )
    return FeatureReader(number, tensors, k, centred, covers)


def _enter(reader: FeatureReader, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    reader.entered().value = args[0] if args else next(iter(kwargs.values()))


def _leave(reader: FeatureReader, entered: bool, _: nn.Module, args: object, output: Any) -> Any:
    written = output[0] if isinstance(output, tuple) else output
    here = reader.entered()
    hidden, here.value = here.value if entered else written, None
    if hidden is None:
        raise RuntimeError("the module whose input the features read did not run before the one that they decode")
    again = reader(hidden, written)
    return (again, *output[1:]) if isinstance(output, tuple) else again
