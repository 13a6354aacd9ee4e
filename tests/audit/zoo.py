"""Tiny random models of many architectures, and faults to inject into them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util

import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

LENGTH, VOCABULARY, WINDOW = 13, 61, 4
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    **_SPECIAL,
}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_WINDOW = {**_GROUPED, "head_dim": 8, "sliding_window": WINDOW}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
_STATE_SPACE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **_SPECIAL}
_SEQ2SEQ = {"vocab_size": VOCABULARY, "d_model": 32, "dropout_rate": 0.1, **_SPECIAL}

MODELS: dict[str, tuple[str, str, dict[str, object]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": WINDOW}),
    "GPT2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **_SPECIAL},
    ),
    "Qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_GROUPED, **_EXPERTS, "head_dim": 8}),
    "Gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _WINDOW),
    "Gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**_WINDOW, **_MIXED}),
    "GPTNeo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 64,
            **_SPECIAL,
        },
    ),
    "Llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        },
    ),
    "Bert": ("BertForMaskedLM", "BertConfig", _BASE),
    "BertDecoder": ("BertLMHeadModel", "BertConfig", {**_BASE, "is_decoder": True}),
    "Albert": ("AlbertModel", "AlbertConfig", {**_BASE, "embedding_size": 16}),
    "ModernBert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_BASE, "local_attention": 4, "layer_types": ["sliding_attention"] * 3},
    ),
    "Gemma3Encoder": (
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {**_WINDOW, "layer_types": ["sliding_attention"] * 3, "use_bidirectional_attention": True},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**_SEQ2SEQ, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4},
    ),
    "Bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **_SEQ2SEQ,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    "Mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {**_STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    ),
    "FalconMamba": ("FalconMambaForCausalLM", "FalconMambaConfig", _STATE_SPACE),
    "Jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_GROUPED,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
    ),
    "Bamba": ("BambaForCausalLM", "BambaConfig", {**_GROUPED, **_MAMBA2, "attn_layer_indices": [1]}),
    "NemotronH": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "hybrid_override_pattern": "M*EM",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "Qwen3Next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_GROUPED,
            **_EXPERTS,
            **_LINEAR,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "MiniMax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**_GROUPED, **_LINEAR, "head_dim": 8, "block_size": 4, "num_local_experts": 4},
    ),
    "Lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    ),
    "RoFormer": ("RoFormerForCausalLM", "RoFormerConfig", {**_BASE, "is_decoder": True}),
    "BigBird": (
        "BigBirdForCausalLM",
        "BigBirdConfig",
        {**_BASE, "is_decoder": True, "attention_type": "original_full"},
    ),
    "RemBert": (
        "RemBertForCausalLM",
        "RemBertConfig",
        {**_BASE, "is_decoder": True, "input_embedding_size": 16, "output_embedding_size": 32},
    ),
    "MegatronBert": ("MegatronBertForCausalLM", "MegatronBertConfig", {**_BASE, "is_decoder": True}),
}
ATTENTION = ["Llama", "Mistral", "GPT2", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "GPTNeo", "Llama4", "BertDecoder"]
ENCODERS = ["Bert", "Albert", "ModernBert", "Gemma3Encoder"]
SEQUENCE_TO_SEQUENCE = ["T5", "Bart"]
EXPERTS = ["Qwen3Moe"]
RECURRENT = ["Mamba2", "FalconMamba", "Jamba", "Bamba", "NemotronH", "Qwen3Next", "MiniMax", "Lfm2"]
REPAIRED = ["RoFormer", "BigBird", "RemBert", "MegatronBert"]


def tiny(name, **changes):
    """A tiny random model in eval mode; the same weights every time."""
    model, config, parameters = MODELS[name]
    torch.manual_seed(3)
    return getattr(transformers, model)(getattr(transformers, config)(**parameters, **changes)).eval()


def tokens(batch=2, length=LENGTH, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def inputs(name, batch=2, length=LENGTH):
    """The keyword arguments of one call; the decoder's sequence is shorter than the encoder's."""
    given = {"input_ids": tokens(batch, length)}
    return given | ({"decoder_input_ids": tokens(batch, 9, seed=6)} if name in SEQUENCE_TO_SEQUENCE else {})


@contextlib.contextmanager
def open_attention(model, layer, allow, head=0):
    """The attention of one head of one layer also lets query q read key k where `allow[q, k]`: a kernel with a bug."""

    def leaky(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        score = query @ key.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5)
        mask = attention_mask.expand(*score.shape).clone()
        if module.layer_idx == layer:
            past = score.shape[-1] - score.shape[-2]
            opened = allow[past : score.shape[-1], : score.shape[-1]]
            mask[:, head] = torch.where(opened, 0.0, mask[:, head])
        return (score + mask).softmax(-1).matmul(value).transpose(1, 2).contiguous(), None

    old = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register("leaky", leaky)
    ALL_MASK_ATTENTION_FUNCTIONS.register("leaky", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.config._attn_implementation = "leaky"
    try:
        yield model
    finally:
        model.config._attn_implementation = old


@contextlib.contextmanager
def wrapped(module, change):
    """`module.forward` returns `change(output, *args, **kwargs)`."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return change(original(*args, **kwargs), *args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class CentredOverSequence(nn.Module):
    """A normalisation with statistics over the sequence, next to the right one."""

    def __init__(self, norm, strength):
        super().__init__()
        self.norm = norm
        self.strength = strength

    def forward(self, hidden):
        return self.norm(hidden) - self.strength * hidden.mean(1, keepdim=True)


class Convolved(nn.Module):
    """A block behind a convolution that looks both ways."""

    def __init__(self, block, width):
        super().__init__()
        self.block = block
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width)

    def forward(self, hidden):
        return self.block(hidden + self.conv(hidden.transpose(1, 2)).transpose(1, 2))


def folder(package):
    """Where an installed package keeps its files; the package itself is not imported."""
    spec = importlib.util.find_spec(package)
    return spec and spec.submodule_search_locations[0]
