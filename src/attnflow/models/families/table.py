"""The registry: how each family of models names and orders its queries and keys, and names its feed-forward maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, cast

from attnflow.models.families.heads import Heads
from attnflow.models.families.rows import Selected, blocks


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of separate projections: the last part of the query's path, and of the key's beside it.
SEPARATE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "q_proj": "k_proj",
        "query": "key",
        "q_lin": "k_lin",
        "q": "k",
        "query_proj": "key_proj",
        "linear_q": "linear_k",
        "to_q": "to_k",
        "wq": "wk",
        "q_linear": "k_linear",
        "query_net": "key_net",
        "attn_q": "attn_k",
        "cross_attn_q": "cross_attn_k",
        "q_attn": "c_attn",
        "q_proj_weight": "k_proj_weight",
        "project_q": "project_k",
        "q_head": "k_head",
        "query_key": "query_key",  # one projection for both (Reformer)
        "Wq": "Wk",
    }
)
# Names of queries beside keys and values in one tensor, with its name and whether it is stored (in, out).
BESIDE: Final[Mapping[str, tuple[str, bool]]] = MappingProxyType({"q_attn": ("c_attn", True), "to_q": ("to_kv", False)})

# The query of latent attention when it is a product, too.
LATENT: Final = frozenset({"q_b_proj"})
# Families whose q_proj makes the query of each head and a gate after it.
GATED: Final = _words("qwen3_next qwen3_5_text qwen3_5_moe_text")

Arrange = Callable[[str, Heads, bool], tuple[Selected, Selected]]


def contiguous(tensor: str, heads: Heads, transposed: bool) -> tuple[Selected, Selected]:
    """[query heads | key heads | value heads]."""
    count, both = heads.query + 2 * heads.key, heads.query + heads.key
    return (
        blocks(tensor, heads.dim, count, 0, heads.query, transposed=transposed),
        blocks(tensor, heads.dim, count, heads.query, both, transposed=transposed),
    )


def grouped(tensor: str, heads: Heads, transposed: bool) -> tuple[Selected, Selected]:
    """For each KV head its query heads, the key and the value; without sharing, (num_heads, 3, head_dim)."""
    share = heads.query // heads.key
    return (
        blocks(tensor, heads.dim, share + 2, 0, share, heads.key, transposed),
        blocks(tensor, heads.dim, share + 2, share, share + 1, heads.key, transposed),
    )


def quarters(tensor: str, heads: Heads, transposed: bool) -> tuple[Selected, Selected]:
    """[query | value | key] in each of four parts, as CodeGen was trained on."""
    part = heads.query // 4
    return (
        blocks(tensor, heads.dim, 3 * part, 0, part, 4, transposed),
        blocks(tensor, heads.dim, 3 * part, 2 * part, 3 * part, 4, transposed),
    )


@dataclass(frozen=True, slots=True)
class Fused:
    """Families that store query, key and value in one tensor."""

    word: str  # last part of the tensor's path
    arrange: Arrange  # the order of its rows
    model_types: frozenset[str]  # in the configs of these families; empty if the word alone tells
    transposed: bool = False  # stored (in, out), by `Conv1D`


def _fused(word: str, arrange: Arrange, model_types: str = "", transposed: bool = False) -> Fused:
    return Fused(word, arrange, _words(model_types), transposed)


FUSED: Final = (
    _fused("c_attn", contiguous, "gpt2 openai-gpt imagegpt", transposed=True),
    _fused("c_attn", grouped, "gpt_bigcode"),
    _fused("query_key_value", grouped, "gpt_neox gpt_neox_japanese bloom persimmon falcon"),
    _fused("in_proj", grouped, "deberta"),
    _fused("qkv_proj", contiguous, "phi3"),
    _fused("qkv_proj", quarters, "codegen"),
    _fused("Wqkv", contiguous, "modernbert mpt dbrx"),
    _fused("qkv", contiguous, "blip_vision_model qwen2_5_vl qwen2_5_vl_vision qwen2_vl_vision qwen3_vl_vision"),
    _fused("qkv", contiguous, "got_ocr2_vision sam_vision_model unlimited_ocr_sam_vision_model"),
    _fused("in_proj_weight", contiguous),  # torch.nn.MultiheadAttention
    _fused("attn_qkv", contiguous),  # GGUF: whatever the original order was
)
# Names that have one order of rows wherever they occur: those of torch.nn.MultiheadAttention and of GGUF.
UNIVERSAL: Final = frozenset({"q_proj_weight"} | {row.word for row in FUSED if not row.model_types})
# Names that a tensor of query, key and value has in some family; "in_proj" occurs outside attention, too.
FUSED_WORDS: Final = frozenset({row.word for row in FUSED} | {"wqkv", "W_pack", "qkv_linear"})


def is_query_or_key(name: str) -> bool:
    """Whether a tensor of this name holds queries or keys in some family."""
    word = name.removesuffix(".weight").rpartition(".")[2]
    several = FUSED_WORDS - {"in_proj"} | {both for both, _ in BESIDE.values()}
    return word in SEPARATE or word in SEPARATE.values() or word in LATENT or word in several


def with_heads(config: Mapping[str, object], model_type: str) -> Mapping[str, object]:
    """The config with the number of heads, or of KV heads, where a family says it in its own way."""
    if model_type == "dbrx" and isinstance(inner := config.get("attn_config"), Mapping):
        return {**config, "num_kv_heads": cast(Mapping[str, object], inner).get("kv_n_heads")}
    heads = next((config[word] for word in ("num_attention_heads", "n_head") if word in config), None)
    if model_type == "convbert" and isinstance(heads, int) and isinstance(ratio := config.get("head_ratio"), int):
        return {
            **config,
            "num_attention_heads": max(1, heads // max(1, ratio)),
        }  # convolutions take the place of others
    if model_type not in ("falcon", "gpt_bigcode") or config.get("new_decoder_architecture"):
        return config
    return {**config, "num_kv_heads": 1 if config.get("multi_query", True) else heads}


_SEPARATE_TYPES: Final = _words("""
    albert attnflow_modular audio-spectrogram-transformer bart beit bert blenderbot clip clip_text_model
    clip_vision_model cohere cohere2 convbert cpmant deberta-v2 deepseek_v2 deepseek_v3 deit detr dinov2
    dinov2_with_registers dinov3_vit distilbert electra esm falcon_h1 funnel gemma gemma2 gemma3_text gguf glm4
    gpt_neo gpt_oss gptj granite granitemoe hubert jamba llama m2m_100 marian mbart mistral mixtral mobilellm mpnet
    mt5 nemotron nystromformer olmo olmo2 olmoe opt pegasus phi phimoe prophetnet qwen2 qwen2_5_vl_text qwen2_moe
    qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_text reformer roberta roformer
    siglip siglip_text_model siglip_vision_model smollm3 speecht5 stablelm starcoder2 swin t5 vit vit_mae wav2vec2
    wavlm whisper xlm-roberta xlnet
""")
# Families on which a test has compared the registry with how the model uses its weights. Others are read by names and
# shapes alone if query and key are separate, and the result says so.
KNOWN: Final = _SEPARATE_TYPES.union(*(row.model_types for row in FUSED))


@dataclass(frozen=True, slots=True)
class FeedForward:
    """One feed-forward layer: its linear maps, as paths below their common parent."""

    first: tuple[str, ...]  # into the neurons: one; or gate and up; or, where it is gated, one with both side by side
    last: str  # out of them
    gated: bool = False
    name: str = ""  # path of the parent in a model

    @property
    def fused(self) -> bool:
        """Whether one map makes gate and up."""
        return self.gated and len(self.first) == 1


# The first that fits holds, in names and in shapes.
FEED_FORWARD: Final = (
    FeedForward(("gate_proj", "up_proj"), "down_proj", gated=True),
    FeedForward(("wi_0", "wi_1"), "wo", gated=True),
    FeedForward(("w1", "w3"), "w2", gated=True),
    FeedForward(("gate_up_proj",), "down_proj", gated=True),
    FeedForward(("Wi",), "Wo", gated=True),
    FeedForward(("w_in.w_0", "w_in.w_1"), "w_out", gated=True),
    FeedForward(("fc1",), "fc2", gated=True),
    FeedForward(("c_fc",), "c_proj"),
    FeedForward(("fc1",), "fc2"),
    FeedForward(("linear_fc1",), "linear_fc2"),
    FeedForward(("fc_in",), "fc_out"),
    FeedForward(("dense_h_to_4h",), "dense_4h_to_h"),
    FeedForward(("intermediate.dense",), "output.dense"),
    FeedForward(("intermediate",), "output"),
    FeedForward(("dense.dense",), "output.dense"),
    FeedForward(("layer_1",), "layer_2"),
    FeedForward(("lin1",), "lin2"),
    FeedForward(("ffn",), "ffn_output"),
    FeedForward(("wi",), "wo"),
    FeedForward(("up_proj",), "down_proj"),
)
