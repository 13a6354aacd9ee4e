"""`from_ffn` and `to_ffn`: the feed-forward layers of a model as entries of one base, with a check, and back."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial as bound
from itertools import product
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from attnflow._core.checks import integer
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.base import LayeredKnowledge
from attnflow.knowledge.conditions import conditions
from attnflow.knowledge.hf.layer_forms import LayerForm, form_of
from attnflow.knowledge.hf.stored_layers import followed
from attnflow.knowledge.layered import ExpertEntries, LayerReader
from attnflow.models.evaluation import seed_all
from attnflow.models.feed_forward import FeedForward, PackedExperts, find_feed_forward, uncovered
from attnflow.models.loaded import Loaded, accepts, split
from attnflow.models.trial import DoesNotRun, trial
from attnflow.models.watching import Arguments, Call, Watch

KNOWLEDGE: Final = "knowledge"  # the base, as a child of the model
_SITES: Final = "_attnflow_feed_forward"

# Where configurations say how many neurons a layer has.
_SIZES: Final = (
    *("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)

_TOKENS: Final = 6  # of the check

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
        check: run the model and the copy on a few tokens: the same outputs, and others once the values of all entries
            have the other sign. Named inputs are taken in place of tokens, such as those with pixels, without which
            an image tower does not run; False: no check.

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
    sites = find_feed_forward(model)
    if not partial:
        _complete(model, sites)
    forms = [form_of(model, site) for site in sites]
    _check_widths(model, forms[0], entry_dim, key_dim)
    opened = copy.deepcopy(model)
    base = _base(opened, forms)
    for layer, form in enumerate(forms):
        form.open(opened, base, layer)
    opened.add_module(KNOWLEDGE, base)
    setattr(opened, _SITES, forms)
    opened.train(model.training)
    if check is not False:
        verify(model, opened, base, [form.name for form in forms], None if check is True else check)
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
    if (link := followed(base)) is not None:
        link.stop()
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


def _base(model: nn.Module, forms: list[LayerForm]) -> LayeredKnowledge:
    """Stack the entries of all layers, with zeros that fill narrower ones."""
    width = max(form.layout.entry_dim for form in forms)
    layouts = [replace(form.layout, padding=width - form.layout.entry_dim) for form in forms]
    counts = [[form.neurons] * form.num_experts or form.neurons for form in forms]
    with torch.no_grad():
        blocks = [form.entries(model, layout) for form, layout in zip(forms, layouts, strict=True)]
        return LayeredKnowledge(torch.cat(blocks), counts, layouts)


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


@torch.no_grad()
def verify(
    model: nn.Module,
    opened: nn.Module,
    base: LayeredKnowledge,
    paths: Sequence[str],
    inputs: Inputs | None = None,
) -> None:
    """Compare a converted copy with its model on `inputs` or a few tokens; neither is changed.

    The tolerance is the larger of two: sqrt(eps) times what negating all values moves the outputs by, or one rounding
    per layer of the largest output. Layers that these inputs do not reach are compared alone, on random tokens. The
    copy's experts get the choices of the model's routers, which rounding could flip.
    """
    named = _tokens(model) if inputs is None else dict(inputs)
    hint = "pass check= named inputs that it takes, or check=False"
    choices = _Choices(model, opened, [path for path in paths if isinstance(opened.get_submodule(path), ExpertEntries)])
    try:
        before = choices.noted(model, named)
    except DoesNotRun as error:
        raise ValueError(
            f"{type(model).__name__} does not run on {', '.join(named)} of the check ({error.why}); {hint}"
        ) from error
    if not any(bool(value.isfinite().any()) for value in before):
        raise ValueError(f"{type(model).__name__} says nothing finite on the tokens of the check; {hint}")
    values = [base.entries[base.rows(layer), layout.value] for layer, layout in enumerate(base.layouts)]
    layers = {reader.layer: cast(nn.Module, reader) for reader in opened.modules() if isinstance(reader, LayerReader)}
    ran: set[int] = set()
    with Watch(layers, lambda call: ran.add(call.name)):
        _compare(type(model).__name__, before, bound(choices.repeated, opened, named), values, base)
    for layer, path in enumerate(paths):
        if layer not in ran:
            draw = torch.Generator().manual_seed(0)
            hidden = torch.randn(1, _TOKENS, base.layouts[layer].model_dim, generator=draw).to(base.entries)
            try:
                before = _outputs(model.get_submodule(path), hidden)
            except DoesNotRun:  # it takes more than tokens
                continue
            run = bound(_outputs, opened.get_submodule(path), hidden)
            _compare(f"{type(model).__name__}, {path},", before, run, values, base)


def _compare(
    name: str,
    before: list[Tensor],
    run: Callable[[], list[Tensor]],
    values: Sequence[Tensor],
    base: LayeredKnowledge,
) -> None:
    """Compare outputs with those of `run`; `run` must also change them once all values are negated."""
    finite = [value.isfinite() for value in before]
    after = run()
    for one in values:
        one.neg_()  # exact, there and back
    try:
        other = run()
    finally:
        for one in values:
            one.neg_()

    def apart(ones: list[Tensor], others: list[Tensor]) -> float:
        pairs = zip(ones, others, finite, strict=True)
        return max(float((a[m] - b[m]).abs().nan_to_num(nan=torch.inf).amax()) for a, b, m in pairs if m.any())

    rounding = max(torch.finfo(value.dtype).eps for value in (*before, base.entries))
    rounding = max(rounding, torch.finfo(torch.float32).eps)  # many models compute parts of themselves in float32
    largest = max(float(value[mask].abs().amax()) for value, mask in zip(before, finite, strict=True) if mask.any())
    moved, differs = apart(other, after), apart(after, before)
    if moved == 0:
        raise UnsupportedArchitecture(
            f"{name} does not read its feed-forward layers: with values of the other sign the outputs "
            "are the same (layers that write zeros look so, too: check=False)"
        )
    if differs > max(rounding**0.5 * moved, base.num_layers * rounding * largest):
        raise UnsupportedArchitecture(
            f"{name} was not converted exactly: outputs differ by {differs:.2g} where values of the "
            f"other sign move them by {moved:.2g}; check=False returns the copy nevertheless"
        )


class _Choices:
    """Records what each expert module of a model received, and replays it in the copy."""

    def __init__(self, model: nn.Module, opened: nn.Module, paths: Sequence[str]) -> None:
        self._own = {path: model.get_submodule(path) for path in paths}
        self._copies = {path: opened.get_submodule(path) for path in paths}
        self._given: dict[tuple[str, int], tuple[Any, ...]] = {}

    def noted(self, model: nn.Module, inputs: Inputs) -> list[Tensor]:

        def note(call: Call) -> None:
            self._given[call.name, call.number] = tuple(call.arguments().values())

        with Watch(self._own, note):
            return _outputs(model, inputs)

    def repeated(self, opened: nn.Module, inputs: Inputs) -> list[Tensor]:

        def give(call: Call) -> Arguments | None:
            noted = self._given.get((call.name, call.number), ())
            if not noted or noted[0].shape != call.first.shape:
                return None
            return (noted if len(noted) == 1 else (call.first, *noted[1:])), {}

        with Watch(self._copies, give):
            return _outputs(opened, inputs)


def _outputs(model: nn.Module, inputs: Mapping[str, Tensor] | Tensor) -> list[Tensor]:
    """Return the floating-point tensors at the top level of a model's output."""
    with trial(model):
        seed_all(0)
        result: Any = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    values = (result,) if isinstance(result, Tensor) else result.values() if isinstance(result, Mapping) else result
    return [one for one in values if isinstance(one, Tensor) and one.is_floating_point() and one.numel()]


def _tokens(model: nn.Module) -> dict[str, Tensor]:
    """Choose a few ordinary token ids that end with the end-of-text token, for encoder and decoder."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(config, "vocab_size", None)
    size = size if isinstance(size, int) else 2 * _TOKENS
    ids = [(size // 2 + 3 * place) % size for place in range(_TOKENS)]
    end = getattr(config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < size:
        ids[-1] = end
    device = next(model.parameters()).device
    named = {"input_ids": torch.tensor([ids], device=device)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and accepts(model, "decoder_input_ids"):
        named["decoder_input_ids"] = named["input_ids"]
    return named
