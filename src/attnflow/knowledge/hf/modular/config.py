"""The sizes of a modular language model."""

from __future__ import annotations

from typing import Any, Final

from transformers import ArceeConfig, LlamaConfig, PreTrainedConfig

from attnflow._core.checks import integer
from attnflow.knowledge.attention import ACTIVATIONS, HIDDEN, ORDERS, THRESHOLDS

# What a Llama has, too.
_SHARED: Final = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rope_parameters", "rms_norm_eps", "initializer_range"),
    *("attention_bias", "attention_dropout", "tie_word_embeddings", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)


class ModularConfig(PreTrainedConfig):
    """Sizes of `ModularForCausalLM`: a Llama-like decoder (RoPE, GQA, RMSNorm) with one base of entries for all blocks.

    What a `LlamaConfig` has, too, means the same here.

    Args:
        vocab_size: tokens.
        hidden_size: d.
        num_hidden_layers: blocks.
        num_attention_heads: query heads of self-attention.
        num_key_value_heads: its KV heads; default as many.
        head_dim: width of a head; default hidden_size / num_attention_heads.
        num_entries: rows of E.
        entry_dim: d_E; default hidden_size. At d_E = d this is *not* as rich as feed-forward layers of num_entries
            neurons each (knowledge, sec. 5, corrected): the layers share rows of rank d_E.
        key_dim: d_k of the reading heads; default hidden_size / num_knowledge_heads.
        num_knowledge_heads: heads that read E in each block; they are summed.
        knowledge_activation: "relu", "gelu", "silu" or "sparsemax".
        gated: two keys for each entry.
        threshold: "mlp", "coordinate" or "per_entry".
        order: how E is evaluated: "query_side", "folded" or "naive".
        entries_per_token: if given, each token and head reads only that many entries, the best, in training
            (straight-through) and after. (Not "top_k", which transformers would take for an option of sampling.)
        **kwargs: of every transformers config.

    Raises:
        ValueError: sizes that do not fit one another, unknown names.
    """

    model_type = "attnflow_modular"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers reads a list)

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: Any = None  # an int once this is made, as are head_dim, entry_dim and key_dim
    head_dim: Any = None
    num_entries: int = 8192
    entry_dim: Any = None
    key_dim: Any = None
    num_knowledge_heads: int = 1
    knowledge_activation: str = "relu"
    gated: bool = False
    threshold: str = "mlp"
    order: str = "query_side"
    entries_per_token: int | None = None
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check, and fill in what follows from the rest."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_knowledge_heads"):
            setattr(self, name, integer(name, getattr(self, name), 1))
        defaults = {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // self.num_attention_heads,
            "entry_dim": self.hidden_size,
            "key_dim": max(1, self.hidden_size // self.num_knowledge_heads),
        }
        for name, default in defaults.items():
            value = getattr(self, name)
            setattr(self, name, integer(name, default if value is None else value, 1))
        integer("num_entries", self.num_entries, 1)
        if self.entries_per_token is not None:
            integer("entries_per_token", self.entries_per_token, 1)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"RoPE turns pairs of coordinates: head_dim must be even, got {self.head_dim}")
        names = {"knowledge_activation": ACTIVATIONS, "threshold": THRESHOLDS, "order": ORDERS}
        for name, allowed in names.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        super().__post_init__(**kwargs)

    @property
    def knowledge_parameters(self) -> int:
        """Parameters of E and of all that reads it; what stands where feed-forward layers would.

        |E| d_E + L (h d d_k + p h d_E d_k + h d_E d + d + thresholds) for L blocks of h heads with p parts (2 if
        gated); thresholds: "mlp" (d_E + 1) 64 + 65 p h, "per_entry" p h |E|, "coordinate" 0.
        """
        heads = self.num_knowledge_heads
        keys = heads * (2 if self.gated else 1)
        thresholds = {
            "mlp": (self.entry_dim + 1) * HIDDEN + (HIDDEN + 1) * keys,
            "per_entry": keys * self.num_entries,
            "coordinate": 0,
        }
        projections = (heads * self.hidden_size + keys * self.entry_dim) * self.key_dim
        projections += heads * self.entry_dim * self.hidden_size + self.hidden_size
        return self.num_entries * self.entry_dim + self.num_hidden_layers * (projections + thresholds[self.threshold])

    @property
    def threshold_columns(self) -> int:
        """How many threshold columns a store for this model has: layers x parts x heads."""
        return self.num_hidden_layers * (2 if self.gated else 1) * self.num_knowledge_heads

    def feed_forward_twin(self) -> PreTrainedConfig:
        """A transformers model that differs in sharing alone: each layer has feed-forward neurons of its own.

        What a modular model is to be compared with: the same blocks, activation, gate and biases b1 and b2 (a Llama;
        ungated an Arcee, which is a Llama without the gate), with as many parameters as the knowledge has, to within
        half a neuron a layer. (The layers that a modular model folds into have |E| neurons each, and the same values,
        but many more parameters.)

        Raises:
            ValueError: sparsemax, which no feed-forward layer has: it depends on all entries at once.
        """
        if self.knowledge_activation == "sparsemax":
            raise ValueError("sparsemax normalises over all entries: no feed-forward layer of transformers does that")
        keys = 2 if self.gated else 1
        neuron = (keys + 1) * self.hidden_size + keys
        neurons = round((self.knowledge_parameters / self.num_hidden_layers - self.hidden_size) / neuron)
        shared = {name: getattr(self, name) for name in _SHARED}
        kind = LlamaConfig if self.gated else ArceeConfig
        sizes = {"intermediate_size": max(1, neurons), "hidden_act": self.knowledge_activation, "mlp_bias": True}
        return kind(**sizes, **shared)
