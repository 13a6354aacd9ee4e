"""Saves a converted model in the form of the plain model, which transformers loads, and reads that form back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from attnflow.knowledge.base import EntryLayout, LayeredKnowledge

KNOWLEDGE: Final = "knowledge"  # the base, as a child of the model
FORMS: Final = "_attnflow_feed_forward"
_HOOKS: Final = "_attnflow_hooks"
_SAVE: Final = "save_pretrained"
_OWN: Final = "own"  # the child of a layer of experts that is left of the plain module

# Where configurations say how many neurons a layer has.
_SIZES: Final = (
    *("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)


@runtime_checkable
class PlainForm(Protocol):
    """How the tensors of a plain layer, named from its own path on, lie in its rows of the base."""

    @property
    def site(self) -> Any: ...

    @property
    def neurons(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    def names(self) -> list[str]: ...

    def fill(self, rows: Tensor, layout: EntryLayout, named: Mapping[str, Tensor]) -> None:
        """Copy into the rows those tensors that are given."""
        ...

    def plain(self, rows: Tensor, layout: EntryLayout) -> dict[str, Tensor]:
        """Copy the tensors out of the rows; `ValueError` for thresholds where the plain layer has no biases."""
        ...


def prepare(model: nn.Module) -> None:
    """Let a converted model, and each part of it that can be saved alone, save as a plain one and read both forms."""
    forms = _forms(model)
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and any(f"{form.site.name}.".startswith(_at(name)) for form in forms):
            setattr(module, _SAVE, partial(_save, model, name))
    read, look = model.register_load_state_dict_pre_hook(_read_plain), model.register_forward_pre_hook(_look)
    setattr(model, _HOOKS, (read, look))


def undo(model: nn.Module) -> None:
    """Undo `prepare`."""
    for hook in getattr(model, _HOOKS):
        hook.remove()
    delattr(model, _HOOKS)
    for module in model.modules():
        vars(module).pop(_SAVE, None)


def neurons_now(base: LayeredKnowledge, forms: Sequence[PlainForm]) -> dict[int, int]:
    """Map each former number of neurons to the present one; `ValueError` if layers differ, unlike in a config."""
    now: dict[int, set[int]] = {}
    experts = any(form.num_experts for form in forms)
    for layer, form in enumerate(forms):
        rows = [base.rows(layer, expert) for expert in range(form.num_experts)] or [base.rows(layer)]
        now.setdefault(form.neurons, set()).update(row.stop - row.start for row in rows)
    for sizes in now.values():
        if len(sizes) > 1:
            kind = "experts or layers" if experts else "layers"
            raise ValueError(
                f"a plain model needs the same number of entries in all {kind}, but they now have {min(sizes)} to "
                f"{max(sizes)}: insert entries of zeros, which change nothing, or delete some"
            )
    return {before: sizes.pop() for before, sizes in now.items()}


def resize(config: object, widths: Mapping[int, int]) -> None:
    parts = [part for part in (config, *getattr(config, "__dict__", {}).values()) if isinstance(part, PreTrainedConfig)]
    for part, name in product(parts, _SIZES if any(old != new for old, new in widths.items()) else ()):
        size = getattr(part, name, None)
        if isinstance(size, int) and size in widths:
            setattr(part, name, widths[size])


def _save(
    model: nn.Module,
    name: str,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """`PreTrainedModel.save_pretrained` for the part of a converted model with this name."""
    part = cast(Any, model.get_submodule(name))
    if options.get("distributed_checkpoint"):
        raise ValueError(
            "distributed_checkpoint=True would save entries, which from_pretrained does not know: leave it out"
        )
    config = part.config
    widths = neurons_now(_base(model), _forms(model))
    state = _plain_state(model, _at(name), part.state_dict() if state_dict is None else state_dict)
    try:
        part.config = copy.deepcopy(config)
        resize(part.config, widths)
        type(part).save_pretrained(part, save_directory, is_main_process, state_dict=state, **options)
    finally:
        part.config = config


def _plain_state(model: nn.Module, at: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    entries = state.get(f"{KNOWLEDGE}.entries", _base(model).entries).detach()
    plain = {name: tensor for name, tensor in state.items() if not name.startswith(f"{KNOWLEDGE}.")}
    for layer, form in enumerate(_forms(model)):
        path = f"{form.site.name}."
        if path.startswith(at):
            path = path[len(at) :]
            own = f"{path}{_OWN}."
            for name in [name for name in plain if name.startswith(own)]:
                plain[path + name.removeprefix(own)] = plain.pop(name)
            tensors = form.plain(entries[_base(model).rows(layer)], _base(model).layouts[layer])
            plain |= {path + name: tensor for name, tensor in tensors.items()}
    return plain


@torch.no_grad()
def _read_plain(
    model: nn.Module,
    state: dict[str, Any],
    prefix: str,
    _metadata: object,
    _strict: bool,
    missing: list[str],
    _unexpected: list[str],
    errors: list[str],
) -> None:
    """Move the plain layers' tensors of a state into the base, so that `load_state_dict` finds a converted model's."""
    base, forms = _base(model), _forms(model)
    places = [(f"{prefix}{form.site.name}.", form) for form in forms]
    names = [at + name for at, form in places for name in form.names()]
    if not any(name in state for name in names):
        return
    missing += [name for name in names if name not in state]
    try:
        neurons_now(base, forms)
        for layer, (at, form) in enumerate(places):
            rows, layout = base.entries[base.rows(layer)], base.layouts[layer]
            named = {name: state.pop(at + name) for name in form.names() if at + name in state}
            now = form.plain(rows, layout) if named else {}
            for name, tensor in named.items():
                if tensor.shape != now[name].shape:
                    shapes = f"{tuple(tensor.shape)} there and {tuple(now[name].shape)} here"
                    raise ValueError(f"size mismatch: {at}{name} has shape {shapes}")
            form.fill(rows, layout, named)
            own = model.get_submodule(f"{form.site.name}.{_OWN}").state_dict() if form.num_experts else {}
            for name in own.keys() & {name.removeprefix(at) for name in state}:
                state[f"{at}{_OWN}.{name}"] = state.pop(at + name)
    except ValueError as error:
        errors.append(str(error))
    state |= {f"{prefix}{KNOWLEDGE}.{name}": tensor for name, tensor in base.state_dict().items()}


def _look(model: nn.Module, _: object) -> None:
    if not isinstance(base := model.get_submodule(KNOWLEDGE), LayeredKnowledge):
        raise ValueError(
            f"a {type(base).__name__} lies around the entries, where the layers do not read it, so that it would learn "
            "nothing: adapt the plain model, to_ffn(model), merge the adapter, and convert the result"
        )


def _base(model: nn.Module) -> LayeredKnowledge:
    return cast(LayeredKnowledge, model.get_submodule(KNOWLEDGE))


def _forms(model: nn.Module) -> Sequence[PlainForm]:
    return cast("Sequence[PlainForm]", getattr(model, FORMS))


def _at(name: str) -> str:
    return f"{name}." if name else ""
