"""The models: one base of entries for all layers, and twins with feed-forward neurons of their own in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from attnflow.knowledge import ModularConfig, ModularForCausalLM

Kind = Literal["shared", "equal parameters", "equal compute"]
_HEAD = 32  # width of an attention head, or 64 as from a width of 512 on


@dataclass(frozen=True)
class Arm:
    """One model.

    Attributes:
        kind: what stands between self-attentions: entries that all layers share, or neurons of each layer, of equal
            parameters in all or of equal multiply-adds per token.
        width: d; of keys and entries, too (knowledge, sec. 6.3: d_E = d).
        layers: of the model.
        entries: of the base; of a twin, of the base that it is compared with.
        gated: SiLU and two keys for each entry, or ReLU and one.
        best: how many entries each token reads in each layer, in training and after; None: all.
    """

    kind: Kind
    width: int
    layers: int
    entries: int
    gated: bool = False
    best: int | None = None

    @property
    def shared(self) -> bool:
        """Whether it has a base."""
        return self.kind == "shared"

    def modular(self, vocabulary: int, length: int) -> ModularConfig:
        """Of the model with a base; of a twin, of the one that it is compared with."""
        return ModularConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.width // (64 if self.width >= 512 else _HEAD)),
            num_entries=self.entries,
            knowledge_activation="silu" if self.gated else "relu",
            gated=self.gated,
            entries_per_token=self.best,
            max_position_embeddings=length,
        )

    @property
    def operations(self) -> int:
        """Multiply-adds of a token in what reads the base, all layers, all entries read from the query's side.

        The network of the thresholds is left out: it runs once for all tokens of a pass.
        """
        keys = 2 if self.gated else 1
        projections = (2 + keys) * self.width**2
        return self.layers * (projections + (keys + 1) * self.entries * self.width)

    def neurons(self, vocabulary: int, length: int) -> int:
        """In each layer of a twin."""
        if self.kind == "equal parameters":
            twin: Any = self.modular(vocabulary, length).feed_forward_twin()
            return twin.intermediate_size
        return round(self.operations / (self.layers * (3 if self.gated else 2) * self.width))


def build(arm: Arm, vocabulary: int, length: int, seed: int) -> Any:
    """The model, initialised by the seed: matrices N(0, 0.02), of readers and entries N(0, 1 / fan-in)."""
    from transformers import AutoModelForCausalLM

    config: Any = arm.modular(vocabulary, length)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if arm.shared:
            return ModularForCausalLM(config)
        twin = config.feed_forward_twin()
        twin.intermediate_size = arm.neurons(vocabulary, length)
        return AutoModelForCausalLM.from_config(twin)


def sizes(arm: Arm, vocabulary: int, length: int) -> dict[str, int]:
    """Parameters of the whole model and of what stands between self-attentions; multiply-adds per token of the latter.

    Returns:
        "parameters", "between", "operations", and of twins the "neurons" of a layer.
    """
    with torch.device("meta"):
        model: nn.Module = build(arm, vocabulary, length, 0)
    parameters = sum(p.numel() for p in model.parameters())
    parts = (".mlp.", ".reader.", "model.knowledge.")
    between = sum(p.numel() for name, p in model.named_parameters() if any(part in name for part in parts))
    found = {"parameters": parameters, "between": between}
    if arm.shared:
        return {**found, "operations": arm.operations}
    neurons = arm.neurons(vocabulary, length)
    return {**found, "operations": arm.layers * (3 if arm.gated else 2) * arm.width * neurons, "neurons": neurons}
