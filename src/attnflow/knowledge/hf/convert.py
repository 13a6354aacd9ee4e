"""`from_ffn` and `to_ffn`: the feed-forward layers of a transformers model as entries of one base, and back."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Final, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnflow._core.checks import integer
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.base import PARTS, EntryLayout, LayeredKnowledge
from attnflow.knowledge.conditions import conditions
from attnflow.knowledge.hf.verify import Inputs, verify
from attnflow.knowledge.layered import EntryScores, EntryValues
from attnflow.models.families.table import FeedForward
from attnflow.models.feed_forward import find_feed_forward, stored, uncovered
from attnflow.models.loaded import Loaded, split

KNOWLEDGE: Final = "knowledge"  # the base, as a child of the model
_SITES: Final = "_attnflow_feed_forward"

Model = TypeVar("Model", bound=nn.Module)
# A layer as it was: where, which maps into its neurons had a bias, whether weights were (in, out), how many neurons.
_Converted = tuple[FeedForward, list[bool], bool, int]


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

    Args:
        model: a transformers model, or what `af.load_model` returned; it is not changed.
        entry_dim: d_E, if the entries must be no wider; an error says by how much that is not exact.
        key_dim: d_k, likewise.
        partial: convert what can be, and leave the rest of a layer, such as experts that are stored together, to the
            model's own code. Without it nothing of a layer is left out: a matrix that is neither attention (or another
            mixer of positions), norm, embedding nor the choice of experts is in the base, or the model is refused.
        check: run the model and the copy on a few tokens: the same outputs, and others once the values of all entries
            have the other sign. Named inputs are taken in place of tokens; False: no check.

    Returns:
        The converted copy, with `model.knowledge`, a `LayeredKnowledge`, to be searched and edited.

    Raises:
        TypeError: no model.
        UnsupportedArchitecture: no feed-forward layers that are known, layers of different widths or forms, matrices
            that would be left out, or outputs that are others.
        ValueError: converted already, widths for which the conversion is not exact, or a model that does not run on
            the tokens of the check.

    Cost: a copy of the model, with its feed-forward weights moved into the base, and three short forward passes.

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
    sites = find_feed_forward(model)
    if not partial:
        _complete(model, sites)
    layout = _layout(model, sites)
    _check_widths(model, sites[0], layout, entry_dim, key_dim)
    opened = copy.deepcopy(model)
    with torch.no_grad():
        blocks = [_entries(opened, site, layout) for site in sites]
        base = LayeredKnowledge(torch.cat(blocks), [len(block) for block in blocks], layout)
    converted: list[_Converted] = []
    for index, site in enumerate(sites):
        parent = opened.get_submodule(site.name)
        out, biased = parent.get_submodule(site.last), [_bias(parent.get_submodule(p)) is not None for p in site.first]
        bias = _bias(out)
        values = EntryValues(base, index, None if bias is None else bias.detach())
        converted.append((site, biased, isinstance(out, Conv1D), len(blocks[index])))
        for path, parts in _maps(site):
            parent.set_submodule(path, EntryScores(values, parts))
        parent.set_submodule(site.last, values)
    opened.add_module(KNOWLEDGE, base)
    setattr(opened, _SITES, converted)
    opened.train(model.training)
    if check is not False:
        verify(model, opened, base, None if check is True else check)
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
    sites = cast("list[_Converted] | None", getattr(model, _SITES, None))
    if sites is None:
        raise ValueError(f"{type(model).__name__} reads no knowledge base; from_ffn(model) makes one that does")
    counts = cast("list[int]", cast(LayeredKnowledge, model.get_submodule(KNOWLEDGE)).counts.tolist())
    edited = counts != [before for _, _, _, before in sites]
    if edited and len(set(counts)) > 1:
        raise ValueError(
            f"layers now have {min(counts)} to {max(counts)} entries; a plain model has the same number in each: "
            "insert or delete until they agree, entries of zeros change nothing"
        )
    plain = copy.deepcopy(model)
    base = cast(LayeredKnowledge, plain.get_submodule(KNOWLEDGE))
    for index, (site, biased, transposed, _) in enumerate(sites):
        parent = plain.get_submodule(site.name)
        entries = base.entries.detach()[base.rows(index)]
        for (path, parts), has_bias in zip(_maps(site), biased, strict=True):
            weight = torch.cat([entries[:, base.layout.key(part)] for part in parts])
            bias = torch.cat([entries[:, base.layout.threshold(part)] for part in parts])
            if not has_bias and bool(bias.any()):
                raise ValueError(f"{site.name}.{path} has no bias, but its entries were given thresholds")
            parent.set_submodule(path, _linear(weight, bias if has_bias else None, transposed))
        bias = _bias(parent.get_submodule(site.last))
        out = _linear(entries[:, base.layout.value].T, None if bias is None else bias.detach(), transposed)
        parent.set_submodule(site.last, out)
    for copied in base.__dict__.get("copies", []):
        copied.stop()  # a store that is attached to the converted model
    delattr(plain, KNOWLEDGE)
    delattr(plain, _SITES)
    config = getattr(plain, "config", None)
    for name in ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim") if edited else ():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, counts[0])
    plain.train(model.training)
    return plain


def _complete(model: nn.Module, sites: list[FeedForward]) -> None:
    """Refuse what would be converted in part."""
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


def _layout(model: nn.Module, sites: list[FeedForward]) -> EntryLayout:
    widths = {stored(model.get_submodule(f"{site.name}.{site.last}".strip("."))).shape[0] for site in sites}
    forms = {site.gated for site in sites}
    if len(widths) > 1 or len(forms) > 1:
        raise UnsupportedArchitecture(
            f"feed-forward layers of {type(model).__name__} differ (widths {sorted(widths)}, gated {sorted(forms)}), "
            "and their entries do not fit one base; pass one stack of it"
        )
    return EntryLayout(widths.pop(), forms.pop())


def _check_widths(
    model: nn.Module, site: FeedForward, layout: EntryLayout, entry_dim: int | None, key_dim: int | None
) -> None:
    if (entry_dim is None or entry_dim >= layout.entry_dim) and (key_dim is None or key_dim >= layout.model_dim):
        return
    entries = _entries(model, site, layout).detach()
    keys = [entries[:, layout.key(part)].T for part in layout.parts]
    biases = [entries[:, layout.threshold(part)] for part in layout.parts]
    gates = {"gate": keys[0], "gate_thresholds": biases[0]} if layout.gated else {}
    widths = key_dim or layout.model_dim, entry_dim or layout.entry_dim
    needed = conditions(keys[-1], entries[:, layout.value], *widths, thresholds=biases[-1], **gates)
    raise ValueError(
        f"the first {'gated ' if site.gated else ''}layer is {needed}. This conversion keeps weights bit for bit, with "
        f"d_k = {layout.model_dim} and d_E = {layout.entry_dim}"
    )


def _entries(model: nn.Module, site: FeedForward, layout: EntryLayout) -> Tensor:
    """The neurons of one layer as entries."""
    parent = model.get_submodule(site.name)
    out = stored(parent.get_submodule(site.last))
    entries = out.new_zeros(out.shape[1], layout.entry_dim)
    for path, parts in _maps(site):
        module = parent.get_submodule(path)
        bias = _bias(module)
        for position, part in enumerate(parts):
            rows = slice(position * len(entries), (position + 1) * len(entries))
            entries[:, layout.key(part)] = stored(module)[rows]
            if bias is not None:
                entries[:, layout.threshold(part)] = bias[rows]
    entries[:, layout.value] = out.T
    return entries


def _maps(site: FeedForward) -> list[tuple[str, tuple[str, ...]]]:
    """(path, parts) of the maps into the neurons; families that fuse them put what is activated, the gate, first."""
    parts = PARTS[site.gated]
    return [(site.first[0], parts)] if site.fused else [(p, (part,)) for p, part in zip(site.first, parts, strict=True)]


def _linear(weight: Tensor, bias: Tensor | None, transposed: bool) -> nn.Module:
    out, into = weight.shape
    linear = Conv1D(out, into) if transposed else nn.Linear(into, out, bias=bias is not None)
    linear.weight = nn.Parameter((weight.T if transposed else weight).contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.contiguous())
    return linear


def _bias(module: nn.Module) -> Tensor | None:
    return cast("Tensor | None", getattr(module, "bias", None))
