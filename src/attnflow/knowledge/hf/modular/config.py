"""The sizes of a modular language model."""

from __future__ import annotations

from typing import Any, Final

from transformers import ArceeConfig, LlamaConfig, PreTrainedConfig

from attnflow._core.checks import integer
from attnflow.knowledge.activations import ACTIVATIONS
from attnflow.knowledge.attention import HIDDEN, THRESHOLDS

# What a Llama has, too.
_SHARED: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "initializer_range",
    "attention_bias",
    "attention_dropout",
    "tie_word_embeddings",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


class ModularConfig(PreTrainedConfig):
    """Sizes of `ModularForCausalLM`: a Llama-like decoder (RoPE, GQA, RMSNorm) with one base of entries for all blocks.

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
        max_position_embeddings: longest sequence that RoPE is made for.
        rope_parameters: as transformers has them; default the plain ones with theta 10,000.
        rms_norm_eps: added to the mean square.
        initializer_range: standard deviation of linear maps and embeddings.
        attention_bias: whether self-attention's projections have biases.
        attention_dropout: of self-attention's weights.
        tie_word_embeddings: whether the output map is the embedding.
        use_cache: whether keys and values are kept while generating.
        pad_token_id: token that fills batches up, if there is one.
        bos_token_id: token that begins a text, likewise.
        eos_token_id: token that ends one, likewise.
        **kwargs: of every transformers config.

    Raises:
        ValueError: sizes that do not fit one another, unknown names.
    """

    model_type = "attnflow_modular"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers reads a list)

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 512,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        num_entries: int = 8192,
        entry_dim: int | None = None,
        key_dim: int | None = None,
        num_knowledge_heads: int = 1,
        knowledge_activation: str = "relu",
        gated: bool = False,
        threshold: str = "mlp",
        order: str = "query_side",
        entries_per_token: int | None = None,
        max_position_embeddings: int = 2048,
        rope_parameters: dict[str, Any] | None = None,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = integer("vocab_size", vocab_size, 1)
        self.hidden_size = integer("hidden_size", hidden_size, 1)
        self.num_hidden_layers = integer("num_hidden_layers", num_hidden_layers, 1)
        self.num_attention_heads = integer("num_attention_heads", num_attention_heads, 1)
        kv_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.num_key_value_heads = integer("num_key_value_heads", kv_heads, 1)
        self.head_dim = integer("head_dim", hidden_size // num_attention_heads if head_dim is None else head_dim)
        self.num_entries = integer("num_entries", num_entries, 1)
        self.entry_dim = hidden_size if entry_dim is None else integer("entry_dim", entry_dim, 1)
        self.num_knowledge_heads = integer("num_knowledge_heads", num_knowledge_heads, 1)
        self.key_dim = max(1, hidden_size // num_knowledge_heads) if key_dim is None else integer("key_dim", key_dim, 1)
        self.knowledge_activation = knowledge_activation
        self.gated = gated
        self.threshold = threshold
        self.order = order
        self.entries_per_token = (
            None if entries_per_token is None else integer("entries_per_token", entries_per_token, 1)
        )
        self.max_position_embeddings = max_position_embeddings
        self.rope_parameters = rope_parameters
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.use_cache = use_cache
        self.pad_token_id, self.bos_token_id, self.eos_token_id = pad_token_id, bos_token_id, eos_token_id
        self._check()
        kwargs["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**kwargs)

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
        block = projections + thresholds[self.threshold]
        return self.num_entries * self.entry_dim + self.num_hidden_layers * block

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

    def _check(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"RoPE turns pairs of coordinates: head_dim must be even, got {self.head_dim}")
        names = {
            "knowledge_activation": tuple(ACTIVATIONS),
            "threshold": THRESHOLDS,
            "order": ("query_side", "folded", "naive"),
        }
        for name, allowed in names.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
