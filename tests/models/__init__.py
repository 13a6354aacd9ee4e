"""The one zoo of tiny random models: every family that a test runs, made in milliseconds, and what they run on.

`tiny` makes two layers of width 32, 4 heads and a vocabulary of 50 for most tests; `deep` makes three layers, for
faults that have a layer before and after them; `ZOO[name].build()` is `tiny` with fixed weights and plain attention.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from attnflow.knowledge import ModularConfig, ModularForCausalLM
from tests.models.options import MODULAR as MODULAR
from tests.models.options import WIDTH as WIDTH
from tests.models.options import WINDOW as WINDOW
from tests.models.table import (
    AUDITED,
    BIDIRECTIONAL,
    CAUSAL,
    ENCODER_DECODERS,
    HYBRID,
    MORE_DECODERS,
    OWN_MASKS,
    REGISTERED,
    WITHOUT_INTERFACE,
    TinyModel,
    in_double,
)

DEEP_VOCABULARY = 61
_TEXT = {**CAUSAL, **BIDIRECTIONAL, **WITHOUT_INTERFACE, **HYBRID, **MORE_DECODERS, **ENCODER_DECODERS, **OWN_MASKS}
_NO_FORM = {
    "Mamba2",
    "MBartDecoder",
    "SeamlessM4T",
    *OWN_MASKS,
}  # no products of queries and keys, or an entry of its own
ZOO: dict[str, TinyModel] = {**{name: _TEXT[name] for name in _TEXT if name not in _NO_FORM}, **REGISTERED}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_THREE_LAYERS: dict[str, dict[str, object]] = {
    "Gemma3": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "Gemma3Encoder": {"layer_types": ["sliding_attention"] * 3},
    "ModernBert": {"layer_types": ["sliding_attention"] * 3},
    "Llama4": {"layer_types": ["chunked_attention", "chunked_attention", "full_attention"]},
    "Qwen3Next": _LINEAR,
    "MiniMax": _LINEAR,
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}
_OTHER_DEPTHS: dict[str, dict[str, object]] = {
    "GPT2": {"n_layer": 3},
    "T5": {"num_decoder_layers": 3},
    "Jamba": {"num_hidden_layers": 4, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4},
    **{name: {} for name in ("Bart", "GPTNeo", "Mamba2", "FalconMamba", "NemotronH")},
}


def tiny(name: str, dtype: torch.dtype = torch.float64, **changes: object) -> PreTrainedModel:
    """A tiny random model, in `dtype`."""
    return in_double(_TEXT[name].make(**changes)).to(dtype)


def deep(name: str, **changes: object) -> PreTrainedModel:
    """A tiny random model of three layers where the family allows it, float32; the same weights every time."""
    torch.manual_seed(3)
    entry = {**ZOO, **_TEXT, **AUDITED}[name]
    depth = _OTHER_DEPTHS.get(name, {"num_hidden_layers": 3, **_THREE_LAYERS.get(name, {})})
    return entry.make(**{"vocab_size": DEEP_VOCABULARY, "initializer_range": 0.2, **depth, **changes})


def modular(dtype: torch.dtype = torch.float64, disturbed: bool = True, **changes: object) -> ModularForCausalLM:
    """Two blocks with 24 entries of width 20 read by 2 heads; disturbed: no parameter is 0 or 1 throughout."""
    torch.manual_seed(0)
    model = ModularForCausalLM(ModularConfig(**{**MODULAR, **changes}))
    if disturbed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def outputs(model: PreTrainedModel, **inputs: object) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head."""
    result = model(**inputs)
    return result.logits if "logits" in result else result[0]


def state(model: PreTrainedModel) -> list[tuple[object, ...]]:
    """Everything about a model that an interception could have touched."""
    return [
        (name, sorted(module.__dict__), dict(getattr(getattr(module, "config", None), "__dict__", {})))
        for name, module in model.named_modules()
    ]


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(3, 50, (batch, length))
