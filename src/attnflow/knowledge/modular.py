"""`ModularForCausalLM`: every block has self-attention over the text and cross-attention to one base of entries."""

from __future__ import annotations

from typing import Any, cast, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from attnflow._core.checks import integer
from attnflow.knowledge.attention import (
    ACTIVATIONS,
    THRESHOLDS,
    GeneralizedCrossAttention,
    ThresholdHidden,
    ThresholdOut,
)
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.layered import SharedReader
from attnflow.knowledge.retrieval import Retrieval
from attnflow.knowledge.store.source import EntrySource
from attnflow.models.arguments import CACHES

Entries = Float[Tensor, "entries entry_dim"] | EntrySource


@no_type_check  # transformers makes an __init__ that takes more than its signature says
class ModularConfig(PreTrainedConfig):
    """The config of `ModularForCausalLM`: a Llama-like decoder (RoPE, GQA, RMSNorm) whose blocks read one base of
    entries.

    Fields of `LlamaConfig` mean the same here.

    Args:
        vocab_size: number of tokens.
        hidden_size: d.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads of self-attention.
        num_key_value_heads: key heads of self-attention; by default as many as query heads.
        head_dim: width of a head; by default hidden_size / num_attention_heads.
        num_entries: number of rows of E.
        entry_dim: d_E; by default hidden_size. At d_E = d this is *less* expressive than feed-forward layers of
            num_entries neurons each (knowledge, sec. 5, corrected): the layers share rows of rank d_E.
        key_dim: d_k of the heads that read E; by default hidden_size / num_knowledge_heads.
        num_knowledge_heads: heads that read E in each block; they are summed.
        knowledge_activation: "relu", "gelu", "silu" or "sparsemax".
        gated: whether each entry has two keys.
        threshold: "mlp" or "coordinate".
        entries_per_token: if given, each token and head reads only that many entries, the best, in training
            (straight-through) and in evaluation. (It is not called "top_k", a sampling option of transformers.)
        **kwargs: options of every transformers config.

    Raises:
        ValueError: sizes that do not fit together, or unknown names.
    """

    model_type = "attnflow_modular"
    keys_to_ignore_at_inference = [*CACHES]  # noqa: RUF012  (transformers reads a list)

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
            raise ValueError(f"head_dim must be even, as RoPE rotates pairs of coordinates, got {self.head_dim}")
        names = {"knowledge_activation": ACTIVATIONS, "threshold": THRESHOLDS}
        for name, allowed in names.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        super().__post_init__(**kwargs)

    @property
    def threshold_columns(self) -> int:
        """The number of threshold columns that a store for this model needs: layers x parts x heads."""
        return self.num_hidden_layers * (2 if self.gated else 1) * self.num_knowledge_heads


class ModularReader(SharedReader):
    """Reads entries in a block: those of the model's base, or of its source."""

    model: ModularModel

    def __init__(self, layer: int, config: ModularConfig, model: ModularModel) -> None:
        sizes = config.hidden_size, config.key_dim, config.entry_dim, config.num_knowledge_heads
        attention = GeneralizedCrossAttention(*sizes, config.knowledge_activation, config.gated, config.threshold)
        few = config.entries_per_token
        super().__init__(layer, attention, None if few is None else Retrieval(k=few, search="exact"))
        object.__setattr__(self, "model", model)  # not a child, which would make a cycle of modules

    def current(self) -> Tensor | EntrySource:
        return self.model.read_from(None)


class ModularBlock(GradientCheckpointingLayer):
    """H' = H + C(H, E) after self-attention (knowledge, eq. 5), with norms before both."""

    def __init__(self, config: ModularConfig, layer_idx: int, model: ModularModel) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(cast(Any, config), layer_idx)
        self.reader = ModularReader(layer_idx, config, model)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, hidden_states: Tensor, *, entries: Entries, **kwargs: Any) -> Tensor:
        """Pass entries by position: reentrant checkpointing sends gradients to no keyword arguments."""
        return cast(Tensor, super().__call__(hidden_states, entries, **kwargs))

    def forward(self, hidden_states: Tensor, entries: Entries, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.reader(self.post_attention_layernorm(hidden_states), entries)


class ModularPreTrainedModel(LlamaPreTrainedModel):
    config_class = ModularConfig
    _no_split_modules = ["ModularBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": ModularBlock, "attentions": LlamaAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers leaves alone what it has loaded, by marks on each parameter that torch.nn.init is made to heed.
        if isinstance(module, KnowledgeBase | GeneralizedCrossAttention | ThresholdHidden | ThresholdOut):
            module.reset_parameters()
        else:
            super()._init_weights(module)


class ModularModel(ModularPreTrainedModel, LlamaModel):
    """The blocks without the output map; all read `knowledge`, or `source` if there is one."""

    def __init__(self, config: ModularConfig) -> None:
        LlamaPreTrainedModel.__init__(self, cast(Any, config))  # LlamaModel's own would build feed-forward layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.knowledge = KnowledgeBase(config.num_entries, config.entry_dim)
        self.layers = nn.ModuleList(ModularBlock(config, index, self) for index in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=cast(Any, config))
        self.gradient_checkpointing = False
        self.source: EntrySource | None = None
        self.post_init()

    def forward(self, *args: Any, entries: Entries | None = None, **kwargs: Any) -> Any:
        """Run like `LlamaModel`; `entries` replace E and the source in this call."""
        kwargs["entries"] = self.read_from(entries)  # LlamaModel passes unknown arguments to every block
        return super().forward(*args, **kwargs)

    def read_from(self, entries: Entries | None) -> Entries:
        if entries is None:
            return self.knowledge() if self.source is None else self.source
        if not isinstance(cast(object, entries), Tensor | EntrySource):
            raise TypeError(f"entries must be a tensor [entries, d_E] or a source, got {type(entries).__name__}")
        return entries


class ModularForCausalLM(ModularPreTrainedModel, LlamaForCausalLM):
    """A causal language model whose blocks read one shared base of entries in place of feed-forward layers.

    It is an ordinary `PreTrainedModel`: `Trainer`, `save_pretrained`, `generate`, masks and biases work.

    Load a saved model with `ModularForCausalLM.from_pretrained(folder)` or `af.models.load_model(folder)`.
    `AutoModelForCausalLM` (`AutoModel`, `AutoConfig`) works only after `from attnflow.knowledge import
    ModularForCausalLM`; before that, transformers "does not recognize this architecture". `import attnflow` alone does
    not import transformers. The folder holds no code, so `trust_remote_code` has no effect.

    Fine-tuning by PEFT: E and the readers' projections are parameters, not linear maps. LoRA finds `q_proj`, `k_proj`,
    `v_proj`, `o_proj` by `target_modules`, and a reader's parameters by
    `target_parameters=["reader.attention.value"]`. `modules_to_save=["knowledge"]` also trains E itself.

    >>> sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    >>> config = ModularConfig(num_entries=24, **sizes)
    >>> ModularForCausalLM(config).knowledge
    KnowledgeBase(num_entries=24, entry_dim=16)
    """

    def __init__(self, config: ModularConfig) -> None:
        LlamaPreTrainedModel.__init__(self, cast(Any, config))
        self.model = ModularModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def knowledge(self) -> KnowledgeBase:
        """The base E."""
        return self.model.knowledge

    def readers(self) -> list[ModularReader]:
        """The readers of E, block by block."""
        return [cast(ModularBlock, block).reader for block in self.model.layers]

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (releases name the cache among kwargs differently)
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        entries: Entries | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run like `LlamaForCausalLM`; this call reads `entries` (a tensor or a source) in place of E."""
        kwargs.update(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        kwargs.update(inputs_embeds=inputs_embeds, labels=labels, use_cache=use_cache)
        kwargs.update(logits_to_keep=logits_to_keep, entries=entries)
        return super().forward(**kwargs)

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Do not repeat `entries`, which do not belong to a sequence as beams and samples do."""
        entries = kwargs.pop("entries", None)
        ids, expanded = cast(Any, super())._expand_inputs_for_generation(*args, **kwargs)
        return ids, expanded if entries is None else {**expanded, "entries": entries}


AutoConfig.register(ModularConfig.model_type, ModularConfig, exist_ok=True)
AutoModel.register(ModularConfig, ModularModel, exist_ok=True)
AutoModelForCausalLM.register(ModularConfig, ModularForCausalLM, exist_ok=True)
