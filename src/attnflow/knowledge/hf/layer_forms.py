"""The forms of feed-forward layers: how each one's parameters become entries of a base, and parameters again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnflow.knowledge.base import PARTS, EntryLayout, LayeredKnowledge
from attnflow.knowledge.layered import EntryScores, EntryValues, ExpertEntries
from attnflow.models.feed_forward import FeedForward, PackedExperts, stored


@dataclass(frozen=True)
class LinearLayer:
    """A layer of linear maps into the neurons and one map out of them, as it was before conversion."""

    name: str  # its path
    layout: EntryLayout  # of the entries that it needs
    neurons: int
    site: FeedForward
    biased: tuple[bool, ...]  # which maps into the neurons have a bias
    transposed: bool  # weights are (in, out)
    num_experts: int = 0

    def entries(self, model: nn.Module, layout: EntryLayout) -> Tensor:
        """Return the layer's neurons as entries."""
        parent = model.get_submodule(self.name)
        out = stored(parent.get_submodule(self.site.last))
        entries = out.new_zeros(out.shape[1], layout.entry_dim)
        for path, parts in self._maps():
            module = parent.get_submodule(path)
            bias = _bias(module)
            for position, part in enumerate(parts):
                rows = slice(position * len(entries), (position + 1) * len(entries))
                entries[:, layout.key(part)] = stored(module)[rows]
                if bias is not None:
                    entries[:, layout.threshold(part)] = bias[rows]
        entries[:, layout.value] = out.T
        return entries

    def open(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        """Replace the maps by readers."""
        parent = model.get_submodule(self.name)
        bias = _bias(parent.get_submodule(self.site.last))
        values = EntryValues(base, layer, None if bias is None else bias.detach())
        for path, parts in self._maps():
            parent.set_submodule(path, EntryScores(values, parts))
        parent.set_submodule(self.site.last, values)

    def close(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        """Replace the readers by maps."""
        parent, layout = model.get_submodule(self.name), base.layouts[layer]
        entries = base.entries.detach()[base.rows(layer)]
        for (path, parts), has_bias in zip(self._maps(), self.biased, strict=True):
            weight = torch.cat([entries[:, layout.key(part)] for part in parts])
            bias = torch.cat([entries[:, layout.threshold(part)] for part in parts])
            if not has_bias and bool(bias.any()):
                raise ValueError(f"{self.name}.{path} has no bias, but its entries were given thresholds")
            parent.set_submodule(path, _linear(weight, bias if has_bias else None, self.transposed))
        bias = _bias(parent.get_submodule(self.site.last))
        out = _linear(entries[:, layout.value].T, None if bias is None else bias.detach(), self.transposed)
        parent.set_submodule(self.site.last, out)

    def _maps(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (path, parts) of each map into the neurons; fused maps hold the gate first."""
        site, parts = self.site, PARTS[self.site.gated]
        if site.fused:
            return [(site.first[0], parts)]
        return [(path, (part,)) for path, part in zip(site.first, parts, strict=True)]


@dataclass(frozen=True)
class ExpertLayer:
    """A layer of experts whose parameters are packed in one module, as it was before conversion."""

    name: str  # its path
    layout: EntryLayout  # of the entries that it needs
    neurons: int  # of each expert
    site: PackedExperts
    biased: bool  # whether the map into the neurons has a bias
    num_experts: int

    def entries(self, model: nn.Module, layout: EntryLayout) -> Tensor:
        """Return the neurons as entries, ordered by expert."""
        site, module = self.site, model.get_submodule(self.name)
        keys, thresholds, values = site.keys(module), site.thresholds(module), site.values(module)
        entries = values.new_zeros(site.num_experts, site.neurons, layout.entry_dim)
        for index, part in enumerate(layout.parts):
            entries[..., layout.key(part)] = keys[:, index]
            if thresholds is not None:
                entries[..., layout.threshold(part)] = thresholds[:, index]
        entries[..., layout.value] = values
        return entries.flatten(0, 1)

    def open(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        """Replace the module by a reader."""
        # the reader keeps the module for its functions and for the biases of the outputs
        own = model.get_submodule(self.name)
        for name in self._names():
            setattr(own, name, None)
        model.set_submodule(self.name, ExpertEntries(base, layer, self.site, own))

    def close(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        """Replace the reader by the module."""
        own, layout = cast(ExpertEntries, model.get_submodule(self.name)).own, base.layouts[layer]
        blocks = [base.entries.detach()[base.rows(layer, expert)] for expert in range(self.site.num_experts)]
        entries = torch.stack(blocks)
        keys = torch.stack([entries[..., layout.key(part)] for part in layout.parts], dim=1)
        thresholds = torch.stack([entries[..., layout.threshold(part)] for part in layout.parts], dim=1)
        if not self.biased and bool(thresholds.any()):
            raise ValueError(f"{self.name}.{self.site.first} has no bias, but its entries were given thresholds")
        stored_as = self.site.stored(keys, entries[..., layout.value], thresholds)
        for name, value in zip(self._names(), stored_as, strict=False):
            setattr(own, name, nn.Parameter(value.contiguous()))
        model.set_submodule(self.name, own)

    def _names(self) -> list[str]:
        return [self.site.first, self.site.last, *([f"{self.site.first}_bias"] if self.biased else [])]


LayerForm = LinearLayer | ExpertLayer  # each gives its `entries`, and can `open` and `close` its layer


def form_of(model: nn.Module, site: FeedForward | PackedExperts) -> LayerForm:
    """Describe the layer at a site."""
    part = model.get_submodule(site.name)
    if isinstance(site, PackedExperts):
        layout = EntryLayout(site.width, site.gated)
        return ExpertLayer(site.name, layout, site.neurons, site, site.thresholds(part) is not None, site.num_experts)
    out = part.get_submodule(site.last)
    width, neurons = stored(out).shape
    biased = tuple(_bias(part.get_submodule(path)) is not None for path in site.first)
    return LinearLayer(site.name, EntryLayout(width, site.gated), neurons, site, biased, isinstance(out, Conv1D))


def _linear(weight: Tensor, bias: Tensor | None, transposed: bool) -> nn.Module:
    out, into = weight.shape
    linear = Conv1D(out, into) if transposed else nn.Linear(into, out, bias=bias is not None)
    linear.weight = nn.Parameter((weight.T if transposed else weight).contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.contiguous())
    return linear


def _bias(module: nn.Module) -> Tensor | None:
    return cast("Tensor | None", getattr(module, "bias", None))
