"""The models: one base of entries for all layers, and twins with feed-forward neurons of their own in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from attnflow.knowledge import ModularConfig, ModularForCausalLM
from attnflow.knowledge.attention import HIDDEN
from experiments.knowledge_twins.start import BETWEEN, match

Kind = Literal["shared", "equal parameters", "equal compute"]
_HEAD = 32  # width of an attention head, or 64 as from a width of 512 on

# What a Llama has, too.
_SHARED: Final = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rope_parameters", "rms_norm_eps", "initializer_range"),
    *("attention_bias", "attention_dropout", "tie_word_embeddings", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)


@dataclass(frozen=True)
class Arm:
    # what stands between self-attentions: entries that all layers share, or neurons of each layer, of equal parameters
    # in all or of equal multiply-adds per token
    kind: Kind
    width: int  # d; of keys and entries, too (knowledge, sec. 6.3: d_E = d).
    layers: int  # of the model
    entries: int  # of the base; of a twin, of the base that it is compared with
    gated: bool = False  # SiLU and two keys for each entry, or ReLU and one
    softmax: bool = False  # weights of entries are a softmax of their scores, as in ordinary attention (eq. 6).
    thresholds: bool = True  # whether there is B1, a network for each layer (eq. 8).
    bias: bool = True  # whether there is b2 (eq. 9).
    # whether all layers read the entries by the same W_K, W_V and B1, with a W_Q of their own each
    common: bool = False
    # whether such a base has so many more entries that parameters are equal to those with layers' own
    larger: bool = False

    @property
    def shared(self) -> bool:
        """Whether it has a base."""
        return self.kind == "shared"

    @property
    def rows(self) -> int:
        saved = (self.layers - 1) * ((2 * self.width + HIDDEN) * self.width + 2 * HIDDEN + 1)
        return self.entries + round(saved / self.width) * self.larger

    def modular(self, vocabulary: int, length: int) -> ModularConfig:
        """Of the model with a base; of a twin, of the one that it is compared with."""
        return ModularConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.width // (64 if self.width >= 512 else _HEAD)),
            num_entries=self.rows,
            knowledge_activation="silu" if self.gated else "relu",
            gated=self.gated,
            max_position_embeddings=length,
        )

    @property
    def operations(self) -> int:
        """Multiply-adds of a token in what reads the base, all layers, all entries read from the query's side.

        The network of the thresholds is left out: it runs once for all tokens of a pass.
        """
        keys = 2 if self.gated else 1
        projections = (2 + keys) * self.width**2
        return self.layers * (projections + (keys + 1) * self.rows * self.width)

    def neurons(self, vocabulary: int, length: int) -> int:
        if self.kind == "equal parameters":
            twin: Any = feed_forward_twin(self.modular(vocabulary, length))
            return twin.intermediate_size
        return round(self.operations / (self.layers * (3 if self.gated else 2) * self.width))


def knowledge_parameters(config: ModularConfig) -> int:
    """Parameters of E and of all that reads it; what stands where feed-forward layers would.

    |E| d_E + L (h d d_k + p h d_E d_k + h d_E d + d + thresholds) for L blocks of h heads with p parts (2 if
    gated); thresholds: "mlp" (d_E + 1) 64 + 65 p h, "coordinate" 0.
    """
    heads = config.num_knowledge_heads
    keys = heads * (2 if config.gated else 1)
    thresholds = (config.entry_dim + 1) * HIDDEN + (HIDDEN + 1) * keys if config.threshold == "mlp" else 0
    projections = (heads * config.hidden_size + keys * config.entry_dim) * config.key_dim
    projections += heads * config.entry_dim * config.hidden_size + config.hidden_size
    return config.num_entries * config.entry_dim + config.num_hidden_layers * (projections + thresholds)


def feed_forward_twin(config: ModularConfig) -> Any:
    """The config of a transformers model that differs in sharing alone: each layer has feed-forward neurons of its own.

    The same blocks, activation, gate and biases b1 and b2 (a Llama; ungated an Arcee, which is a Llama without the
    gate), with as many parameters as the knowledge has, to within half a neuron a layer. (The layers that a modular
    model folds into have |E| neurons each, and the same values, but many more parameters.) A ValueError reports
    sparsemax, which no feed-forward layer has: it depends on all entries at once.
    """
    from transformers import ArceeConfig, LlamaConfig

    if config.knowledge_activation == "sparsemax":
        raise ValueError("sparsemax normalises over all entries: no feed-forward layer of transformers does that")
    keys = 2 if config.gated else 1
    neuron = (keys + 1) * config.hidden_size + keys
    neurons = round((knowledge_parameters(config) / config.num_hidden_layers - config.hidden_size) / neuron)
    kind = LlamaConfig if config.gated else ArceeConfig
    own = {"intermediate_size": max(1, neurons), "hidden_act": config.knowledge_activation, "mlp_bias": True}
    return kind(**own, **{name: getattr(config, name) for name in _SHARED})


def build(arm: Arm, vocabulary: int, length: int, seed: int) -> Any:
    """The model, initialised by the seed such that all arms start alike: see `match`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _made(arm, vocabulary, length)
    ordinary = Arm("equal parameters", arm.width, arm.layers, arm.entries, arm.gated)
    match(model, ordinary.neurons(vocabulary, length), seed)
    return model


def _made(arm: Arm, vocabulary: int, length: int) -> Any:
    from transformers import AutoModelForCausalLM

    config: Any = arm.modular(vocabulary, length)
    if arm.shared:
        model = ModularForCausalLM(config)
        _reduce(model, arm)
        return model
    twin = feed_forward_twin(config)
    twin.intermediate_size = arm.neurons(vocabulary, length)
    return AutoModelForCausalLM.from_config(twin)


def _reduce(model: ModularForCausalLM, arm: Arm) -> None:
    """Take away what the arm does not have: what is left out stays at zero, and is not trained."""
    first = model.readers()[0].attention
    for reader in model.readers():
        attention = reader.attention
        if arm.softmax:
            attention.activation = _softmax
        if not arm.thresholds:
            attention.threshold_network.requires_grad_(False)
        if not arm.bias:
            cast(nn.Parameter, attention.output_bias).requires_grad_(False)
        if arm.common:
            attention.key, attention.value = first.key, first.value
            attention.threshold_network = first.threshold_network


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def sizes(arm: Arm, vocabulary: int, length: int) -> dict[str, int]:
    """Trained parameters of the whole model and of what stands between self-attentions; multiply-adds per token there.

    Returns:
        "parameters", "between", "operations", and of twins the "neurons" of a layer.
    """
    with torch.device("meta"):
        model: nn.Module = _made(arm, vocabulary, length)
    trained = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    parameters = sum(count for _, count in trained)
    between = sum(count for name, count in trained if any(part in name for part in BETWEEN))
    found = {"parameters": parameters, "between": between}
    if arm.shared:
        return {**found, "operations": arm.operations}
    neurons = arm.neurons(vocabulary, length)
    return {**found, "operations": arm.layers * (3 if arm.gated else 2) * arm.width * neurons, "neurons": neurons}
