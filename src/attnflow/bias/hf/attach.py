"""`attach`, `detach`, `disabled`: give a transformers model a bias, and take it away without a trace."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from itertools import count
from typing import Final, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.bias.attention import IMPLEMENTATIONS
from attnflow.bias.config import BiasConfig
from attnflow.bias.hf.forward import biased
from attnflow.bias.hf.hooks import CHILD, Enter, Slot, install, uninstall
from attnflow.bias.hf.layers import Layer, layers_of
from attnflow.bias.hf.summary import BiasSummary, summary
from attnflow.bias.kinds import build
from attnflow.bias.kinds.custom import Custom
from attnflow.bias.layer import LayerBias, layer_biases
from attnflow.models.interception import Interception, base_implementation, check_implementation, intercept
from attnflow.models.sites import models_around

Bias = BiasConfig | Custom
Train = Literal["guidance", "all"]

_RECORD: Final = "_attnflow_bias"  # on the model: what `detach` must restore
_log: Final = logging.getLogger("attnflow.bias")


@dataclass(eq=False)
class Record:
    """What attaching changed.

    Attributes:
        biases: the configs, in the order of the summands.
        interception: of the attention of the layers.
        frozen: parameters that `train="guidance"` froze.
        number: biases attached before it in this process.
    """

    biases: tuple[Bias, ...]
    interception: Interception
    frozen: list[nn.Parameter]
    number: int = field(default_factory=count().__next__)


def attach(
    model: nn.Module,
    bias: Bias | Sequence[Bias] = BiasConfig(),  # noqa: B008 - frozen
    *,
    train: Train = "all",
    impl: str = "auto",
) -> BiasSummary:
    """Give a transformers model a learned bias on its attention scores; it stays the object that it was.

    At zero initialisation the model's outputs are unchanged, bit for bit (with attention dropout at work, up to which
    weights are dropped). Everything that works on a `PreTrainedModel` keeps working: `Trainer`, `generate` with its
    caches, PEFT, checkpoints (which then hold the bias as well).

    Args:
        model: a transformers model, or one stack of it (`model.get_decoder()`).
        bias: what to add: a `BiasConfig`, a `Custom` bias, or several, whose sum is added.
        train: "all" leaves what is trained as it is; "guidance" freezes everything but the bias until `detach`.
        impl: what computes attention in the layers with a bias: "auto", "reference", "tiled", "flex" or "triton".

    Returns:
        A summary of what was added, which prints as a table.

    Raises:
        ValueError: a bias is attached already, layers out of range, a model on several devices within one layer.
        UnsupportedArchitecture: attention that cannot be reached, with what is missing. The model is as it was.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> attach(model, BiasConfig(hidden_dim=8)).parameters
    289
    >>> detach(model)
    """
    biases = (bias,) if isinstance(bias, BiasConfig | Custom | str) else tuple(bias)
    _check(model, biases, train, impl)
    layers = layers_of(model)
    made = _build(layers, biases, impl)
    around = models_around(model, [layer.site for layer, _, _ in made])
    modules = [layer.site.module for layer, _, _ in made]
    for owner in (*around, *(module for module in modules if hasattr(module, "config"))):
        name = base_implementation(cast(PreTrainedConfig, owner.config))
        check_implementation(around[0], name, "the model's attention implementation", "bias")
    record = Record(biases, intercept(around, dict.fromkeys(modules, biased), role="bias"), [])
    if train == "guidance":
        record.frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in record.frozen:
            parameter.requires_grad_(False)
    for layer, child, enter in made:
        layer.site.module.add_module(CHILD, child)
        install(layer.site.module, enter)
    setattr(around[0], _RECORD, record)  # on the model itself, also if an adapter or a parallel wrapper was given
    result = summary(model)
    _log.info("%s", result)
    return result


def detach(model: nn.Module) -> None:
    """Remove the bias of a model; it is again what it was before `attach`, with the weights that it has now.

    Raises:
        ValueError: no bias is attached.
    """
    for owner in _owners(model):
        record: Record = owner.__dict__[_RECORD]
        record.interception.remove(keep_changes=True)
        for parameter in record.frozen:
            parameter.requires_grad_(True)
        for name, _ in list(layer_biases(owner)):
            module = owner.get_submodule(name.rpartition(".")[0])
            uninstall(module)
            delattr(module, CHILD)
        delattr(owner, _RECORD)


@contextmanager
def disabled(model: nn.Module) -> Generator[None]:
    """Run the model without its bias inside the `with` block: exactly the base model, at its cost.

    A key-value cache filled inside cannot be continued outside, nor the other way round.

    Raises:
        ValueError: no bias is attached.
    """
    record_of(model)
    found = [bias for _, bias in layer_biases(model)]
    before = [bias.enabled for bias in found]
    for bias in found:
        bias.enabled = False
    try:
        yield
    finally:
        for bias, enabled in zip(found, before, strict=True):
            bias.enabled = enabled


def record_of(model: nn.Module) -> Record:
    """What was attached to a model, also if it has been wrapped since (PEFT, DDP).

    Raises:
        ValueError: nothing.
    """
    return _owners(model)[0].__dict__[_RECORD]


def _owners(model: nn.Module) -> list[nn.Module]:
    """The models within `model` that a bias was attached to, the newest first; two with both halves of BART."""
    found = [module for module in model.modules() if _RECORD in module.__dict__]
    if not found and next(layer_biases(model), None) is not None:
        raise ValueError(f"{type(model).__name__} is a part of the model that the bias was attached to; pass that")
    if not found:
        raise ValueError(f"{type(model).__name__} has no bias attached; see af.bias.attach")
    return sorted(found, key=lambda owner: -cast(Record, owner.__dict__[_RECORD]).number)


def _check(model: object, biases: Sequence[object], train: object, impl: object) -> None:
    wrong = [one for one in biases if not isinstance(one, BiasConfig | Custom)]
    if wrong or not biases:
        got = ", ".join(type(one).__name__ for one in wrong) or "none"
        raise TypeError(f"expected a BiasConfig, a Custom bias or a sequence of them, got {got}")
    if train not in ("guidance", "all"):
        raise ValueError(f"train must be 'guidance' or 'all', got {train!r}")
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"impl must be one of 'auto', {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if isinstance(model, nn.Module) and next(layer_biases(model), None) is not None:
        raise ValueError(f"{type(model).__name__} has a bias attached already; af.bias.detach(model) first")


def _build(layers: Sequence[Layer], biases: Sequence[Bias], impl: str) -> list[tuple[Layer, LayerBias, Enter]]:
    """Everything that attaching adds, without touching the model."""
    chosen: dict[int, list[Bias]] = {}
    for bias in biases:
        for index in bias.layer_indices(len(layers)):
            chosen.setdefault(index, []).append(bias)
    made: list[tuple[Layer, LayerBias, Enter]] = []
    for index in sorted(chosen):
        layer, wanted = layers[index], chosen[index]
        references = [bias.reference for bias in wanted if _reads(bias)]
        _reachable(layer, wanted)
        device, dtype = layer.place()
        devices = {str(parameter.device) for parameter in layer.site.module.parameters()}
        if len(devices) > 1:
            raise ValueError(
                f"{layer.site.name} lies on several devices ({', '.join(sorted(devices))}); move it to one"
            )
        with torch.device(device):
            kinds = [build(b, layer.shape) if isinstance(b, BiasConfig) else b.module(layer.shape) for b in wanted]
        child = LayerBias(cast(Sequence[nn.Module], kinds), layer.shape, references, impl, len(layers))
        child.to(device, dtype).train(layer.site.module.training)
        rope = any(isinstance(b, BiasConfig) and b.rope == "remove" for b in wanted)
        hidden = "hidden" in references
        projections = layer.projections if "unrotated" in child.references else ()
        made.append((layer, child, Enter(Slot(layer.depth), projections, hidden, rope)))
    return made


def _reachable(layer: Layer, wanted: Sequence[Bias]) -> None:
    reads = [bias for bias in wanted if bias.reference in ("unrotated", "per_head") and _reads(bias)]
    if reads and not layer.projections:
        raise UnsupportedArchitecture(
            f"{layer.site.name}: the projections of queries and keys cannot be reached: {layer.missing}. "
            "reference='rotated' or 'hidden' does without them"
        )
    if getattr(layer.site.module, "is_kv_shared_layer", False):
        raise UnsupportedArchitecture(
            f"{layer.site.name} attends to the keys of an earlier layer, of which its bias would see nothing; leave it "
            "out of layers=[...]"
        )
    for path, _, _ in layer.projections:
        try:
            layer.site.module.get_submodule(path)
        except AttributeError as error:
            raise UnsupportedArchitecture(f"{layer.site.name} has no module {path!r} to read from") from error
    removes = any(isinstance(bias, BiasConfig) and bias.rope == "remove" for bias in wanted)
    if removes and "position_embeddings" not in signature(type(layer.site.module).forward).parameters:
        raise UnsupportedArchitecture(f"{layer.site.name} takes no rotary embedding from outside; use rope='keep'")


def _reads(bias: Bias) -> bool:
    """Whether the kind looks at vectors at all; some know positions only."""
    return isinstance(bias, Custom) or bias.kind not in ("alibi", "relative", "dense")


def describe(biases: Sequence[Bias]) -> list[Mapping[str, object]]:
    """Biases as JSON holds them: of a custom one, what can be compared with the one that is given on loading."""
    return [bias.to_dict() if isinstance(bias, BiasConfig) else _custom(bias) for bias in biases]


def _custom(bias: Custom) -> Mapping[str, object]:
    layers = bias.layers if isinstance(bias.layers, str) else list(bias.layers)
    return {"kind": "custom", "name": bias.name, "layers": layers, "reference": bias.reference}
