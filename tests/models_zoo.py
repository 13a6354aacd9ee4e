"""Tiny random models of many architectures, all with 2 layers, width 32, 4 heads and a vocabulary of 50."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from transformers import PreTrainedModel

WIDTH = 32
_BASE = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # wide enough for every path of the mask to show
}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_WINDOW = {**_GROUPED, "head_dim": 8, "sliding_window": 4}  # shorter than the sequences of the tests
_GPT = {"vocab_size": 50, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER_DECODER = {
    "vocab_size": 50,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.3,
    "decoder_start_token_id": 2,
    **_SPECIAL,
}

CAUSAL: dict[str, tuple[str, dict[str, object]]] = {
    "Llama": ("ForCausalLM", _GROUPED),
    "Mistral": ("ForCausalLM", _WINDOW),
    "Qwen2": ("ForCausalLM", {**_GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "Qwen3": ("ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "Gemma2": ("ForCausalLM", _WINDOW),
    "Gemma3": ("ForCausalLM", _WINDOW),
    "GPT2": ("LMHeadModel", {**_GPT, **_SPECIAL}),
    "GPTNeoX": ("ForCausalLM", _BASE),
    "Phi3": ("ForCausalLM", _GROUPED),
    "OPT": (
        "ForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": WIDTH,
            "word_embed_proj_dim": WIDTH,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "init_std": 0.3,
            **_SPECIAL,
        },
    ),
    "Mixtral": ("ForCausalLM", {**_GROUPED, "num_local_experts": 2}),
    "Olmo2": ("ForCausalLM", _GROUPED),
    "Cohere2": ("ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "GptOss": ("ForCausalLM", {**_WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "DeepseekV3": (
        "ForCausalLM",
        {
            **_BASE,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
}
BIDIRECTIONAL: dict[str, tuple[str, dict[str, object]]] = {
    "Bert": ("Model", _BASE),
    "Roberta": ("Model", _BASE),
    "Electra": ("Model", {**_BASE, "embedding_size": WIDTH}),
    "Albert": ("Model", {**_BASE, "embedding_size": WIDTH}),
    "DistilBert": (
        "Model",
        {
            "vocab_size": 50,
            "dim": WIDTH,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
        },
    ),
    "ModernBert": (
        "Model",
        {**_BASE, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4, "global_attn_every_n_layers": 2},
    ),
}
WITHOUT_INTERFACE: dict[str, tuple[str, dict[str, object]]] = {
    "Bloom": ("ForCausalLM", {"vocab_size": 50, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}),
    "XLNet": ("Model", {"vocab_size": 50, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "GPTJ": ("ForCausalLM", {**_GPT, "rotary_dim": 4}),
    "Mamba2": (
        "ForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "state_size": 8,
        },
    ),
}
HYBRID: dict[str, tuple[str, dict[str, object]]] = {
    "Jamba": (
        "ForCausalLM",
        {
            **_GROUPED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "num_experts": 2,
            "mamba_d_state": 4,
        },
    ),
    "FalconH1": (
        "ForCausalLM",
        {**_GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    ),
}
ENCODER_DECODER: dict[str, tuple[str, dict[str, object]]] = {
    "T5": (
        "ForConditionalGeneration",
        {
            "vocab_size": 50,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "initializer_factor": 1.0,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
    ),
    "Bart": ("ForConditionalGeneration", _ENCODER_DECODER),
}
_ALL = {**CAUSAL, **BIDIRECTIONAL, **WITHOUT_INTERFACE, **HYBRID, **ENCODER_DECODER}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def tiny(name: str, dtype: torch.dtype = torch.float64, **changes: object) -> PreTrainedModel:
    """A tiny random model, without dropout, in `dtype`."""
    suffix, options = _ALL[name]
    config = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))(**{**options, **changes})
    make: Callable[..., PreTrainedModel] = getattr(transformers, name + suffix)
    model = make(config).to(dtype).eval()
    if hasattr(model, "set_experts_implementation") and name in {"Mixtral", "GptOss", "DeepseekV3"}:
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    return model


def outputs(model: PreTrainedModel, **inputs: object) -> torch.Tensor:
    """Logits, or the last hidden states of a model without a head."""
    result = model(**inputs)
    return result.logits if "logits" in result else result[0]


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random token ids, without the special ones."""
    return torch.randint(3, 50, (batch, length))
