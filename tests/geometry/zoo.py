"""Tiny random models of every family in the registry, each with the inputs that it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
import transformers
from transformers import PreTrainedModel

from tests import models_zoo as text
from tests.models_zoo import WIDTH

_BASE, _GROUPED, _SPECIAL = text._BASE, text._GROUPED, text._SPECIAL
_ENCODER_DECODER = text._ENCODER_DECODER
_VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "initializer_range": 0.3,
}
_AUDIO = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16,),
    "conv_stride": (4,),
    "conv_kernel": (4,),
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "initializer_range": 0.3,
}
_PATCHED = {
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
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_CLIP_TEXT = {**_BASE, "projection_dim": WIDTH}
_MLA = {k: v for k, v in text.CAUSAL["DeepseekV3"][1].items()}  # noqa: C416
Inputs = Callable[[int], dict[str, torch.Tensor]]


def tokens(batch: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((batch, 1), 5)}


def pair(batch: int) -> dict[str, torch.Tensor]:
    return {**tokens(batch), "decoder_input_ids": torch.full((batch, 1), 5)}


def pixels(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(batch, 3, 8, 8, dtype=torch.float64)}


def both(batch: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.full((batch, 3), 2), **pixels(batch)}


def waveform(batch: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.zeros(batch, 64, dtype=torch.float64)}


def attending(batch: int) -> dict[str, torch.Tensor]:
    return {**tokens(batch), "encoder_hidden_states": torch.zeros(batch, 3, WIDTH, dtype=torch.float64)}


def captioned(batch: int) -> dict[str, torch.Tensor]:
    return {**pixels(batch), "decoder_input_ids": torch.full((batch, 1), 5)}


def seen(batch: int) -> dict[str, torch.Tensor]:
    return {**pixels(batch), "input_ids": torch.full((batch, 4), 7)}


def patches(batch: int) -> dict[str, torch.Tensor]:
    """One image of as many patches as samples are asked for."""
    size = 3 * 2 * 4 * 4
    grid = torch.tensor([[1, 2, batch // 2]])
    return {"hidden_states": torch.zeros(batch, size, dtype=torch.float64), "grid_thw": grid}


def composite(name: str, encoder: str, decoder: str, inputs: Inputs) -> Animal:
    part = {
        "Bert": {"model_type": "bert", **_BASE},
        "ViT": {"model_type": "vit", **_VISION},
        "GPT2": {"model_type": "gpt2", **text._GPT},
    }
    above = {**part[decoder], "is_decoder": True, "add_cross_attention": True}
    return Animal(name + "Model", name + "Config", {"encoder": part[encoder], "decoder": above}, inputs)


def spectrogram(batch: int) -> dict[str, torch.Tensor]:
    return {
        "input_features": torch.zeros(batch, 8, 16, dtype=torch.float64),
        "decoder_input_ids": torch.full((batch, 1), 5),
    }


@dataclass(frozen=True)
class Animal:
    """A tiny model: the class, the options of its config, its inputs for a batch, and where the class is."""

    model: str
    config: str
    options: dict[str, object]
    inputs: Inputs = tokens
    package: str = "transformers"

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        package = import_module(self.package)
        config = getattr(package, self.config)(**self.options)
        module, _, name = self.model.rpartition(".")
        source = import_module(f"transformers.models.{module}") if module else package
        model = getattr(source, name)._from_config(config, attn_implementation="eager")
        model = model.to(torch.float64).eval()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        return model


def _of(
    name: str, options: dict[str, object], suffix: str = "Model", inputs: Inputs = tokens, **more: object
) -> Animal:
    return Animal(name + suffix, name + "Config", {**options, **more}, inputs)


def _known(name: str, inputs: Inputs = tokens) -> Animal:
    suffix, options = text._ALL[name]
    return Animal(name + suffix, text._CONFIGS.get(name, name + "Config"), options, inputs)


_FALCON = {k: v for k, v in _BASE.items() if k != "intermediate_size"}
ZOO: dict[str, Animal] = {
    **{name: _known(name) for name in (*text.CAUSAL, *text.BIDIRECTIONAL, "Bloom", "GPTJ", "Jamba", "FalconH1")},
    "T5": _known("T5", pair),
    "Bart": _known("Bart", pair),
    "Gemma": _of("Gemma", {**_GROUPED, "head_dim": 8}),
    "Olmo": _of("Olmo", _GROUPED),
    "Olmoe": _of("Olmoe", {**_GROUPED, "num_experts": 2, "num_experts_per_tok": 1}),
    "Qwen2Moe": _of(
        "Qwen2Moe",
        {
            **_GROUPED,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Qwen3Moe": _of(
        "Qwen3Moe", {**_GROUPED, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    ),
    "Qwen3Next": _of(
        "Qwen3Next",
        {
            **_GROUPED,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Qwen3_5": Animal(
        "Qwen3_5TextModel",
        "Qwen3_5TextConfig",
        {**_GROUPED, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    ),
    "Qwen3_5Moe": Animal(
        "Qwen3_5MoeTextModel",
        "Qwen3_5MoeTextConfig",
        {
            **_GROUPED,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "Phi": _of("Phi", _BASE),
    "Phimoe": _of("Phimoe", {**_GROUPED, "num_local_experts": 2}),
    "FalconGrouped": Animal(
        "FalconModel", "FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}
    ),
    "FalconMultiQuery": Animal("FalconModel", "FalconConfig", {**_FALCON, "multi_query": True}),
    "FalconMultiHead": Animal("FalconModel", "FalconConfig", {**_FALCON, "multi_query": False, "alibi": True}),
    "CodeGen": Animal("CodeGenModel", "CodeGenConfig", {**text._GPT, "rotary_dim": 4}),
    "Persimmon": _of("Persimmon", _BASE),
    "GPTNeo": Animal(
        "GPTNeoModel",
        "GPTNeoConfig",
        {**_BASE, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    ),
    "OpenAIGPT": Animal("OpenAIGPTModel", "OpenAIGPTConfig", text._GPT),
    "DeepseekV2": _of("DeepseekV2", {**_MLA, "n_group": 1, "topk_method": "greedy", "first_k_dense_replace": 2}),
    "DeepseekV3FullQuery": _of("DeepseekV3", {**_MLA, "q_lora_rank": None}),
    "StableLm": _of("StableLm", _GROUPED),
    "Starcoder2": _of("Starcoder2", _GROUPED),
    "Cohere": _of("Cohere", _GROUPED),
    "Granite": _of("Granite", _GROUPED),
    "GraniteMoe": _of("GraniteMoe", {**_GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "SmolLM3": _of("SmolLM3", _GROUPED),
    "Glm4": _of("Glm4", {**_GROUPED, "head_dim": 8}),
    "Nemotron": _of("Nemotron", _GROUPED),
    "Deberta": _of("Deberta", _BASE),
    "DebertaRelative": _of("Deberta", {**_BASE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "DebertaV2": _of("DebertaV2", {**_BASE, "relative_attention": True, "pos_att_type": ["c2p"]}),
    "MPNet": _of("MPNet", _BASE),
    "XLMRoberta": _of("XLMRoberta", _BASE),
    "Esm": _of("Esm", {**_BASE, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    "RoFormer": _of("RoFormer", _BASE),
    "MT5": _of("MT5", text._ALL["T5"][1], inputs=pair),
    "MBart": _of("MBart", _ENCODER_DECODER, inputs=pair),
    "Pegasus": _of("Pegasus", _ENCODER_DECODER, inputs=pair),
    "Marian": _of("Marian", _ENCODER_DECODER, inputs=pair),
    "M2M100": _of("M2M100", _ENCODER_DECODER, inputs=pair),
    "Blenderbot": _of("Blenderbot", _ENCODER_DECODER, inputs=pair),
    "Whisper": _of(
        "Whisper",
        {**_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 8},
        inputs=spectrogram,
    ),
    "ViT": _of("ViT", _VISION, inputs=pixels),
    "DeiT": _of("DeiT", _VISION, inputs=pixels),
    "Beit": _of("Beit", {**_VISION, "use_relative_position_bias": True}, inputs=pixels),
    "Dinov2": _of("Dinov2", _VISION, inputs=pixels),
    "Dinov2WithRegisters": _of("Dinov2WithRegisters", _VISION, inputs=pixels),
    "DINOv3ViT": _of("DINOv3ViT", _VISION, inputs=pixels),
    "ViTMAE": _of("ViTMAE", {**_VISION, "mask_ratio": 0.0}, inputs=pixels),
    "CLIP": _of("CLIP", {"text_config": _CLIP_TEXT, "vision_config": _VISION}, inputs=both),
    "CLIPText": Animal("CLIPTextModel", "CLIPTextConfig", _CLIP_TEXT),
    "CLIPVision": Animal("CLIPVisionModel", "CLIPVisionConfig", _VISION, pixels),
    "Siglip": _of("Siglip", {"text_config": _BASE, "vision_config": _VISION}, inputs=both),
    "Swin": _of(
        "Swin",
        {"image_size": 8, "patch_size": 1, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
        inputs=pixels,
    ),
    "Detr": Animal(
        "DetrModel",
        "DetrConfig",
        {
            **_ENCODER_DECODER,
            "num_queries": 3,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", out_features=["stage1"]
            ),
        },
        pixels,
    ),
    "GPT2Cross": Animal("GPT2Model", "GPT2Config", {**text._GPT, "add_cross_attention": True}, attending),
    "BertCross": Animal(
        "BertModel", "BertConfig", {**_BASE, "is_decoder": True, "add_cross_attention": True}, attending
    ),
    "GPTBigCode": Animal("GPTBigCodeModel", "GPTBigCodeConfig", {**text._GPT, "multi_query": True}),
    "GPTBigCodeMultiHead": Animal("GPTBigCodeModel", "GPTBigCodeConfig", {**text._GPT, "multi_query": False}),
    "GPTNeoXJapanese": _of("GPTNeoXJapanese", _BASE),
    "Mpt": _of("Mpt", {"vocab_size": 50, "d_model": WIDTH, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "Dbrx": _of(
        "Dbrx",
        {
            "vocab_size": 50,
            "d_model": WIDTH,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1, "hidden_size": WIDTH},
        },
    ),
    "ImageGPT": Animal("ImageGPTModel", "ImageGPTConfig", text._GPT),
    "Blip": Animal("BlipVisionModel", "BlipVisionConfig", _VISION, pixels),
    "Qwen2VLVision": Animal(
        "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
        "Qwen2VLVisionConfig",
        {**_PATCHED, "embed_dim": WIDTH, "mlp_ratio": 2},
        patches,
    ),
    "Qwen2_5_VLVision": Animal(
        "Qwen2_5_VisionTransformerPretrainedModel",
        "Qwen2_5_VLVisionConfig",
        {**_PATCHED, "fullatt_block_indexes": [0, 1]},
        patches,
    ),
    "Qwen3VLVision": Animal(
        "Qwen3VLVisionModel", "Qwen3VLVisionConfig", {**_PATCHED, "deepstack_visual_indexes": [0]}, patches
    ),
    "Qwen2_5_VL": Animal(
        "Qwen2_5_VLModel",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**_GROUPED, "rope_parameters": _SECTIONS},
            "vision_config": {**_PATCHED, "fullatt_block_indexes": [0, 1]},
        },
    ),
    "Qwen2VLText": _of("Qwen2VLText", {**_GROUPED, "rope_parameters": _SECTIONS}),
    "Qwen2_5_VLText": _of("Qwen2_5_VLText", {**_GROUPED, "rope_parameters": _SECTIONS}),
    "Qwen3VLText": _of("Qwen3VLText", {**_GROUPED, "head_dim": 8, "rope_parameters": _SECTIONS}),
    "EncoderDecoder": composite("EncoderDecoder", "Bert", "Bert", pair),
    "VisionEncoderDecoder": composite("VisionEncoderDecoder", "ViT", "GPT2", captioned),
    "Llava": Animal(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {
            "text_config": {**_GROUPED, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model"},
            "image_token_index": 7,
            "vision_feature_layer": -1,
        },
        seen,
    ),
    "Wav2Vec2": _of("Wav2Vec2", _AUDIO, inputs=waveform),
    "Hubert": _of("Hubert", _AUDIO, inputs=waveform),
    "WavLM": _of("WavLM", {**_AUDIO, "num_buckets": 8, "max_bucket_distance": 8}, inputs=waveform),
    "Modular": Animal(
        "ModularModel",
        "ModularConfig",
        {
            **{k: v for k, v in _GROUPED.items() if k != "intermediate_size"},
            "num_entries": 24,
            "num_knowledge_heads": 2,
        },
        package="attnflow.knowledge",
    ),
    "AST": Animal(
        "ASTModel",
        "ASTConfig",
        {
            **_VISION,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 8,
            "num_mel_bins": 8,
        },
        lambda batch: {"input_values": torch.zeros(batch, 8, 8, dtype=torch.float64)},
    ),
    "SpeechT5": Animal(
        "SpeechT5ForSpeechToText",
        "SpeechT5Config",
        {**_AUDIO, **_ENCODER_DECODER, "num_feat_extract_layers": 1},
        lambda batch: {**waveform(batch), "decoder_input_ids": torch.full((batch, 1), 5)},
    ),
}
