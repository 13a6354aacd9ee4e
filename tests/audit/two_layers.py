"""Tiny vision-language models of two layers, and a call of each with a picture: text, four image tokens, text."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

from tests.models.options import PATCHED, SECTIONS, SMALL_HEADS, VISION, WINDOW

IMAGE = 7
TEXT = {**SMALL_HEADS, "vocab_size": 61, "initializer_range": 0.2}
_SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
_LLAMA4_VISION = {
    **VISION,
    "image_size": 16,
    "intermediate_size": 128,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}
_PATCHED = {**PATCHED, "fullatt_block_indexes": [0, 1], "window_size": 16}
_MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "Llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
        },
    ),
    "PaliGemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "gemma"},
            "vision_config": {**_SIGLIP, "projection_dim": 32},
            "image_token_index": IMAGE,
            "projection_dim": 32,
        },
    ),
    "Gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": _SIGLIP,
            "image_token_index": IMAGE,
            "mm_tokens_per_image": 4,
        },
    ),
    "Gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "use_bidirectional_attention": "vision",
                "vocab_size_per_layer_input": 61,
                "global_head_dim": 8,
            },
            "vision_config": {
                **VISION,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "pooling_kernel_size": 2,
                "position_embedding_size": 16,
                "default_output_length": 4,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
        },
    ),
    "Qwen2_5_VL": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**TEXT, **SECTIONS},
            "vision_config": _PATCHED,
            "image_token_id": IMAGE,
            "vision_start_token_id": 8,
            "vision_end_token_id": 9,
        },
    ),
    "Llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
            "vision_config": _LLAMA4_VISION,
            "image_token_index": IMAGE,
        },
    ),
}
_MODELS["ColPali"] = (
    "ColPaliForRetrieval",
    {"vlm_config": {**_MODELS["PaliGemma"][1], "model_type": "paligemma"}, "embedding_dim": 8},
)
PICTURED = tuple(_MODELS)


def built(name: str, **changes: object) -> PreTrainedModel:
    """A random model, float32, the same weights every time."""
    torch.manual_seed(3)
    cls, options = _MODELS[name]
    model = getattr(transformers, cls)
    return model(model.config_class(**{**options, **changes})).eval()


def call(name: str, batch: int = 1) -> dict[str, torch.Tensor]:
    """Three tokens, an image of four tokens, four tokens."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(10, 61, (batch, 11), generator=generator)
    ids[:, 3:7] = IMAGE
    types = (ids == IMAGE).long()
    size = 16 if name == "Llama4" else 8
    inputs = {"input_ids": ids, "pixel_values": torch.randn(batch, 3, size, size, generator=generator)}
    if name == "Gemma3":
        inputs["token_type_ids"] = types
    if name in ("PaliGemma", "ColPali"):
        inputs["token_type_ids"] = (torch.arange(11) >= 9).long().expand(batch, -1).clone()
    if name == "Gemma4":
        inputs["mm_token_type_ids"] = types
        inputs["pixel_values"] = torch.randn(batch, 16, 48, generator=generator)
        grid = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).reshape(16, 2)
        inputs["image_position_ids"] = grid.expand(batch, -1, -1).clone()
    if name == "Qwen2_5_VL":
        inputs["pixel_values"] = torch.randn(16 * batch, 3 * 2 * 4 * 4, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * batch)
        inputs["mm_token_type_ids"] = types
        inputs["input_ids"][:, 2] = 8
    return inputs
