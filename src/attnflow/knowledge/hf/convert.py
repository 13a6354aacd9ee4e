"""`from_ffn` and `to_ffn`: the feed-forward layers of a model as entries of one base, with a check, and back."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from attnflow._core.checks import integer
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.base import PARTS, EntryLayout, LayeredKnowledge
from attnflow.knowledge.conditions import conditions
from attnflow.knowledge.hf.conversion_check import verify
from attnflow.knowledge.layered import EntryScores, EntryValues, ExpertEntries
from attnflow.models.feed_forward import FeedForward, PackedExperts, find_feed_forward, stored, uncovered
from attnflow.models.loaded import Loaded, split
from attnflow.models.offload import refuse_offloaded

KNOWLEDGE: Final = "knowledge"  # the base, as a child of the model
_SITES: Final = "_attnflow_feed_forward"

# Where configurations say how many neurons a layer has.
_SIZES: Final = (
    *("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)

Inputs = Mapping[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)


def from_ffn(
    model: Model | Loaded,
    *,
    entry_dim: int | None = None,
    key_dim: int | None = None,
    partial: bool = False,
    check: bool | Inputs = True,
) -> Model:
    """A copy of a model whose feed-forward layers read one explicit knowledge base, `.knowledge`; the same function.

    Each neuron becomes an entry [w_up | w_down | b_up] (gated: [w_gate | w_up | w_down | b_gate | b_up]), and each
    layer reads the entries of its own (knowledge, sec. 5, corrected: what the paper calls equivalence holds for entries
    of this width, not for d_E = d). It takes the parts as slices of the rows, without a product with projections;
    `model.knowledge.attention(layer, activation)` is the same layer as the paper writes it, on the same rows, with
    W_Q, W_K and W_V that select the parts. Everything between the linear maps, dropout and norms too, is the model's
    own code, so that it stays a transformers model.

    Experts become entries, too, wherever they are stored: those of one layer lie one expert after the other
    (`knowledge.rows(layer, expert)`), and the weight of an entry is multiplied by what the model's own router gives its
    expert, 0 if it is not chosen. Shared experts are a layer of their own. How a module of experts reads its parameters
    is found by comparing it with what it computes, and so is the function of a neuron's scores. Layers of several
    widths and forms (a plain image tower, a gated decoder) share the base; `knowledge.layouts` says which columns each
    one reads, the others hold zeros.

    Args:
        model: a transformers model, or what `af.load_model` returned; it is not changed.
        entry_dim: d_E, if the entries must be no wider; an error says by how much that is not exact.
        key_dim: d_k, likewise.
        partial: convert what can be, and leave the rest of a layer, such as adapters, to the model's own code. Without
            it nothing of a layer is left out: a matrix that is neither attention (or another mixer of positions), norm,
            embedding, residual connection nor the choice of experts is in the base, or the model is refused.
        check: run the model and the copy on a few tokens, or an image of noise: the same outputs, and others once the
            values of all entries have the other sign. Named inputs are taken in place of those; False: no check.

    Returns:
        The converted copy, with `model.knowledge`, a `LayeredKnowledge`, to be searched and edited.

    Raises:
        TypeError: no model.
        UnsupportedArchitecture: no feed-forward layers that are known, matrices that would be left out (experts with a
            norm of their own, identities among the experts), or outputs that are others.
        ValueError: converted already, widths for which the conversion is not exact, or a model that does not run on
            the tokens of the check.

    Cost: a copy of the model, with its feed-forward weights moved into the base, and three short forward passes. Rows
        are as wide as the widest layer's.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2))
    >>> from_ffn(model).knowledge.num_entries
    48
    """
    model = cast(Model, split(model)[0])
    for name, width in (("entry_dim", entry_dim), ("key_dim", key_dim)):
        if width is not None:
            integer(name, width, 1)
    if hasattr(model, _SITES):
        raise ValueError(f"{type(model).__name__} reads a knowledge base already; to_ffn(model) undoes that")
    refuse_offloaded(model, "from_ffn")
    sites = find_feed_forward(model)
    if not partial:
        _complete(model, sites)
    forms = [form_of(model, site) for site in sites]
    _check_widths(model, forms[0], entry_dim, key_dim)
    opened = copy.deepcopy(model)
    width = max(form.layout.entry_dim for form in forms)
    layouts = [replace(form.layout, padding=width - form.layout.entry_dim) for form in forms]
    counts = [[form.neurons] * form.num_experts or form.neurons for form in forms]
    with torch.no_grad():
        blocks = [form.entries(opened, layout) for form, layout in zip(forms, layouts, strict=True)]
        base = LayeredKnowledge(torch.cat(blocks), counts, layouts)
    for layer, form in enumerate(forms):
        form.open(opened, base, layer)
    opened.add_module(KNOWLEDGE, base)
    setattr(opened, _SITES, forms)
    opened.train(model.training)
    if check is not False:
        verify(model, opened, base, [form.site.name for form in forms], None if check is True else check)
    return opened


def to_ffn(model: Model | Loaded) -> Model:
    """A plain transformers model again: the inverse of `from_ffn`, with the entries as they are now.

    Weights of entries that were not edited come back bit for bit.

    Args:
        model: converted by `from_ffn`; it is not changed.

    Raises:
        ValueError: not converted, or layers that now differ in their number of entries, which no config can say.
    """
    model = cast(Model, split(model)[0])
    forms = cast("list[LayerForm] | None", getattr(model, _SITES, None))
    if forms is None:
        raise ValueError(f"{type(model).__name__} reads no knowledge base; from_ffn(model) makes one that does")
    widths = _neurons(cast(LayeredKnowledge, model.get_submodule(KNOWLEDGE)), forms)
    plain = copy.deepcopy(model)
    base = cast(LayeredKnowledge, plain.get_submodule(KNOWLEDGE))
    for layer, form in enumerate(forms):
        form.close(plain, base, layer)
    delattr(plain, KNOWLEDGE)
    delattr(plain, _SITES)
    config = getattr(plain, "config", None)
    parts = [one for one in (config, *getattr(config, "__dict__", {}).values()) if isinstance(one, PreTrainedConfig)]
    for part, name in product(parts, _SIZES if any(old != new for old, new in widths.items()) else ()):
        if (size := getattr(part, name, None)) in widths:
            setattr(part, name, widths[size])
    plain.train(model.training)
    return plain


def _complete(model: nn.Module, sites: list[FeedForward | PackedExperts]) -> None:
    if rest := uncovered(model, sites):
        owners = Counter(name.rpartition(".")[0] for name in rest)
        where = [f"{path} ({count} matri{'x' if count == 1 else 'ces'})" for path, count in owners.items()]
        more = f" and {len(where) - 3} more modules" if len(where) > 3 else ""
        raise UnsupportedArchitecture(
            f"{type(model).__name__}: in layers with {len(sites)} feed-forward parts that can be converted, "
            f"{', '.join(where[:3])}{more} would be left out, {len(rest)} in all: neither attention, norms nor a "
            "choice of experts. Nothing was converted; partial=True converts those parts and leaves the rest to "
            "the model's own code"
        )


def _neurons(base: LayeredKnowledge, forms: list[LayerForm]) -> dict[int, int]:
    """Map the former number of neurons per layer or expert to the current number of entries."""
    now: dict[int, set[int]] = {}
    experts = any(form.num_experts for form in forms)
    for layer, form in enumerate(forms):
        rows = [base.rows(layer, expert) for expert in range(form.num_experts)] or [base.rows(layer)]
        now.setdefault(form.neurons, set()).update(row.stop - row.start for row in rows)
    for sizes in now.values():
        if len(sizes) > 1:
            kind = "experts or layers" if experts else "layers"
            raise ValueError(
                f"{kind} now have {min(sizes)} to {max(sizes)} entries; a plain model "
                "has the same number in each: insert or delete until they agree, entries of zeros change nothing"
            )
    return {before: sizes.pop() for before, sizes in now.items()}


def _check_widths(model: nn.Module, form: LayerForm, entry_dim: int | None, key_dim: int | None) -> None:
    layout = form.layout
    if (entry_dim is None or entry_dim >= layout.entry_dim) and (key_dim is None or key_dim >= layout.model_dim):
        return
    entries = form.entries(model, layout).detach()
    keys = [entries[:, layout.key(part)].T for part in layout.parts]
    biases = [entries[:, layout.threshold(part)] for part in layout.parts]
    gates = {"gate": keys[0], "gate_thresholds": biases[0]} if layout.gated else {}
    widths = key_dim or layout.model_dim, entry_dim or layout.entry_dim
    needed = conditions(keys[-1], entries[:, layout.value], *widths, thresholds=biases[-1], **gates)
    raise ValueError(
        f"the first {'gated ' if layout.gated else ''}layer is {needed}. This conversion keeps weights bit for bit, "
        f"with d_k = {layout.model_dim} and d_E = {layout.entry_dim}"
    )


@dataclass(frozen=True)
class LinearLayer:
    """A layer of linear maps into the neurons and one map out of them, as it was before conversion."""

    layout: EntryLayout  # of the entries that it needs
    neurons: int
    site: FeedForward
    biased: tuple[bool, ...]  # which maps into the neurons have a bias
    transposed: bool  # weights are (in, out)
    num_experts: int = 0

    def entries(self, model: nn.Module, layout: EntryLayout) -> Tensor:
        """Return the layer's neurons as entries."""
        parent = model.get_submodule(self.site.name)
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
        parent = model.get_submodule(self.site.name)
        bias = _bias(parent.get_submodule(self.site.last))
        values = EntryValues(base, layer, None if bias is None else bias.detach())
        for path, parts in self._maps():
            parent.set_submodule(path, EntryScores(values, parts))
        parent.set_submodule(self.site.last, values)

    def close(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        """Replace the readers by maps."""
        parent, layout = model.get_submodule(self.site.name), base.layouts[layer]
        entries = base.entries.detach()[base.rows(layer)]
        for (path, parts), has_bias in zip(self._maps(), self.biased, strict=True):
            weight = torch.cat([entries[:, layout.key(part)] for part in parts])
            bias = torch.cat([entries[:, layout.threshold(part)] for part in parts])
            if not has_bias and bool(bias.any()):
                raise ValueError(f"{self.site.name}.{path} has no bias, but its entries were given thresholds")
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

    layout: EntryLayout  # of the entries that it needs
    neurons: int  # of each expert
    site: PackedExperts
    biased: bool  # whether the map into the neurons has a bias
    num_experts: int

    def entries(self, model: nn.Module, layout: EntryLayout) -> Tensor:
        """Return the neurons as entries, ordered by expert."""
        site, module = self.site, model.get_submodule(self.site.name)
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
        own = model.get_submodule(self.site.name)
        for name in self._names():
            setattr(own, name, None)
        model.set_submodule(self.site.name, ExpertEntries(base, layer, self.site, own))

    def close(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        """Replace the reader by the module."""
        own, layout = cast(ExpertEntries, model.get_submodule(self.site.name)).own, base.layouts[layer]
        blocks = [base.entries.detach()[base.rows(layer, expert)] for expert in range(self.site.num_experts)]
        entries = torch.stack(blocks)
        keys = torch.stack([entries[..., layout.key(part)] for part in layout.parts], dim=1)
        thresholds = torch.stack([entries[..., layout.threshold(part)] for part in layout.parts], dim=1)
        if not self.biased and bool(thresholds.any()):
            raise ValueError(f"{self.site.name}.{self.site.first} has no bias, but its entries were given thresholds")
        stored_as = self.site.stored(keys, entries[..., layout.value], thresholds)
        for name, value in zip(self._names(), stored_as, strict=False):
            setattr(own, name, nn.Parameter(value.contiguous()))
        model.set_submodule(self.site.name, own)

    def _names(self) -> list[str]:
        return [self.site.first, self.site.last, *([f"{self.site.first}_bias"] if self.biased else [])]


LayerForm = LinearLayer | ExpertLayer  # each gives its `entries`, and can `open` and `close` its layer


def form_of(model: nn.Module, site: FeedForward | PackedExperts) -> LayerForm:
    """Describe the layer at a site."""
    part = model.get_submodule(site.name)
    if isinstance(site, PackedExperts):
        layout = EntryLayout(site.width, site.gated)
        return ExpertLayer(layout, site.neurons, site, site.thresholds(part) is not None, site.num_experts)
    out = part.get_submodule(site.last)
    width, neurons = stored(out).shape
    biased = tuple(_bias(part.get_submodule(path)) is not None for path in site.first)
    return LinearLayer(EntryLayout(width, site.gated), neurons, site, biased, isinstance(out, Conv1D))


def _linear(weight: Tensor, bias: Tensor | None, transposed: bool) -> nn.Module:
    out, into = weight.shape
    linear = Conv1D(out, into) if transposed else nn.Linear(into, out, bias=bias is not None)
    linear.weight = nn.Parameter((weight.T if transposed else weight).contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.contiguous())
    return linear


def _bias(module: nn.Module) -> Tensor | None:
    return cast("Tensor | None", getattr(module, "bias", None))
