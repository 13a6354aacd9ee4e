"""What a model or its configuration says of labels: which position predicts them, and what it may read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from attnflow.models.loaded import Loaded

# Decoders of sequence-to-sequence families take labels where they stand, although their names end in ForCausalLM.
_UNSHIFTED: Final = frozenset(
    {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "flaubert", "marian", "mbart", "musicgen"}
    | {"musicgen_decoder", "musicgen_melody", "musicgen_melody_decoder", "mvp", "pegasus", "plbart", "trocr"}
    | {"whisper", "xlm"}
)
_IMAGE_BLOCKS: Final = frozenset({"gemma3", "gemma3_text", "gemma4", "gemma4_text", "t5gemma2"})
_CLASSES: Final = re.compile(r"For(Sequence|Token|Image|Audio|Video)\w*Classification|ForQuestionAnswering|ForMultiple")
_CAUSAL: Final = re.compile(r"ForCausalLM|LMHead|ForConditionalGeneration|DoubleHeads|ModelWithLMHead")
_MASKED: Final = re.compile(r"ForMaskedLM|ForPreTraining")


@dataclass(frozen=True)
class Family:
    """How labels are taken.

    Attributes:
        name: the class of the model; "" where no model is given.
        shift: the loss takes label i from position i - shift; None if that is not known.
        causal: whether positions read only what is before them; None if that is not known.
        decoder: labels are those of the decoder of an encoder-decoder.
        classes: labels are classes, not tokens.
        prefix: `token_type_ids` 0 is a prefix that reads itself in both directions.
        images: `token_type_ids` 1 are images, each reads itself in both directions.
        transformers: the model is one of transformers, whose masks follow its rules.
        vocabulary: number of token ids; None if that is not known.
        pad: id of padding; None if that is not known.
        ends: ids that end an answer.
        layers: number of layers; None if that is not known.
    """

    name: str = ""
    shift: int | None = None
    causal: bool | None = None
    decoder: bool = False
    classes: bool = False
    prefix: bool = False
    images: bool = False
    transformers: bool = False
    vocabulary: int | None = None
    pad: int | None = None
    ends: tuple[int, ...] = ()
    layers: int | None = None


def family_of(model_or_config: Any) -> Family:
    """What is read of a model, of what `af.load_model` returned, or of a configuration; None says nothing.

    Raises:
        TypeError: something else.
    """
    if model_or_config is None:
        return Family()
    if isinstance(model_or_config, Loaded):
        model_or_config = model_or_config.model
    is_module = isinstance(model_or_config, nn.Module)
    config = getattr(model_or_config, "config", None) if is_module else model_or_config
    if not hasattr(config, "model_type"):
        if is_module:
            return Family(name=type(model_or_config).__name__)
        raise TypeError(
            "model_or_config must be a model, its configuration or what af.load_model returned, got "
            f"{type(model_or_config).__name__}; leave it out if there is none"
        )
    base = _wrapped(model_or_config) if is_module else None
    architectures = getattr(config, "architectures", None) or [""]
    name = type(base).__name__ if base is not None else str(architectures[0])
    return _read(name, config)


def _wrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers such as PEFT's, which have another class and the same configuration."""
    getter = getattr(model, "get_base_model", None)
    inner = getter() if callable(getter) else getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) and hasattr(inner, "config") else model


def _read(name: str, config: Any) -> Family:
    text = getattr(config, "text_config", None) or config
    kind = str(config.model_type)
    decoder = bool(getattr(config, "is_encoder_decoder", False)) and "CausalLM" not in name
    masked, generates = _MASKED.search(name) is not None, _CAUSAL.search(name) is not None
    shift = 0 if decoder or masked or kind in _UNSHIFTED else 1 if generates else None
    if kind == "xlnet":  # its order is drawn for each call, and its targets are chosen by target_mapping
        shift = None
    ends = getattr(text, "eos_token_id", None)
    size = getattr(text, "vocab_size", None)
    return Family(
        name=name or f"{kind} configuration",
        shift=shift,
        causal=True if decoder or kind == "paligemma" else _causal(text, masked, generates),
        decoder=decoder,
        classes=_CLASSES.search(name) is not None,
        prefix=kind == "paligemma",
        images=kind in _IMAGE_BLOCKS,
        transformers=True,
        vocabulary=size if isinstance(size, int) else None,
        pad=_id(getattr(text, "pad_token_id", None)),
        ends=tuple(i for i in (ends if isinstance(ends, list | tuple) else [ends]) if isinstance(i, int)),
        layers=_id(getattr(text, "num_hidden_layers", None)) or None,
    )


def _causal(config: Any, masked: bool, generates: bool) -> bool | None:
    both = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both or getattr(config, "is_causal", True) is False:
        return False
    is_decoder = getattr(config, "is_decoder", None)  # only families that may be either have it
    if is_decoder is not None:
        return bool(is_decoder)
    return False if masked else True if generates else None


def _id(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
