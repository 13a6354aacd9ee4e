"""Options that tiny models share: two layers of width 32, 4 heads, a vocabulary of 50."""

from __future__ import annotations

WIDTH = 32
WINDOW = 4  # of sliding windows: shorter than the sequences of the tests
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4}
NO_FEED_FORWARD = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    **HEADS,
    "max_position_embeddings": 64,
    **SPECIAL,
    "initializer_range": 0.3,  # wide enough for every path of the mask to show
}
BASE = {**NO_FEED_FORWARD, "intermediate_size": 48}
GROUPED = {**BASE, "num_key_value_heads": 2}
SMALL_HEADS = {**GROUPED, "head_dim": 8}
WINDOWED = {**SMALL_HEADS, "sliding_window": WINDOW}
GPT = {"vocab_size": 50, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
TWO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERT = {"shared_expert_intermediate_size": 16}
ALL_FULL = {"layer_types": ["full_attention"] * 2}
LATENT = {
    **BASE,
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
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
STATE_SPACE = {"vocab_size": 50, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8}
ENCODER_DECODER = {
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
    **SPECIAL,
}
T5 = {
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
}
EIGHT_BY_EIGHT = {"image_size": 8, "patch_size": 4}
IMAGE = {**EIGHT_BY_EIGHT, "num_channels": 3, "initializer_range": 0.3}
VISION = {"hidden_size": WIDTH, "intermediate_size": 48, **HEADS, **IMAGE}
ONE_CONVOLUTION = {"conv_dim": (16,), "conv_stride": (4,), "conv_kernel": (4,), "num_feat_extract_layers": 1}
AUDIO = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    **HEADS,
    **ONE_CONVOLUTION,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "initializer_range": 0.3,
}
PATCHED = {
    "depth": 2,
    "hidden_size": WIDTH,
    "out_hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "initializer_range": 0.3,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
CLIP_TEXT = {**BASE, "projection_dim": WIDTH}
MODULAR = {
    **{name: value for name, value in GROUPED.items() if not name.endswith("os_token_id")},
    "num_entries": 24,
    "entry_dim": 20,
    "num_knowledge_heads": 2,
}
MODULAR.pop("intermediate_size")
