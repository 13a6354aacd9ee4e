"""What a bias has added to a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from attnflow.bias.layer import layer_biases


@dataclass(frozen=True)
class BiasSummary:
    """Parameters that a bias has added, by layer.

    Attributes:
        layers: path of each attention module with a bias -> its parameters.
        num_layers: attention layers of the model.
        base: parameters of the model without the bias.
        trainable: parameters of the whole model that are trained now.
    """

    layers: dict[str, int]
    num_layers: int
    base: int
    trainable: int

    @property
    def parameters(self) -> int:
        """Parameters of the bias."""
        return sum(self.layers.values())

    def __str__(self) -> str:
        share = 100 * self.parameters / self.base if self.base else float("nan")
        return (
            f"bias on {len(self.layers)} of {self.num_layers} attention layers: {self.parameters:,} parameters "
            f"({share:.2f} % of the base model's {self.base:,}); {self.trainable:,} are trained"
        )


def summary(model: nn.Module) -> BiasSummary:
    """What the attached bias has added to a model.

    Raises:
        ValueError: nothing is attached.
    """
    found = {name.rpartition(".")[0]: bias for name, bias in layer_biases(model)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no bias attached; see af.bias.attach")
    counts = {name: sum(p.numel() for p in bias.parameters()) for name, bias in found.items()}
    ours = {id(p) for bias in found.values() for p in bias.parameters()}
    base = sum(p.numel() for p in model.parameters() if id(p) not in ours)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return BiasSummary(counts, next(iter(found.values())).num_layers, base, trainable)
