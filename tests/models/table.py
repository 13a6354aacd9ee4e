"""The table of the zoo: the class, the options and the inputs of every tiny model."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module

import torch
import transformers
from transformers import PreTrainedModel

from tests.conformance.miniature import small_config
from tests.models.inputs import run
from tests.models.options import (
    ALL_FULL,
    AUDIO,
    BASE,
    CLIP_TEXT,
    EIGHT_BY_EIGHT,
    ENCODER_DECODER,
    FOUR_EXPERTS,
    GPT,
    GROUPED,
    IMAGE,
    LATENT,
    MAMBA2,
    MODULAR,
    NO_FEED_FORWARD,
    ONE_CONVOLUTION,
    PATCHED,
    SECTIONS,
    SHARED_EXPERT,
    SMALL_HEADS,
    SPECIAL,
    STATE_SPACE,
    T5,
    TWO_EXPERTS,
    VISION,
    WIDTH,
    WINDOW,
    WINDOWED,
)

Options = dict[str, object]
Inputs = Callable[[int], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class TinyModel:
    """A tiny model: its class, the options of its config, its inputs for a batch, and where the class is."""

    model: str
    options: Options
    inputs: Inputs = run.token
    config: str | None = None
    package: str = "transformers"
    shrunk: bool = False  # whether the options change the default configuration, made small

    def make_config(self, **changes: object) -> transformers.PreTrainedConfig:
        kind = getattr(import_module(self.package), self.config) if self.config else self._class().config_class
        options = deepcopy({**self.options, **changes})  # older configs take entries out of the options' own parts
        return small_config(kind, **options) if self.shrunk else kind(**options)

    def make(self, **changes: object) -> PreTrainedModel:
        """Random weights, float32, in evaluation mode."""
        return self._class()(self.make_config(**changes)).eval()

    def build(self) -> PreTrainedModel:
        """The same weights every time, float64, plain attention."""
        torch.manual_seed(0)
        return in_double(self._class()._from_config(self.make_config(), attn_implementation="eager").eval())

    def _class(self) -> type[PreTrainedModel]:
        module, _, name = self.model.rpartition(".")
        return getattr(import_module(f"transformers.models.{module}" if module else self.package), name)


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64; the grouped kernel of experts takes none, so they run one by one."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


def _composite(name: str, encoder: str, decoder: str, inputs: Inputs) -> TinyModel:
    part = {"Bert": {"model_type": "bert", **BASE}, "ViT": {"model_type": "vit", **VISION}}
    part["GPT2"] = {"model_type": "gpt2", **GPT}
    above = {**part[decoder], "is_decoder": True, "add_cross_attention": True}
    return TinyModel(f"{name}Model", {"encoder": part[encoder], "decoder": above}, inputs)


def _models(inputs: Inputs = run.token, **options: Options) -> dict[str, TinyModel]:
    return {name: TinyModel(f"{name}Model", given, inputs) for name, given in options.items()}


def _shrunk(names: str, inputs: Inputs = run.token, **options: object) -> dict[str, TinyModel]:
    return {name: TinyModel(f"{name}Model", options, inputs, shrunk=True) for name in names.split()}


def _decoders(**options: Options) -> dict[str, TinyModel]:
    return {name: TinyModel(f"{name}ForCausalLM", given) for name, given in options.items()}


CAUSAL = {
    **_decoders(
        Llama=GROUPED,
        Mistral=WINDOWED,
        Qwen2={**GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        Qwen3=SMALL_HEADS,
        Gemma2=WINDOWED,
    ),
    "Gemma3": TinyModel("Gemma3ForCausalLM", WINDOWED, config="Gemma3TextConfig"),
    "GPT2": TinyModel("GPT2LMHeadModel", {**GPT, **SPECIAL}),
    **_decoders(
        GPTNeoX=BASE,
        Phi3=GROUPED,
        OPT={**NO_FEED_FORWARD, "word_embed_proj_dim": WIDTH, "ffn_dim": 48, "init_std": 0.3},
        Mixtral={**GROUPED, "num_local_experts": 2},
        Olmo2=GROUPED,
        Cohere2={**GROUPED, "sliding_window": WINDOW},
        GptOss={**WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1},
        DeepseekV3=LATENT,
    ),
}
BIDIRECTIONAL = _models(
    Bert=BASE,
    Roberta=BASE,
    Electra={**BASE, "embedding_size": WIDTH},
    Albert={**BASE, "embedding_size": WIDTH},
    DistilBert={
        "vocab_size": 50,
        "dim": WIDTH,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    },
    ModernBert={
        **BASE,
        "cls_token_id": 1,
        "sep_token_id": 2,
        "local_attention": WINDOW,
        "global_attn_every_n_layers": 2,
    },
)
WITHOUT_INTERFACE = {
    **_decoders(
        Bloom={"vocab_size": 50, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4},
        GPTJ={**GPT, "rotary_dim": 4},
        Mamba2={**STATE_SPACE, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, **SPECIAL},
    ),
    **_models(XLNet={"vocab_size": 50, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 48}),
}
HYBRID = _decoders(
    Jamba={
        **GROUPED,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
    },
    FalconH1={**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
)
MORE_DECODERS = {
    **_decoders(
        Gemma={**BASE, "num_key_value_heads": 1, "head_dim": 8},
        Phi=GROUPED,
        StableLm={**GROUPED, "use_qkv_bias": True},
        Starcoder2={**GROUPED, "sliding_window": None},
        Qwen3Moe={**SMALL_HEADS, **FOUR_EXPERTS},
        Qwen3Next={
            **SMALL_HEADS,
            **FOUR_EXPERTS,
            **SHARED_EXPERT,
            **ALL_FULL,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        GPTNeo={
            **NO_FEED_FORWARD,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    "MBartDecoder": TinyModel("MBartForCausalLM", {**ENCODER_DECODER, "is_encoder_decoder": False, "is_decoder": True}),
}
ENCODER_DECODERS = {
    "T5": TinyModel("T5ForConditionalGeneration", T5, run.token_pair),
    "Bart": TinyModel("BartForConditionalGeneration", ENCODER_DECODER, run.token_pair),
    "SeamlessM4T": TinyModel(
        "SeamlessM4TForTextToText", {**ENCODER_DECODER, "hidden_size": WIDTH, "initializer_range": 0.3}, run.token_pair
    ),
}
# Models that make, change or read their attention mask themselves.
OWN_MASKS = {
    "Doge": TinyModel("DogeForCausalLM", {**GROUPED, "keep_window_size": WINDOW}),
    "BigBirdPegasus": TinyModel(
        "BigBirdPegasusForConditionalGeneration",
        {**ENCODER_DECODER, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
        run.token_pair,
    ),
    "LayoutLM": TinyModel("LayoutLMModel", {}),
}
# Families whose heads the registry of `attnflow.models` knows, besides those above: most as `shrink` makes them small.
REGISTERED = {
    **_shrunk("Persimmon Deberta MPNet XLMRoberta RoFormer GPTNeoXJapanese OpenAIGPT ImageGPT CodeGen DebertaV2 Esm"),
    **_shrunk("CLIPText Mpt Dbrx ConvBert Nystromformer"),
    **_shrunk("Reformer", attn_layers=["local", "local"], attention_head_size=8, axial_pos_embds=False, num_buckets=2),
    **_shrunk("Olmo SmolLM3 Nemotron Olmoe Phimoe Glm4", num_key_value_heads=2),
    **_shrunk("Qwen2_5_VLText Qwen3VLText Qwen3_5Text Qwen3_5MoeText", num_key_value_heads=2),
    **_shrunk("MBart Pegasus Marian M2M100 Blenderbot MT5 ProphetNet", run.token_pair),
    **_shrunk("DeiT Dinov2 Dinov2WithRegisters DINOv3ViT CLIPVision BlipVision", run.pixels, **EIGHT_BY_EIGHT),
    **_shrunk("Beit", run.pixels, **EIGHT_BY_EIGHT, use_relative_position_bias=True),
    **_shrunk("ViTMAE", run.pixels, **EIGHT_BY_EIGHT, mask_ratio=0.0),
    **_shrunk("SamVision", run.pixels, **EIGHT_BY_EIGHT, window_size=0),
    **_models(
        **dict.fromkeys(("Cohere", "Granite"), GROUPED),
        Qwen2Moe={**GROUPED, **TWO_EXPERTS, **SHARED_EXPERT},
        DeepseekV2={**LATENT, "topk_method": "greedy", "first_k_dense_replace": 2},
        GraniteMoe={**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1},
        Qwen2VLText={**GROUPED, **SECTIONS},
        CpmAnt={**BASE, "dim_head": 8, "dim_ff": 48},
        Qwen2_5_VL={
            "text_config": {**GROUPED, **SECTIONS},
            "vision_config": {**PATCHED, "fullatt_block_indexes": [0, 1]},
        },
    ),
    **_models(
        run.pixels,
        ViT=VISION,
        Swin={
            **IMAGE,
            "patch_size": 1,
            "embed_dim": 16,
            "depths": [1, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        Detr={
            **ENCODER_DECODER,
            "num_queries": 3,
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": transformers.ResNetConfig(
                embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", out_features=["stage1"]
            ),
        },
    ),
    **_models(
        run.pixels_and_tokens,
        CLIP={"text_config": CLIP_TEXT, "vision_config": VISION},
        Siglip={"text_config": BASE, "vision_config": VISION},
    ),
    **_shrunk("Wav2Vec2 Hubert WavLM", run.waveform, **ONE_CONVOLUTION),
    **_models(
        run.spectrogram,
        Whisper={**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 8},
    ),
    **_models(
        run.spectrum,
        AST={**VISION, "frequency_stride": 4, "time_stride": 4, "max_length": 8, "num_mel_bins": 8},
    ),
    **_models(run.patches, Qwen3VLVision={**PATCHED, "deepstack_visual_indexes": [0]}),
    "Qwen2VLVision": TinyModel(
        "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel",
        {**PATCHED, "embed_dim": WIDTH, "mlp_ratio": 2},
        run.patches,
        config="Qwen2VLVisionConfig",
    ),
    "Qwen2_5_VLVision": TinyModel(
        "Qwen2_5_VisionTransformerPretrainedModel",
        {**PATCHED, "fullatt_block_indexes": [0, 1]},
        run.patches,
        config="Qwen2_5_VLVisionConfig",
    ),
    "Funnel": TinyModel(
        "FunnelModel",
        {"vocab_size": 50, "block_sizes": [1, 1], "d_model": WIDTH, "n_head": 4, "d_head": 8, "d_inner": 48},
        run.tokens,
    ),
    "GotOcr2Vision": TinyModel(
        "got_ocr2.modeling_got_ocr2.GotOcr2VisionEncoder",
        {**VISION, "window_size": 0, "output_channels": 8},
        run.pixels,
        config="GotOcr2VisionConfig",
    ),
    "UnlimitedOcrSamVision": TinyModel(
        "unlimited_ocr.modeling_unlimited_ocr.UnlimitedOcrSamVisionEncoder",
        {**VISION, "window_size": 0, "output_channels": 8},
        run.pixels,
        config="UnlimitedOcrSamVisionConfig",
    ),
    "FalconGrouped": TinyModel(
        "FalconModel",
        {**NO_FEED_FORWARD, "new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    ),
    "FalconMultiQuery": TinyModel("FalconModel", {**NO_FEED_FORWARD, "multi_query": True}),
    "FalconMultiHead": TinyModel("FalconModel", {**NO_FEED_FORWARD, "multi_query": False, "alibi": True}),
    "DeepseekV3FullQuery": TinyModel("DeepseekV3Model", {**LATENT, "q_lora_rank": None}),
    "DebertaRelative": TinyModel("DebertaModel", {**BASE, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    "GPT2Cross": TinyModel("GPT2Model", {**GPT, "add_cross_attention": True}, run.attending),
    "BertCross": TinyModel("BertModel", {**BASE, "is_decoder": True, "add_cross_attention": True}, run.attending),
    "GPTBigCode": TinyModel("GPTBigCodeModel", {**GPT, "multi_query": True}),
    "GPTBigCodeMultiHead": TinyModel("GPTBigCodeModel", {**GPT, "multi_query": False}),
    "EncoderDecoder": _composite("EncoderDecoder", "Bert", "Bert", run.token_pair),
    "VisionEncoderDecoder": _composite("VisionEncoderDecoder", "ViT", "GPT2", run.captioned),
    "Llava": TinyModel(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**GROUPED, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "image_token_index": 7,
            "vision_feature_layer": -1,
        },
        run.image_tokens,
    ),
    "SpeechT5": TinyModel("SpeechT5ForSpeechToText", {**AUDIO, **ENCODER_DECODER}, run.dictated),
    "Modular": TinyModel("ModularModel", MODULAR, package="attnflow.knowledge.modular"),
}
# Families that no other table needs, audited: some scan, some look both ways, some were repaired after a release.
AUDITED = {
    **_decoders(
        Bamba={**GROUPED, **MAMBA2, "attn_layer_indices": [1]},
        MiniMax={**SMALL_HEADS, "block_size": 4, "num_local_experts": 4},
        Lfm2={**GROUPED, "conv_L_cache": 3},
        FalconMamba={**STATE_SPACE, **SPECIAL},
        RoFormer={**BASE, "is_decoder": True},
        BigBird={**BASE, "is_decoder": True, "attention_type": "original_full"},
        RemBert={**BASE, "is_decoder": True, "input_embedding_size": 16, "output_embedding_size": 32},
        MegatronBert={**BASE, "is_decoder": True},
    ),
    "NemotronH": TinyModel("NemotronHForCausalLM", {}, shrunk=True),
    "Llama4": TinyModel(
        "Llama4ForCausalLM",
        {**SMALL_HEADS, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW, "num_local_experts": 2},
        config="Llama4TextConfig",
    ),
    "BertDecoder": TinyModel("BertLMHeadModel", {**BASE, "is_decoder": True}),
    "Bert": TinyModel("BertForMaskedLM", BASE),
    "ModernBert": TinyModel("ModernBertForMaskedLM", {**BASE, "local_attention": WINDOW}),
    "Gemma3Encoder": TinyModel(
        "Gemma3TextModel", {**WINDOWED, "use_bidirectional_attention": True}, config="Gemma3TextConfig"
    ),
}
