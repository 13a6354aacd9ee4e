"""The registry: how each family names and orders its queries and keys, and states its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, cast

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.models.weights.families.rows import Selected, blocks

_QUERY: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_attn_heads")
_KEY: Final = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_DIM: Final = ("head_dim", "d_kv", "kv_channels", "global_head_dim", "attention_head_size", "d_head", "dim_head")


class Heads(NamedTuple):
    query: int
    key: int
    dim: int


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of separate projections: the last part of the query's path, and of the key's beside it.
# In Reformer one projection serves for both.
_PAIRS: Final = """
    q_proj:k_proj query:key q_lin:k_lin q:k query_proj:key_proj linear_q:linear_k to_q:to_k wq:wk q_linear:k_linear
    query_net:key_net attn_q:attn_k cross_attn_q:cross_attn_k q_attn:c_attn q_proj_weight:k_proj_weight
    project_q:project_k q_head:k_head query_key:query_key Wq:Wk
"""
SEPARATE: Final = MappingProxyType({query: key for query, _, key in (pair.partition(":") for pair in _PAIRS.split())})
# Names of queries beside keys and values in one tensor, with its name and whether it is stored (in, out).
BESIDE: Final[Mapping[str, tuple[str, bool]]] = MappingProxyType({"q_attn": ("c_attn", True), "to_q": ("to_kv", False)})

# The query of latent attention when it is a product, too.
LATENT: Final = frozenset({"q_b_proj"})
# Families whose q_proj makes the query of each head and a gate after it.
GATED: Final = _words("qwen3_next qwen3_5_text qwen3_5_moe_text")

Order = Literal["contiguous", "grouped", "quarters"]


def arranged(order: Order, tensor: str, heads: Heads, transposed: bool = False) -> tuple[Selected, Selected]:
    """Select queries and keys of one tensor: [query | key | value] heads, in groups or as a whole.

    "grouped" has a group for each KV head: without sharing, (num_heads, 3, head_dim). "quarters" are four groups of
    [query | value | key], as CodeGen was trained.
    """
    groups = {"contiguous": 1, "grouped": heads.key, "quarters": 4}[order]
    query, key = heads.query // groups, heads.key // groups
    first = query + key * (order == "quarters")  # of the keys in a group
    return (
        blocks(tensor, heads.dim, query + 2 * key, 0, query, groups, transposed),
        blocks(tensor, heads.dim, query + 2 * key, first, first + key, groups, transposed),
    )


@dataclass(frozen=True, slots=True)
class Fused:
    word: str  # last part of the tensor's path
    order: Order  # of its rows
    model_types: frozenset[str] = frozenset()  # in the configs of these families; empty if the word alone tells
    transposed: bool = False  # stored (in, out), by `Conv1D`


FUSED: Final = (
    Fused("c_attn", "contiguous", _words("gpt2 openai-gpt imagegpt"), transposed=True),
    Fused("c_attn", "grouped", _words("gpt_bigcode")),
    Fused("query_key_value", "grouped", _words("gpt_neox gpt_neox_japanese bloom persimmon falcon")),
    Fused("in_proj", "grouped", _words("deberta")),
    Fused("qkv_proj", "contiguous", _words("phi3")),
    Fused("qkv_proj", "quarters", _words("codegen")),
    Fused("Wqkv", "contiguous", _words("modernbert mpt dbrx")),
    Fused(
        "qkv", "contiguous", _words("blip_vision_model qwen2_5_vl qwen2_5_vl_vision qwen2_vl_vision qwen3_vl_vision")
    ),
    Fused("qkv", "contiguous", _words("got_ocr2_vision sam_vision_model unlimited_ocr_sam_vision_model")),
    Fused("in_proj_weight", "contiguous"),  # torch.nn.MultiheadAttention
    Fused("attn_qkv", "contiguous"),  # GGUF: whatever the original order was
)
# Names that have one order of rows wherever they occur: those of torch.nn.MultiheadAttention and of GGUF.
UNIVERSAL: Final = frozenset({"q_proj_weight"} | {row.word for row in FUSED if not row.model_types})
# Names that a tensor of query, key and value has in some family; "in_proj" occurs outside attention, too.
FUSED_WORDS: Final = frozenset({row.word for row in FUSED} | {"wqkv", "W_pack", "qkv_linear"})


def is_query_or_key(name: str) -> bool:
    word = name.removesuffix(".weight").rpartition(".")[2]
    several = FUSED_WORDS - {"in_proj"} | {both for both, _ in BESIDE.values()}
    return word in SEPARATE or word in SEPARATE.values() or word in LATENT or word in several


def with_heads(config: Mapping[str, object], model_type: str) -> Mapping[str, object]:
    if model_type == "dbrx" and isinstance(inner := config.get("attn_config"), Mapping):
        return {**config, "num_kv_heads": cast(Mapping[str, object], inner).get("kv_n_heads")}
    heads = next((config[word] for word in ("num_attention_heads", "n_head") if word in config), None)
    if model_type == "convbert" and isinstance(heads, int) and isinstance(ratio := config.get("head_ratio"), int):
        return {**config, "num_attention_heads": max(1, heads // max(1, ratio))}  # the others are convolutions
    if model_type not in ("falcon", "gpt_bigcode") or config.get("new_decoder_architecture"):
        return config
    return {**config, "num_kv_heads": 1 if config.get("multi_query", True) else heads}


def misstated(config: Mapping[str, object]) -> str | None:
    """Say which number of heads, or width of one, is not a number in a config or a part of it; None if all are."""

    def is_count(value: object, least: int) -> bool:
        if isinstance(value, list | tuple):
            return all(is_count(item, 0) for item in cast(Sequence[object], value))
        return value is None or (type(value) is int and value >= least)

    for word, value in config.items():
        part = misstated(cast(Mapping[str, object], value)) if isinstance(value, Mapping) else None
        if part is not None:
            return f"{word}: {part}"
        if word in (*_QUERY, *_KEY, *_DIM) and not is_count(value, int(word not in _DIM)):
            return f"{word} must be a whole number above 0, or a list of one for each layer, got {value!r:.60}"
    return None


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


class UnknownHeads(UnsupportedArchitecture):
    """Nothing says how many heads a projection has."""


class Stated:
    """What a config says of the heads of one tower, of one `side` if it has encoder and decoder."""

    def __init__(self, config: Mapping[str, object], side: str) -> None:
        self._config = config
        sided = (f"{side}_attention_heads", f"num_{side}_attention_heads") if side else ()
        self.query_words = (*sided, *_QUERY)

    def separate(self, name: str, stage: int, rows: int, key_rows: int, width: int | None = None) -> Heads:
        """Count the heads of separate projections; `width`: the total where no width of heads is stated."""
        query = self.query_heads(name, stage)
        dims = self.values(_DIM, stage)
        if width is not None and not dims and rows != width:
            raise _disagrees(name, f"{rows} query rows", f"{query} heads, but not of which width, on {width} channels")
        if rows % query or (dims and rows // query not in dims):
            raise _disagrees(name, f"{rows} query rows", f"{query} heads" + (f" of {_either(dims)}" if dims else ""))
        dim = rows // query
        stated = self.values(_KEY, stage)
        if key_rows % dim or (stated and key_rows // dim not in stated) or query % (key_rows // dim):
            raise _disagrees(
                name, f"{key_rows} key rows", f"{_either(stated) or 'whole'} KV heads of {dim} under {query} heads"
            )
        return Heads(query, key_rows // dim, dim)

    def fused(self, name: str, stage: int, rows: int) -> Heads:
        query = self.query_heads(name, stage)
        key = next(iter(self.values(_KEY, stage)), query)
        dim, rest = divmod(rows, query + 2 * key)
        dims = self.values(_DIM, stage)
        if rest or query % key or (dims and dim not in dims):
            raise _disagrees(name, f"{rows} rows", f"{query} query heads and twice {key} KV heads")
        return Heads(query, key, dim)

    def values(self, words: Sequence[str], stage: int) -> list[int]:
        """Return the integers under these words; of a list, the one of the stage."""
        numbers: list[int] = []
        for word in words:
            value = self._config.get(word)
            if isinstance(value, list | tuple):
                items = cast(Sequence[object], value)
                value = items[stage] if stage < len(items) else None
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                numbers.append(value)
        return numbers

    def query_heads(self, name: str, stage: int) -> int:
        """Count the query heads; `UnknownHeads` if nothing says."""
        heads = self.values(self.query_words, stage)
        if not heads:
            raise UnknownHeads(
                f"{name}: nothing says how many heads there are; keep config.json beside the weights, or pass "
                'config={"num_attention_heads": 12}, --config num_attention_heads=12 on the command line'
            )
        return heads[0]


def _disagrees(name: str, got: str, stated: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{name} has {got}, where the config says {stated}: the layout of this model is not known, and a guess would "
        "give wrong scores"
    )


def _either(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(values))
