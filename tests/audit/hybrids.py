"""Tiny hybrids: a recurrent or convolutional mixer in layer 0, attention in layer 1."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

from tests.models.options import FOUR_EXPERTS, GROUPED, MAMBA2, SHARED_EXPERT, SMALL_HEADS

_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_TWO_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16}
_DELTA = {
    **_LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3Next": ("Qwen3NextForCausalLM", {**SMALL_HEADS, **FOUR_EXPERTS, **SHARED_EXPERT, **_DELTA}),
    "Qwen3_5": ("Qwen3_5ForCausalLM", {**SMALL_HEADS, **_DELTA}),
    "OlmoHybrid": ("OlmoHybridForCausalLM", {**GROUPED, **_DELTA, "linear_num_value_heads": 2}),
    "Jamba": (
        "JambaForCausalLM",
        {**GROUPED, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
    ),
    "Bamba": ("BambaForCausalLM", {**GROUPED, **MAMBA2, "attn_layer_indices": [1]}),
    "Zamba2": (
        "Zamba2ForCausalLM",
        {
            **GROUPED,
            "layers_block_type": ["linear_attention", "hybrid"],
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_d_state": 8,
            "chunk_size": 4,
            "num_mem_blocks": 1,
        },
    ),
    "FalconH1": (
        "FalconH1ForCausalLM",
        {**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
    "Lfm2": ("Lfm2ForCausalLM", {**GROUPED, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}),
    "NemotronH": (
        "NemotronHForCausalLM",
        {
            **SMALL_HEADS,
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "GraniteHybrid": ("GraniteMoeHybridForCausalLM", {**GROUPED, **MAMBA2, **_LINEAR, **_TWO_EXPERTS}),
}
HYBRIDS = tuple(_MODELS)


def hybrid(name: str) -> PreTrainedModel:
    """A random model of two layers, float32, the same weights every time."""
    torch.manual_seed(3)
    cls, options = _MODELS[name]
    model = getattr(transformers, cls)
    return model(model.config_class(**{**options, "vocab_size": 61, "initializer_range": 0.2})).eval()
