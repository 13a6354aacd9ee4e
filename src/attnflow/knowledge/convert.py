"""`from_ffn` turns a model's feed-forward layers into entries of one base and checks the result; `to_ffn` undoes it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Final, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnflow._core.checks import integer
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.progress import Progress
from attnflow.knowledge.base import PARTS, EntryLayout, LayeredKnowledge
from attnflow.knowledge.conversion_check import conditions, verify
from attnflow.knowledge.layered import EntryScores, EntryValues, ExpertEntries, LayerReader, model_layers
from attnflow.knowledge.saving import FORMS, KNOWLEDGE, neurons_now, prepare, resize, undo
from attnflow.knowledge.store import Store
from attnflow.models.anatomy.feed_forward import ADAPTED, PER_LAYER, FeedForward, PackedExperts, stored, uncovered
from attnflow.models.subject import Loaded, Subject

_OTHER_LAYER: Final = -1e9  # finite, since GELU and SiLU of an infinite score are NaN
_BATCH: Final = 4096  # entries that are written to a store at once
_LORA: Final = ".lora_"
_MERGE: Final = "Merge the adapter first (model.merge_and_unload() of PEFT), and convert the model that results"
_NO_BIAS: Final = "has no bias, but its entries now have thresholds: set them to 0, or keep model.state_dict()"

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
    """Copy a model so that its feed-forward layers read one knowledge base, `.knowledge`, with the same outputs.

    Each neuron becomes an entry [w_up | w_down | b_up] (gated: [w_gate | w_up | w_down | b_gate | b_up]), and each
    layer reads its own entries. (Knowledge, sec. 5, corrected: the paper's equivalence holds for entries of this width,
    not for d_E = d.) A layer slices the parts from the rows; `model.knowledge.attention(layer, activation)` is the same
    layer in the paper's form, with W_Q, W_K and W_V that select the parts. Everything between the linear maps,
    including dropout and norms, is still the model's own code, so it stays a transformers model.

    Experts become entries, too. In a layer they follow one another (`knowledge.rows(layer, expert)`), and the model's
    router multiplies the weight of an entry, by 0 if its expert is not chosen. Shared experts are a layer of their own.
    Probing finds how a module of experts reads its parameters, and which function it applies to a neuron's scores.
    Layers of several widths and forms (a plain image tower, a gated decoder) share the base; `knowledge.layouts` says
    which columns each layer reads, and the others hold zeros.

    Args:
        model: a transformers model, or what `af.load_model` returned; it is not changed.
        entry_dim: d_E, the most width that an entry may have; an error says how inexact a smaller one would be.
        key_dim: d_k, the most width that a key may have.
        partial: leave parts of a layer that cannot be converted, such as adapters, to the model's own code. Otherwise
            such a model is refused: the base must hold every matrix, except those of attention (or another mixer of
            positions), norms, embeddings, residual connections and the choice of experts.
        check: run the model and the copy on a few tokens, or an image of noise. Outputs must be equal, and must change
            once the values of all entries are negated. Pass named inputs to use those instead; False skips the check.

    Returns:
        The converted copy; its `model.knowledge`, a `LayeredKnowledge`, can be searched and edited. `save_pretrained`
        and `Trainer` write it as the plain model that `to_ffn` returns, which transformers loads without attnflow.
        `load_state_dict` reads both forms, so that a training resumes. LoRA does not know entries: adapt the plain
        model, merge the adapter, and convert the result.

    Raises:
        TypeError: the argument is not a model.
        UnsupportedArchitecture: no feed-forward layer is known, a matrix would be left out (experts with their own
            norm, identities among the experts), or the outputs differ.
        ValueError: the model is converted already or does not run on the check's tokens, or the widths are inexact.

    Cost: a copy of the model, with its feed-forward weights moved into the base, and three short forward passes. Rows
        are as wide as the widest layer's.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2))
    >>> from_ffn(model).knowledge.num_entries
    48
    """
    subject = Subject.of(model).inside
    model = cast(Model, subject.model)
    for name, width in (("entry_dim", entry_dim), ("key_dim", key_dim)):
        if width is not None:
            integer(name, width, 1)
    if hasattr(model, FORMS):
        raise ValueError(f"{type(model).__name__} reads a knowledge base already: to_ffn(model) undoes that")
    if any(part.covers for part in model.modules() if isinstance(part, LayerReader)):
        raise ValueError(f"features are attached to {type(model).__name__}: convert first, and attach them to the copy")
    subject.require_weights("from_ffn")
    sites = [site for site in subject.feed_forward if not _adapted(model, site)]
    if not sites:
        raise UnsupportedArchitecture(f"every feed-forward layer of {subject.kind} lies in an adapter. {_MERGE}")
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
    setattr(opened, FORMS, forms)
    prepare(opened)
    opened.train(model.training)
    if check is not False:
        verify(subject, opened, base, [form.site.name for form in forms], None if check is True else check)
    return opened


def to_ffn(model: Model | Loaded) -> Model:
    """Turn a converted model back into a plain transformers model, the inverse of `from_ffn`, with its current entries.

    Weights of entries that were not edited come back bit for bit.

    Args:
        model: converted by `from_ffn`; it is not changed.

    Raises:
        ValueError: the model is not converted, or its layers now have different numbers of entries, unlike a config.
    """
    subject = Subject.of(model).inside
    subject.require_whole("to_ffn")
    model = cast(Model, subject.model)
    forms = cast("list[LayerForm] | None", getattr(model, FORMS, None))
    if forms is None:
        raise ValueError(f"{type(model).__name__} reads no knowledge base: convert it with from_ffn(model) first")
    widths = neurons_now(cast(LayeredKnowledge, model.get_submodule(KNOWLEDGE)), forms)
    plain = copy.deepcopy(model)
    base = cast(LayeredKnowledge, plain.get_submodule(KNOWLEDGE))
    for layer, form in enumerate(forms):
        form.close(plain, base, layer)
    delattr(plain, KNOWLEDGE)
    delattr(plain, FORMS)
    undo(plain)
    resize(getattr(plain, "config", None), widths)
    plain.train(model.training)
    return plain


def save_entries(model: nn.Module, store: Store, *, name: str, progress: Progress | None = None) -> None:
    """Insert a converted model's entries under their ids, with thresholds 0 in their layer's column and -1e9 in others.

    To find the entries of a layer that a hidden state h activates, search for [h | 0 | ... | 1 | 0], with 1 at the
    threshold of the first part, and the number of the layer's reader as `threshold_column`.
    """
    base, numbers = cast(LayeredKnowledge, model.get_submodule(KNOWLEDGE)), model_layers(model)
    for batch in base.ids.cpu().split(_BATCH):
        layers = base.layer_of(batch)
        thresholds = torch.full((len(batch), base.num_layers), _OTHER_LAYER)
        thresholds[torch.arange(len(batch)), layers] = 0.0
        owners = zip((numbers[layer] for layer in layers), base.expert_of(batch), strict=True)
        sources = [f"layer {layer}{'' if expert is None else f', expert {expert}'}" for layer, expert in owners]
        rows = base.get(batch).float()
        store.insert(ids=batch, embeddings=rows, sources=sources, thresholds=thresholds, encoder=f"from_ffn:{name}")
        if progress is not None:
            progress(len(store), base.num_entries, "entries")


def _adapted(model: nn.Module, site: FeedForward | PackedExperts) -> bool:
    maps = (*site.first, site.last) if isinstance(site, FeedForward) else ()
    return any(hasattr(model.get_submodule(f"{site.name}.{path}".strip(".")), ADAPTED) for path in maps)


def _complete(model: nn.Module, sites: list[FeedForward | PackedExperts]) -> None:
    if rest := uncovered(model, sites):
        owners = Counter(name.rpartition(".")[0] for name in rest)
        where = [f"{path} ({count} matri{'x' if count == 1 else 'ces'})" for path, count in owners.items()]
        more = f" and {len(where) - 3} more modules" if len(where) > 3 else ""
        advice = "Pass partial=True to convert those parts and leave the rest to the model's own code"
        advice = _MERGE if any(_LORA in name for name in rest) else advice
        raise UnsupportedArchitecture(
            f"the base must hold all feed-forward weights of {type(model).__name__}, but {', '.join(where[:3])}{more} "
            f"cannot be converted ({len(rest)} matrices beside {len(sites)} parts that can). Nothing was changed. "
            f"{advice}"
        )


def _check_widths(model: nn.Module, form: LayerForm, entry_dim: int | None, key_dim: int | None) -> None:
    layout = form.layout
    if (entry_dim is None or entry_dim >= layout.entry_dim) and (key_dim is None or key_dim >= layout.model_dim):
        return
    entries = form.entries(model, layout).detach()
    keys = [entries[:, layout.key(part)].T for part in layout.parts]
    biases = [entries[:, layout.threshold(part)] for part in layout.parts]
    widths = key_dim or layout.model_dim, entry_dim or layout.entry_dim
    needed = conditions(keys, entries[:, layout.value], biases, *widths)
    raise ValueError(
        f"the first {'gated ' if layout.gated else ''}layer is {needed}. The conversion keeps weights bit for bit with "
        f"key_dim={layout.model_dim} and entry_dim={layout.entry_dim}: pass these or leave them out"
    )


@dataclass(frozen=True)
class LinearLayer:
    layout: EntryLayout  # of the entries that it needs
    neurons: int
    site: FeedForward
    biased: tuple[bool, ...]  # which maps into the neurons have a bias
    transposed: bool  # weights are (in, out)
    num_experts: int = 0

    def entries(self, model: nn.Module, layout: EntryLayout) -> Tensor:
        parent = model.get_submodule(self.site.name)
        owners = {name: parent.get_submodule(name.rpartition(".")[0]) for name in self.names()}
        named = {name: cast(Tensor, getattr(owner, name.rpartition(".")[2])) for name, owner in owners.items()}
        rows = named[f"{self.site.last}.weight"].new_zeros(self.neurons, layout.entry_dim)
        self.fill(rows, layout, named)
        return rows

    def names(self) -> list[str]:
        maps = list(zip(self._maps(), self.biased, strict=True))
        biases = [f"{path}.bias" for (path, _), biased in maps if biased]
        return [*(f"{path}.weight" for (path, _), _ in maps), *biases, f"{self.site.last}.weight"]

    def fill(self, rows: Tensor, layout: EntryLayout, named: Mapping[str, Tensor]) -> None:
        for path, parts in self._maps():
            weight, bias = named.get(f"{path}.weight"), named.get(f"{path}.bias")
            for index, part in enumerate(parts):
                own = slice(index * len(rows), (index + 1) * len(rows))
                if weight is not None:
                    rows[:, layout.key(part)] = (weight.T if self.transposed else weight)[own]
                if bias is not None:
                    rows[:, layout.threshold(part)] = bias[own]
        if (out := named.get(f"{self.site.last}.weight")) is not None:
            rows[:, layout.value] = out if self.transposed else out.T

    def plain(self, rows: Tensor, layout: EntryLayout) -> dict[str, Tensor]:
        values = rows[:, layout.value]
        named = {f"{self.site.last}.weight": values if self.transposed else values.T}
        for (path, parts), biased in zip(self._maps(), self.biased, strict=True):
            weight = torch.cat([rows[:, layout.key(part)] for part in parts])
            bias = torch.cat([rows[:, layout.threshold(part)] for part in parts])
            if biased:
                named[f"{path}.bias"] = bias
            elif bool(bias.any()):
                raise ValueError(f"{self.site.name}.{path} {_NO_BIAS}")
            named[f"{path}.weight"] = weight.T if self.transposed else weight
        return {name: tensor.contiguous() for name, tensor in named.items()}

    def open(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        parent = model.get_submodule(self.site.name)
        bias = _bias(parent.get_submodule(self.site.last))
        values = EntryValues(base, layer, None if bias is None else bias.detach())
        values.letter = "P" if self.site.first == PER_LAYER else values.letter
        for (path, parts), biased in zip(self._maps(), self.biased, strict=True):
            parent.set_submodule(path, EntryScores(values, parts, biased=biased))
        parent.set_submodule(self.site.last, values)

    def close(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        parent = model.get_submodule(self.site.name)
        named = self.plain(base.entries.detach()[base.rows(layer)], base.layouts[layer])
        bias = _bias(parent.get_submodule(self.site.last))
        named |= {} if bias is None else {f"{self.site.last}.bias": bias.detach()}
        for path in (*self.site.first, self.site.last):
            linear = _linear(named[f"{path}.weight"], named.get(f"{path}.bias"), self.transposed)
            parent.set_submodule(path, linear)

    def _maps(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (path, parts) of each map into the neurons; fused maps hold the gate first."""
        site, parts = self.site, PARTS[self.site.gated]
        if site.fused:
            return [(site.first[0], parts)]
        return [(path, (part,)) for path, part in zip(site.first, parts, strict=True)]


@dataclass(frozen=True)
class ExpertLayer:
    layout: EntryLayout  # of the entries that it needs
    neurons: int  # of each expert
    site: PackedExperts
    biased: bool  # whether the map into the neurons has a bias
    num_experts: int

    def entries(self, model: nn.Module, layout: EntryLayout) -> Tensor:
        own = model.get_submodule(self.site.name)
        named = {name: cast(Tensor, getattr(own, name)) for name in self.names()}
        rows = named[self.site.last].new_zeros(self.num_experts * self.neurons, layout.entry_dim)
        self.fill(rows, layout, named)
        return rows

    def names(self) -> list[str]:
        return [self.site.first, self.site.last, *([f"{self.site.first}_bias"] if self.biased else [])]

    def fill(self, rows: Tensor, layout: EntryLayout, named: Mapping[str, Tensor]) -> None:
        entries = rows.unflatten(0, (self.num_experts, -1))
        site, given = replace(self.site, neurons=entries.shape[1]), SimpleNamespace(**named)
        thresholds = site.thresholds(given)
        for index, part in enumerate(layout.parts):
            if site.first in named:
                entries[..., layout.key(part)] = site.keys(given)[:, index]
            if thresholds is not None:
                entries[..., layout.threshold(part)] = thresholds[:, index]
        if site.last in named:
            entries[..., layout.value] = site.values(given)

    def plain(self, rows: Tensor, layout: EntryLayout) -> dict[str, Tensor]:
        entries = rows.unflatten(0, (self.num_experts, -1))
        keys = torch.stack([entries[..., layout.key(part)] for part in layout.parts], dim=1)
        thresholds = torch.stack([entries[..., layout.threshold(part)] for part in layout.parts], dim=1)
        if not self.biased and bool(thresholds.any()):
            raise ValueError(f"{self.site.name}.{self.site.first} {_NO_BIAS}")
        stored_as = self.site.stored(keys, entries[..., layout.value], thresholds)
        return {name: tensor.contiguous() for name, tensor in zip(self.names(), stored_as, strict=False)}

    def open(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        # the reader keeps the module for its functions and for the biases of the outputs
        own = model.get_submodule(self.site.name)
        for name in self.names():
            setattr(own, name, None)
        model.set_submodule(self.site.name, ExpertEntries(base, layer, self.site, own, biased=self.biased))

    def close(self, model: nn.Module, base: LayeredKnowledge, layer: int) -> None:
        own = cast(ExpertEntries, model.get_submodule(self.site.name)).own
        for name, value in self.plain(base.entries.detach()[base.rows(layer)], base.layouts[layer]).items():
            setattr(own, name, nn.Parameter(value))
        model.set_submodule(self.site.name, own)


LayerForm = LinearLayer | ExpertLayer


def form_of(model: nn.Module, site: FeedForward | PackedExperts) -> LayerForm:
    part = model.get_submodule(site.name)
    if isinstance(site, PackedExperts):
        layout = EntryLayout(site.width, site.gated)
        return ExpertLayer(layout, site.neurons, site, site.thresholds(part) is not None, site.num_experts)
    out = part.get_submodule(site.last)
    width, neurons = stored(out).shape
    biased = tuple(_bias(part.get_submodule(path)) is not None for path in site.first)
    return LinearLayer(EntryLayout(width, site.gated), neurons, site, biased, isinstance(out, Conv1D))


def _linear(weight: Tensor, bias: Tensor | None, transposed: bool) -> nn.Module:
    out, into = weight.T.shape if transposed else weight.shape
    linear = Conv1D(out, into) if transposed else nn.Linear(into, out, bias=bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias.contiguous())
    return linear


def _bias(module: nn.Module) -> Tensor | None:
    return cast("Tensor | None", getattr(module, "bias", None))
