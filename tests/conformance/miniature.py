"""Every architecture of the installed transformers in miniature: its class, a small configuration, random weights.

No table of families: a configuration's own attributes are shrunk by their names, as far as the class accepts that;
what accepts no width is built shallow. What cannot be built is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LARGEST = 70_000_000  # parameters of a miniature, at most
VOCABULARY = 120
LOWEST = 8  # the smallest id of an ordinary token: special ones lie below, or at the end of the vocabulary
DEPTH = 2
WIDTH, HEAD = 64, 16

# What a class is for: the mappings of the Auto classes, the more telling one first.
KINDS = {
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "vision-language": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}

_DEPTHS = [
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_decoder_layers", "num_encoder_layers", "depth", "decoder_num_hidden_layers", "num_lstm_layers"),
    "pred_num_hidden_layers",
]
_SIZES: dict[str, int] = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "encoder_hidden_size"], WIDTH
    ),
    **dict.fromkeys(["decoder_hidden_size", "projection_dim", "embedding_size", "word_embed_proj_dim"], WIDTH),
    **dict.fromkeys(["out_hidden_size", "text_hidden_size", "projector_hidden_size", "audio_hidden_size"], WIDTH),
    **dict.fromkeys(
        ["intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "mlp_dim"], 80
    ),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["decoder_attention_heads", "attention_heads", "decoder_num_attention_heads"], 4),
    **dict.fromkeys(["encoder_num_attention_heads", "swa_num_attention_heads"], 4),
    **dict.fromkeys(["head_dim", "kv_channels", "d_kv", "swa_head_dim", "attention_head_dim"], HEAD),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "topk_group"], 2),
    **dict.fromkeys(["n_group", "num_expert_group"], 2),
    **dict.fromkeys(["upsample_groups", "hidden_size_global", "adapter_in_dim", "adapter_out_dim"], WIDTH),
    **dict.fromkeys(["adapter_input_size", "downsample_hidden_size"], WIDTH),
    "base_channels": 32,
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim"], 16),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"], 128),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    # What lies back this far must be seen to lie back too far, in twelve tokens.
    **dict.fromkeys(["sliding_window", "sliding_window_size", "keep_window_size", "attention_window_size"], 4),
    **dict.fromkeys(["local_attention", "local_attention_window_len", "attention_chunk_size"], 4),
    **dict.fromkeys(["local_radius", "global_block_size"], 3),
    **dict.fromkeys(["index_topk", "index_n_heads"], 4),
    **dict.fromkeys(["index_block_size", "index_topk_blocks", "index_kpool"], 2),
    "attention_window": 8,  # on both sides together; twelve tokens are padded to sixteen
    "qk_head_dim": 32,
    "mm_tokens_per_image": 4,
    "rotary_dim": 8,
    **dict.fromkeys(["fpn_hidden_size", "pred_hidden_size", "cross_hidden_size"], WIDTH),
    **dict.fromkeys(["pred_num_attention_heads", "frames_per_clip", "latent_query_num"], 4),
    "image_size": 32,
    "patch_size": 8,
}
# How a configuration is shrunk, (narrow, further), until the class runs: the last is its default one.
_ATTEMPTS = ((True, False), (True, True), (False, True), (False, False), None)


def _each(names: str, **values: Any) -> dict[str, dict[str, Any]]:
    return {name: dict(values) for name in names.split()}


# What a default configuration lacks.
_REQUIRED: dict[str, dict[str, Any]] = {
    **_each("reformer", is_decoder=True),
    **_each("autoformer informer time_series_transformer", prediction_length=8),
    **_each("esm", vocab_size=VOCABULARY, mask_token_id=5, pad_token_id=1),
    "dots1": dict.fromkeys(["n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"], 1)
    | {"n_routed_experts": 4, "num_experts_per_tok": 2},
    **_each("dbrx", attn_config={"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}),
    **_each("blt", num_hidden_layers=2),
    **_each("moonshine_streaming", num_key_value_heads=4),
    **_each("t5gemma2_text", dropout_rate=0.0),
    **_each("granite4_vision", deepstack_layer_map=[[-1, 0]], spatial_target_layers=[1] * 4, downsample_rate="1/2"),
    **_each("chameleon emu3", vocabulary_map={"<image>": VOCABULARY - 1}),
    **_each("lfm2_moe", layer_types=["conv", "full_attention"], num_hidden_layers=2),
    **_each("gpt_neo", attention_types=[[["global", "local"], 1]], num_layers=2),
    **_each("deepseek_v2", num_experts_per_tok=2, n_routed_experts=4),
    **_each("bamba", attn_layer_indices=[1]),
    **_each("granitemoehybrid", layer_types=["mamba", "attention"], num_hidden_layers=2),
    **_each("recurrent_gemma", block_types=["recurrent", "attention"]),
    **_each("xmod", default_language="en_XX"),
    **_each("qwen2_5_omni_thinker qwen3_omni_moe_thinker", vision_start_token_id=5),
    **_each("aria", projector_patch_to_query_dict={16: 4}),
    **_each("lw_detr", projector_scale_factors=[1.0]),
    **_each("uvdoc_backbone", out_features=[f"stage{stage}" for stage in range(1, 7)]),
    **_each("diffusion_gemma_text", num_experts=4, top_k_experts=2, moe_intermediate_size=32),
    "qwen4_exp_text": dict.fromkeys(["indexer_n_heads", "indexer_compress_ratio"], 2)
    | {"indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 8},
}


def _sections(share: float = 1) -> dict[str, Any]:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    return rotary | {"mrope_section": [int(HEAD * share) // 2 - 2, 1, 1]}


# Small sizes that must agree in a way that their names do not say.
_AGREEING: dict[str, dict[str, Any]] = {
    **_each("bamba granitemoehybrid", mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8),
    **_each("falcon_h1", mamba_d_ssm=WIDTH, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=8),
    **_each("nemotron_h", mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=1, chunk_size=8),
    **_each("mamba2", num_heads=8, head_dim=16, state_size=16, chunk_size=8),
    **_each("gemma3n_text gemma4_text", num_kv_shared_layers=0),
    **_each("qwen2_vl_text qwen2_5_vl_text paddleocr_vl_text qwen2_5_omni_text", rope_parameters=_sections()),
    **_each("qwen2_5_omni_talker hunyuan_vl_text glm_ocr_text", rope_parameters=_sections()),
    **_each("glm4v_text glm4v_moe_text glm_image_text", rope_parameters=_sections(0.5)),
    **_each("qwen2_5_vl_vision", fullatt_block_indexes=[1], window_size=32),
    **_each("exaone4_5_vision", fullatt_block_indexes=[1], window_size=32, num_key_value_heads=2),
    **_each("llama4_vision_model", projector_input_dim=64, projector_output_dim=64, vision_output_dim=64),
    **_each("musicgen_decoder musicgen_melody_decoder", num_codebooks=1),
    **_each("layoutlmv3", coordinate_size=8, shape_size=16),
    **_each("kimi_linear", num_expert_group=1, topk_group=1, num_experts_per_token=2),
    **_each("step3p5", sliding_window=4),
    **_each("luke", entity_vocab_size=VOCABULARY, entity_emb_size=16),
    **_each("perceiver", d_latents=WIDTH, num_latents=16, num_self_attends_per_block=2, num_self_attention_heads=4),
    **_each("xlm flaubert", emb_dim=WIDTH, n_words=VOCABULARY),
    **_each("blt", encoder_hash_byte_group_vocab=100),
    **_each("longcat_flash", expert_ffn_hidden_size=16),
    **_each("nemotron", num_key_value_heads=2),
    **_each("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=4),
    # Two hybrid layers, which share their weights.
    **_each("zamba", layer_types=["mamba", "hybrid"] * 2, num_hidden_layers=4, mamba_dt_rank=4),
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3]}
    | {"mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 8},
    **_each("deepseek_v4", compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}),
    **_each("minimax", block_size=4),
    **_each("inkling_text inkling2_text", swa_num_key_value_heads=2, num_key_value_heads=2, rel_extent=16),
    **_each("diffusion_gemma", canvas_length=8),
    **_each("mistral4", qk_rope_head_dim=8),
    "dots3_note_text": dict.fromkeys(["swa_q_lora_rank", "swa_kv_lora_rank", "swa_qk_nope_head_dim"], 16)
    | dict.fromkeys(["swa_num_attention_heads", "swa_num_key_value_heads"], 4)
    | {"swa_head_dim": 32, "swa_v_head_dim": 16, "index_head_dim": 32},
    **_each("deepseek_ocr2_text", mlp_layer_types=["dense", "sparse"], num_experts_per_tok=2),
    **_each("ernie4_5_vl_moe_text", rope_parameters=_sections() | {"mrope_section": [3, 3, 2]}),
    **_each("gpt_neo", window_size=4),
    **_each("xlstm", hidden_size=128),
    **_each("molmo2_adapter", vision_feature_layer=[-1, -2]),
    **_each("fun_asr_nano", adaptor_config={"hidden_size": WIDTH, "intermediate_size": WIDTH // 4}),
    **_each("florence_vision", embed_dim=[WIDTH] * 4),
    **_each("muse_spark_audio", patch_sizes=[16, 8], hidden_sizes=[WIDTH] * 2, depths=[1, 1]),
    **_each("tvp", max_img_size=64, image_size=64, visual_prompt_size=4),
    **_each("radio", video_temporal_patch_size=2),
    **_each("dac", downsampling_ratios=[8, 5, 4, 2], upsampling_ratios=[8, 5, 4, 2]),  # the stride of Hubert's
    **_each("grounding-dino mm-grounding-dino", num_queries=16),
    **_each("xcodec2 neucodec", quantization_dim=2 * WIDTH),
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]}
    | {"rope_parameters": {"sliding_attention": _sections() | {"mrope_section": [4, 2, 2]}, "full_attention": None}},
    **_each("vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_encoder", num_filters=2, depths=[1] * 7),
    **_each("vibevoice_acoustic_tokenizer_decoder", num_filters=2, depths=[1] * 7),
    **_each("efficientnet align_vision_model", width_coefficient=0.5, hidden_dim=640),
    **_each("align", projection_dim=160),
    **_each("vits", vocab_size=VOCABULARY),
    **_each("depth_pro", intermediate_hook_ids=[1, 0]),
    "seggpt": {"image_size": [64, 32], "pretrain_image_size": 32, "num_hidden_layers": 4, "merge_index": 1}
    | {"intermediate_hidden_state_indices": [2, 3]},
    **_each("clvp_encoder clvp_decoder", hidden_size=2 * WIDTH, projection_dim=2 * WIDTH),  # rotary: at least 32
}


# What is run on text of one model alone cannot run these.
_OTHERWISE = {
    **dict.fromkeys(["d_fine", "pp_ocrv6_small_det", "pp_ocrv6_medium_det"], "its default backbone names no stages"),
    "gemma4_assistant": (continues := "it continues the states of another model, and reads no ids of its own"),
    "gemma4_unified_assistant": continues,
    "kyutai_speech_to_text": "its ids are those of text and of every codebook, [batch, positions, codebooks + 1]",
}


@dataclass(frozen=True)
class Architecture:
    """A class of the installed transformers, and what it is for."""

    model_type: str
    name: str
    kind: str

    @property
    def key(self) -> str:
        """What tells it from every other: some architectures share a class."""
        return f"{self.model_type}/{self.name}"


def architectures() -> Iterator[Architecture]:
    """One class per architecture and use: decoder and vision-language, else encoder-decoder, encoder or base."""
    tables = {kind: cast(dict[str, Any], getattr(modeling_auto, name)) for kind, name in KINDS.items()}
    for model_type in dict.fromkeys(name for table in tables.values() for name in table):
        names = {kind: table[model_type] for kind, table in tables.items() if model_type in table}
        names = {kind: name if isinstance(name, str) else name[0] for kind, name in names.items()}
        if len(names) > 1:
            names.pop("base", None)
        seen: set[str] = set()
        for kind, name in names.items():
            if name not in seen:
                seen.add(name)
                yield Architecture(model_type, name, kind)


class Wrong(Exception):
    """A feature answered, and the oracle says otherwise."""


class NotBuilt(Exception):
    """No small configuration of a class was accepted: the reasons, one per try."""


def build(architecture: Architecture) -> PreTrainedModel:
    """A miniature with random weights, float32, in evaluation mode."""
    cls = getattr(transformers, architecture.name, None)
    if cls is None:
        raise NotBuilt("the class is not exported by this transformers")
    if architecture.model_type in _OTHERWISE:
        raise NotBuilt(_OTHERWISE[architecture.model_type])
    reasons: list[str] = []
    deaf: PreTrainedModel | None = None  # it is built, and answers nothing that was tried
    for attempt in _ATTEMPTS:
        try:
            config = _config(cls, architecture)
            config = shrink(config, *attempt) if attempt else config
            if architecture.kind == "encoder" and getattr(config, "is_decoder", False):
                config.is_decoder = False
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in cls(deepcopy(config)).parameters())
            if size > LARGEST:
                raise NotBuilt(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = awake(cls(config))
            if not _runs(model):
                deaf = deaf or model
                continue
            return model
        except Exception as error:
            cause = error.__cause__ or error  # what a validator says, not that one has spoken
            reasons.append(" ".join(f"{type(cause).__name__}: {cause}".split()).split(". ")[0][:160])
    if deaf is not None:
        return deaf
    raise NotBuilt(" | ".join(dict.fromkeys(reasons)))


def named(name: str) -> PreTrainedModel:
    return build(next(architecture for architecture in architectures() if architecture.name == name))


def awake(model: PreTrainedModel) -> PreTrainedModel:
    """The model in evaluation mode, without matrices that are zero at initialisation, which hide what lies before."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point() and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model.eval()


def _runs(model: PreTrainedModel) -> bool:
    """Whether a miniature answers anything that was tried.

    One that reads text must answer some: with boxes, an image or sounds beside it where it asks for them.
    """
    from tests.conformance.inputs import is_text, others, text
    from tests.conformance.senses import runs_on

    if not is_text(model):
        try:
            model.__dict__["sensed"] = runs_on(model)
        except NotBuilt:
            return False
        return True
    asks: list[Exception] = []
    for beside in others(model):
        model.__dict__["beside"] = beside
        try:
            with torch.no_grad():
                model(**text(model))
            return True
        except Exception as error:
            asks.append(error)
    raise asks[0]


def _config(cls: type[PreTrainedModel], architecture: Architecture) -> PreTrainedConfig:
    """The default configuration: of the class itself, where that is a part of what its architecture names."""
    config_class = cls.config_class or CONFIG_MAPPING[architecture.model_type]
    return cast(PreTrainedConfig, config_class(**_REQUIRED.get(architecture.model_type, {})))


def shrink(config: PreTrainedConfig, narrow: bool, further: bool = False, **changes: object) -> PreTrainedConfig:
    """The configuration made again with small values for the attributes that are named as sizes."""
    small = _small(config, narrow, further) | _REQUIRED.get(config.model_type, {})
    return type(config)(**(small | (_AGREEING.get(config.model_type, {}) if narrow else {}) | changes))


def small_config(kind: type[PreTrainedConfig], **changes: object) -> PreTrainedConfig:
    return shrink(kind(**_REQUIRED.get(kind.model_type, {})), True, **changes)


def _small(config: PreTrainedConfig, narrow: bool, further: bool) -> dict[str, Any]:
    values = vars(config)
    small: dict[str, Any] = {}
    depths = {value for name, value in values.items() if name in _DEPTHS and isinstance(value, int)}
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) in depths}
    kinds = {name: list(dict.fromkeys(value)) for name, value in lists.items() if isinstance(value[0], str)}
    depth = max([DEPTH, *map(len, kinds.values())])
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = shrink(value, narrow, further).to_dict()
        elif further and (less := _less(name, value, narrow)) is not None:
            small[name] = less
        elif name in kinds:
            small[name] = (kinds[name] * depth)[:depth]
        elif name in lists:
            small[name] = value[:depth]
        elif narrow and value is None and name in ("head_dim", "num_key_value_heads"):
            small[name] = {"head_dim": HEAD, "num_key_value_heads": 4}[name]
        elif value is None and name in ("image_token_index", "video_token_index"):
            small[name] = VOCABULARY - 1
        elif name == "image_grid_pinpoints":
            small[name] = [[32, 32], [32, 64]]
        elif narrow and name == "rope_parameters" and isinstance(value, dict):
            small[name] = _rotary(cast(dict[str, Any], value))
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name in _DEPTHS:
            small[name] = min(value, depth)
        elif "vocab_size" in name:
            small[name] = min(value, VOCABULARY)
        elif narrow and name in _SIZES:
            small[name] = min(value, _SIZES[name])
        elif name.endswith(("_token_id", "_token_index")) and value >= LOWEST:
            small[name] = VOCABULARY - 1 - sum(other in small for other in values if other.endswith(("_id", "_index")))
    heads = values.get("num_attention_heads")
    if narrow and isinstance(heads, int) and isinstance(values.get("num_key_value_heads"), int):
        small["num_key_value_heads"] = (
            4 if values["num_key_value_heads"] >= heads else min(2, values["num_key_value_heads"])
        )
    return small


def _less(name: str, value: Any, narrow: bool) -> Any:
    """What a stage has of layers and heads, or an eighth of the sides of a large image and its features."""
    if name == "depths":
        return [min(layers, DEPTH) for layers in value]
    if narrow and name.endswith("heads") and isinstance(value, list | tuple):
        return [4] * len(value)
    if narrow:
        return WIDTH if name == "output_channels" else None
    if name.endswith("feature_sizes"):
        return [[side // 8 for side in sides] for sides in value]
    sides = value if isinstance(value, list | tuple) else [value]
    if not value or not name.endswith("image_size") or max(sides) < 512:
        return None
    return [side // 8 for side in sides] if sides is value else value // 8


def _rotary(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose sections, where there are some, fill half of a head."""
    inner = {name: _rotary(value) for name, value in parameters.items() if isinstance(value, dict)}
    sections = parameters.get("mrope_section")
    if not sections:
        return parameters | inner
    half = int(HEAD * parameters.get("partial_rotary_factor", 1)) // 2
    rest = [max(1, half * section // sum(sections)) for section in sections[1:]]
    return parameters | inner | {"mrope_section": [half - sum(rest), *rest]}
