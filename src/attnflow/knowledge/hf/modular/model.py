"""`ModularForCausalLM`: self-attention over the text, cross-attention to one base of entries, in every block."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from attnflow.knowledge.attention import GeneralizedCrossAttention, ThresholdHidden, ThresholdOut
from attnflow.knowledge.base import KnowledgeBase
from attnflow.knowledge.hf.modular.config import ModularConfig
from attnflow.knowledge.layered import LayerReader
from attnflow.knowledge.memory_layer.reader import KnowledgeReader, Reading
from attnflow.knowledge.memory_layer.retrieval import Retrieval
from attnflow.knowledge.memory_layer.source import Source, StoredKnowledge

Entries = Float[Tensor, "entries entry_dim"] | Source


class ModularReader(KnowledgeReader, LayerReader):
    """What reads entries in a block: those of the model's base, or of its source, such as a store.

    Ids of a `Reading` are then those of the source.
    """

    model: ModularModel

    def __init__(self, layer: int, config: ModularConfig, model: ModularModel) -> None:
        attention = GeneralizedCrossAttention(
            config.hidden_size,
            config.key_dim,
            config.entry_dim,
            num_heads=config.num_knowledge_heads,
            activation=config.knowledge_activation,
            gated=config.gated,
            threshold=config.threshold,
            num_entries=config.num_entries if config.threshold == "per_entry" else None,
        )
        few = config.entries_per_token
        super().__init__(layer, attention, None if few is None else Retrieval(k=few, search="exact"), config.order)
        object.__setattr__(self, "model", model)  # no child: a circle of modules

    @property
    def num_entries(self) -> int:
        """Rows of E, or of the source."""
        source = self.model.source
        return self.model.knowledge.num_entries if source is None else source.num_entries

    @property
    def output_bias(self) -> Tensor | None:
        """b2, a parameter of the block."""
        return self.attention.output_bias

    def every(self) -> Int[Tensor, " entries"]:
        """All ids of a store, or all rows."""
        source = self.model.source
        return source.store.ids() if isinstance(source, StoredKnowledge) else super().every()

    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Rows of E are their own ids, and what is read of a source has ids already."""
        return positions

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "heads entries model_dim"]:
        """E W_V of each head."""
        entries = self._rows(positions)[:, : self.attention.entry_dim]
        return torch.einsum("ne,hed->hnd", entries, self.attention.value)

    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries"]:
        """B1(E), of a source those that are stored beside the entries."""
        attention, width = self.attention, self.columns
        if self.model.source is None:
            return attention.thresholds(self.model.knowledge.entries)[..., positions]
        columns = self._rows(positions)[:, attention.entry_dim :][:, self.layer * width :][:, :width]
        return columns.T.reshape(attention.parts, attention.num_heads, len(positions))

    def error_bound(self, reading: Reading, source: Entries | None = None) -> Float[Tensor, " tokens"]:
        """See `KnowledgeReader.error_bound`; by default of what the model reads now."""
        return super().error_bound(reading, self.model.read_from(source))

    def _rows(self, positions: Tensor) -> Tensor:
        source = self.model.source
        if source is None:
            return self.model.knowledge.entries[positions]
        wanted = positions.cpu()
        rows = source.store.rows(wanted) if isinstance(source, StoredKnowledge) else source.rows()[wanted]
        return rows.to(self.attention.value)


class ModularBlock(GradientCheckpointingLayer):
    """H' = H + C(H, E) after self-attention (knowledge, eq. 5), with norms before both."""

    def __init__(self, config: ModularConfig, layer_idx: int, model: ModularModel) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(cast(Any, config), layer_idx)
        self.reader = ModularReader(layer_idx, config, model)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, hidden_states: Tensor, *, entries: Entries, **kwargs: Any) -> Tensor:
        """Entries go by position: reentrant checkpointing sends gradients to no others."""
        return cast(Tensor, super().__call__(hidden_states, entries, **kwargs))

    def forward(self, hidden_states: Tensor, entries: Entries, **kwargs: Any) -> Tensor:
        """The tokens after this block."""
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.reader(self.post_attention_layernorm(hidden_states), entries)


class ModularPreTrainedModel(LlamaPreTrainedModel):
    """What both modular models share: their config, and how their parameters start."""

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
    """The blocks without the output map.

    Attributes:
        knowledge: E, read by every block.
        source: what is read instead of E, such as a store; None.
    """

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
        self.source: Source | None = None
        self.post_init()

    def forward(self, *args: Any, entries: Entries | None = None, **kwargs: Any) -> Any:
        """As `LlamaModel`; `entries` are read instead of E (or of the source) in this call."""
        kwargs["entries"] = self.read_from(entries)  # LlamaModel hands what it does not know to every block
        return super().forward(*args, **kwargs)

    def read_from(self, entries: Entries | None) -> Entries:
        """What blocks read in a call: the entries given, or else the source, or else E."""
        if entries is None:
            return self.knowledge() if self.source is None else self.source
        if not isinstance(cast(object, entries), Tensor | Source):
            raise TypeError(f"entries must be a tensor [entries, d_E] or a source, got {type(entries).__name__}")
        return entries


class ModularForCausalLM(ModularPreTrainedModel, LlamaForCausalLM):
    """A causal language model whose blocks read one shared base of entries in place of feed-forward layers.

    A `PreTrainedModel` like any other: `Trainer`, `save_pretrained`, `generate`, masks and biases of this package.

    A saved model is loaded by `ModularForCausalLM.from_pretrained(folder)` or `af.models.load_model(folder)`. By
    `AutoModelForCausalLM` (`AutoModel`, `AutoConfig`), too, but only once this class was imported, and `import
    attnflow` does not do that, because it leaves transformers alone: transformers then "does not recognize this
    architecture". In a program of your own, `from attnflow.knowledge import ModularForCausalLM` first. The folder
    holds weights and a config, no code; `trust_remote_code` changes nothing.

    Fine-tuning by PEFT: E and the readers' projections are parameters, not linear maps. LoRA finds `q_proj`, `k_proj`,
    `v_proj`, `o_proj` by `target_modules`, a reader's by `target_parameters=["reader.attention.value"]`;
    `modules_to_save=["knowledge"]` trains E itself beside it.

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
        """E."""
        return self.model.knowledge

    def readers(self) -> list[ModularReader]:
        """What reads E in each block."""
        return [cast(ModularBlock, block).reader for block in self.model.layers]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        entries: Entries | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `LlamaForCausalLM`; `entries` (a tensor or a source) are read instead of E in this call."""
        kwargs.update(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        kwargs.update(past_key_values=past_key_values, inputs_embeds=inputs_embeds, labels=labels)
        kwargs.update(use_cache=use_cache, logits_to_keep=logits_to_keep, entries=entries)
        return super().forward(**kwargs)

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Entries belong to no sequence: beams and samples must not repeat them."""
        entries = kwargs.pop("entries", None)
        ids, expanded = cast(Any, super())._expand_inputs_for_generation(*args, **kwargs)
        return ids, expanded if entries is None else {**expanded, "entries": entries}


AutoConfig.register(ModularConfig.model_type, ModularConfig, exist_ok=True)
AutoModel.register(ModularConfig, ModularModel, exist_ok=True)
AutoModelForCausalLM.register(ModularConfig, ModularForCausalLM, exist_ok=True)
