"""Calls of a model whose sequences begin alike: two hooks on its backbone, and two on the model around it.

The backbone runs on prefix trees, and its states are read back to the rows. A call with labels is replaced as a whole,
so that the head, too, runs once for each token.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from attnflow._core.checks import IntArray
from attnflow._core.results import Result
from attnflow.models.interception import FLEX, base_implementation
from attnflow.tasks.embedding import NO_ID, additive
from attnflow.tasks.prefixes import Batch, Cost, Plan, plan

_CACHE: Final = "a cache was in use, or asked for (pass use_cache=False)"
_NOTHING: Final = "its rows do not begin alike, or by so little that sharing is more work"
_ROWS: Final = {"input_ids", "attention_mask", "position_ids", "labels"}
_FLAGS: Final = {"use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits"}
_PLAIN: Final = {*_ROWS, *_FLAGS, "num_items_in_batch", "fused_lm_head"}
_STATES: Final = ("last_hidden_state", "hidden_states")
_log: Final = logging.getLogger("attnflow.tasks")

_F = TypeVar("_F", bound=Callable[..., object])

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class SharingReport(Result):
    """What was shared in the calls of a model so far.

    Attributes:
        calls: calls whose sequences could have been shared; calls with a cache are not counted here.
        shared: calls that ran on trees.
        tokens_before: real tokens of all these calls, padding not counted.
        tokens_after: tokens that were run for them; those of calls that were not shared count in full.
        last_before: the same of the last call.
        last_after: the same of the last call.
        stock: reason -> number of calls that were not shared for it.
    """

    calls: int = 0
    shared: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    last_before: int = 0
    last_after: int = 0
    stock: Mapping[str, int] = field(default_factory=lambda: dict[str, int]())

    def refused(self, reason: str) -> SharingReport:
        """With one more call that was not shared for this reason."""
        return replace(self, stock={**self.stock, reason: self.stock.get(reason, 0) + 1})

    def ran(self, before: int, after: int, shared: bool = True) -> SharingReport:
        """With one more call of so many tokens."""
        return SharingReport(
            self.calls + 1,
            self.shared + shared,
            self.tokens_before + before,
            self.tokens_after + after,
            before,
            after,
            self.stock,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.tokens_before:,} tokens -> {self.tokens_after:,} in {self.calls:,} calls, {self.shared:,} of them "
            f"shared; the last {self.last_before:,} -> {self.last_after:,}"
        ]
        lines += [f"{number:,} calls were not shared: {reason}" for reason, number in self.stock.items()]
        return "\n".join(lines)


def _untraced(function: _F) -> _F:
    """Run a function outside of a compiled model, since it uses numpy."""
    return cast(_F, torch.compiler.disable(function))


class NotShared(Exception):
    """Why a call is not shared; its text is what the report counts."""


@dataclass(eq=False)
class Calls:
    """The hooks, and what they need to know of the model; copies of the model have their own.

    `windows` is how far back attention reads, by name in `config.layer_types` ("" if all layers are alike). With
    `always` calls are shared even where nothing is gained, as the check of a model needs.
    """

    windows: Mapping[str, int | None]
    cost: Cost
    long_positions: bool = False
    with_labels: bool = True
    always: bool = False
    report: SharingReport = field(default_factory=SharingReport)
    masks: dict[str, object] = field(default_factory=lambda: dict[str, object]())  # of the last call, by kind of layer
    _plan: Plan | None = None  # of the call of the backbone that is under way
    _outer: Plan | None = None  # of the call of the model around it
    _refused: str = ""  # why the call of the model around it must not be shared

    @_untraced
    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Replace a call with labels as a whole, where that is less work than sharing in the backbone alone."""
        self._outer, self._refused = None, ""
        named = _named(model, args, kwargs)
        labels, ids = named.get("labels"), named.get("input_ids")
        if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.shape != ids.shape or ids.ndim != 2:
            return None
        if named.get("fused_lm_head") is True:  # trl's, which runs the backbone without a cache
            named["use_cache"] = False
        try:
            batch = _batch(named, model, by_column=self._by_column)
        except NotShared:
            return None  # the backbone will say why
        expected = labels.cpu().numpy()
        if (~batch.real[:, :-1] & (expected[:, 1:] != NO_ID)).any():  # as before a row that is padded on the left
            self._refused = "a label is predicted by a pad (the first token of a row padded on the left): mark it -100"
            return None
        if not self.with_labels or _given(named) or named.get("return_dict") is False:
            return None
        labelled = Batch(batch.ids, batch.real, batch.positions, expected, batch.by_column)
        try:
            whole, alone = self._planned(model, labelled), self._planned(model, batch)
        except NotShared:
            return None
        others = alone.cost(self._cost(model)), self._cost_of_rows(model, batch)
        if whole.cost(self._cost(model)) > min(others) and not self.always:
            return None
        self._outer = whole
        named |= {"input_ids": _tensor(whole.ids, ids), "labels": _tensor(cast(IntArray, whole.labels), labels)}
        return (), {name: v for name, v in named.items() if name not in ("attention_mask", "position_ids")}

    @_untraced
    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: object) -> object:
        """Read outputs for trees back to the rows."""
        outer, self._outer, self._refused = self._outer, None, ""
        return output if outer is None or output is None else _replaced(output, outer)

    @_untraced
    def before_backbone(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Replace the rows of a call by prefix trees."""
        self._plan = None
        named = _named(model, args, kwargs)
        ids = named.get("input_ids")
        outer = self._outer
        if outer is not None and isinstance(ids, Tensor) and tuple(ids.shape) == outer.shape:
            chosen = outer
        else:
            if self._refused:
                return self._stock(model, self._refused, named)
            try:
                batch = _batch(named, model, by_column=self._by_column)
                if extra := _given(named):
                    raise NotShared(f"it was given {', '.join(extra)}")
                chosen = self._planned(model, batch)
                if not self.always and chosen.cost(self._cost(model)) >= self._cost_of_rows(model, batch):
                    raise NotShared(_NOTHING)
            except NotShared as reason:
                return self._stock(model, str(reason), named)
            self._plan = chosen
        _refuse_dropout(model)
        self.report = self.report.ran(chosen.tokens, chosen.nodes)
        self.masks = attention_masks(model, self.windows, chosen, cast(Tensor, ids).device)
        mask = next(iter(self.masks.values())) if len(self.masks) == 1 else self.masks
        named |= {
            "input_ids": _tensor(chosen.ids, cast(Tensor, ids)),
            "position_ids": _tensor(chosen.positions, cast(Tensor, ids)),
            "attention_mask": mask,
        }
        return (), named

    @_untraced
    def after_backbone(self, model: nn.Module, args: tuple[Any, ...], output: object) -> object:
        """Read states of trees back to the rows."""
        chosen, self._plan = self._plan, None
        if chosen is None or output is None:
            return output
        names = {name for name, value in cast(Mapping[str, object], output).items() if value is not None}
        if names - {*_STATES}:
            raise RuntimeError(
                f"{type(model).__name__} puts out {', '.join(sorted(names - {*_STATES}))}, which cannot be read back "
                "from shared prefixes; ask for less, or remove the handle of share_prefixes"
            )
        return _replaced(output, chosen)

    @property
    def _by_column(self) -> bool:
        return any(window is not None for window in self.windows.values())

    def _cost(self, model: nn.Module) -> Cost:
        return Cost(self.cost.token, 0.0, self.cost.head) if skips_pairs(model) else self.cost

    def _cost_of_rows(self, model: nn.Module, batch: Batch) -> float:
        cost = self._cost(model)
        return cost.rows(*batch.ids.shape) + cost.head * batch.ids.size

    def _planned(self, model: nn.Module, batch: Batch) -> Plan:
        """The trees of a batch; raises `NotShared` if there is nothing to share."""
        chosen = plan(batch, self._cost(model), one_row=skips_pairs(model))
        if chosen is None:
            raise NotShared("there are no tokens but padding")
        alone = all(len(tree.node_of) == int(tree.node_of.max(initial=-1)) + 1 for tree in chosen.trees)
        if alone and not self.always:
            raise NotShared(_NOTHING)
        if self.long_positions and int(batch.positions.max()) != int(chosen.positions.max()):
            raise NotShared("its rotary embedding depends on the length of the batch, which padding alone makes")
        return chosen

    def _stock(self, model: nn.Module, reason: str, named: Mapping[str, Any]) -> None:
        """Run a call without sharing, and count why."""
        if reason not in self.report.stock and (reason != _CACHE or (model.training and torch.is_grad_enabled())):
            _log.warning("share_prefixes: a call of the model was not shared: %s", reason)
        self.report = self.report.refused(reason)
        mask, ids = named.get("attention_mask"), named.get("input_ids")
        if reason != _CACHE and isinstance(ids, Tensor):
            tokens = int((mask != 0).sum()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()
            self.report = self.report.ran(tokens, tokens, shared=False)


def attention_masks(
    model: nn.Module, windows: Mapping[str, int | None], chosen: Plan, device: torch.device
) -> dict[str, object]:
    """The attention_mask that the backbone takes, for each kind of attention layer (`Calls.windows`)."""
    implementation = _implementation(model)
    if implementation == FLEX:
        return {name: chosen.mask(window).block_mask(device=device) for name, window in windows.items()}
    masks: dict[str, object] = {}
    dtype = next(cast(Any, model).get_input_embeddings().parameters()).dtype
    for name, window in windows.items():
        allowed = torch.from_numpy(chosen.allowed(window))[:, None].to(device)
        masks[name] = additive(allowed, dtype) if implementation == "eager" else allowed
    return masks


def skips_pairs(model: nn.Module) -> bool:
    """Whether the model's attention skips the pairs that a mask forbids."""
    return _implementation(model) == FLEX


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in inspect.signature(model.forward).parameters if name != "self"]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _given(named: Mapping[str, Any]) -> list[str]:
    """The arguments that hold something which may refer to the rows."""

    def nothing(value: object) -> bool:
        return value is None or value is False or value == 0 if not isinstance(value, Tensor) else value.ndim == 0

    return sorted(name for name, value in named.items() if name not in _PLAIN and not nothing(value))


def _batch(named: Mapping[str, Any], model: nn.Module, by_column: bool) -> Batch:
    """The sequences of a call; raises `NotShared` if none can be shared."""
    config = cast(Any, _config(model))
    if named.get("past_key_values") is not None or _flag(named, config, "use_cache"):
        raise NotShared(_CACHE)
    ids, mask, positions = (named.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise NotShared("it was given no input_ids [batch, tokens]")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        raise NotShared("it was given an attention_mask that is not [batch, tokens]")
    for name in ("output_attentions", "output_router_logits"):
        if _flag(named, config, name):
            raise NotShared(f"{name} was asked for")
    if named.get("return_dict") is False:
        raise NotShared("a tuple was asked for (return_dict=False)")
    real = np.ones(tuple(ids.shape), np.bool_) if mask is None else (mask != 0).cpu().numpy()
    if positions is None:
        placed = np.broadcast_to(np.arange(ids.shape[1]), tuple(ids.shape))
    elif isinstance(positions, Tensor) and positions.ndim == 2 and positions.shape[1] == ids.shape[1]:
        placed = np.broadcast_to(positions.cpu().numpy().astype(np.int64), tuple(ids.shape))
        if mask is None and (np.diff(placed, axis=1) != 1).any():
            raise NotShared("its position_ids start again, so that its rows are packed sequences")
    else:
        raise NotShared("it was given position_ids that are not [batch, tokens]")
    given_columns = by_column and positions is not None
    return Batch(ids.cpu().numpy().astype(np.int64), real, placed, by_column=given_columns)


def _flag(named: Mapping[str, Any], config: object, name: str) -> bool:
    value = named.get(name)
    return bool(getattr(config, name, False)) if value is None else bool(value)


def _config(model: nn.Module) -> object:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text() if callable(text) else config


def _implementation(model: nn.Module) -> str:
    return base_implementation(cast(Any, _config(model)))


def _refuse_dropout(model: nn.Module) -> None:
    """Raise `ValueError` while dropout is active, which would drop a shared token in all rows at once."""
    for name, module in model.named_modules() if model.training else ():
        if not module.training:
            continue
        values = {"p": module.p} if isinstance(module, nn.Dropout) else vars(module)
        for key, value in values.items():
            random = isinstance(module, nn.Dropout) or "drop" in key or "jitter" in key
            if random and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"share_prefixes needs a model without dropout, but {name or type(model).__name__} has {key} = "
                    f"{value:g} while it is trained: rows would drop the same features together; set it to 0 in the "
                    "config, or remove the handle"
                )


def _tensor(array: IntArray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, like.dtype)


def _replaced(output: object, chosen: Plan) -> object:
    """The output with its tensors read back to the rows."""
    if isinstance(output, Tensor):
        return to_rows(output, chosen)
    if isinstance(output, tuple | list):
        parts = cast("list[object]", output)
        return type(output)(_replaced(one, chosen) for one in parts)
    if isinstance(output, Mapping):
        values = {name: _replaced(v, chosen) for name, v in cast(Mapping[str, object], output).items()}
        return values if type(output) is dict else cast(Any, type(output))(**values)
    return output


def to_rows(tensor: Tensor, chosen: Plan) -> Tensor:
    """The values in the trees' slots, at the tokens of the rows (0 at pads) or at their labels."""
    if tensor.ndim == 0:
        return tensor
    rows, width = chosen.shape
    if tuple(tensor.shape[:2]) == (rows, width):
        place = chosen.place
    elif chosen.label_place is not None and tuple(tensor.shape[:2]) == (rows, width - 1):
        place = chosen.label_place
    else:
        raise RuntimeError(
            f"an output of shape {tuple(tensor.shape)} cannot be read back to the rows of the batch: neither [{rows}, "
            f"{width}, ...] nor one for each label; remove the handle of share_prefixes for this call"
        )
    index = torch.from_numpy(place).to(tensor.device)
    flat = tensor.reshape(rows * tensor.shape[1], *tensor.shape[2:])
    wide = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) and flat.requires_grad else flat
    read = wide.index_select(0, index.clamp(min=0).flatten()).to(flat.dtype)  # gradients of the rows add up in float32
    read = read.reshape(*place.shape, *tensor.shape[2:])
    pads = index < 0
    return read.masked_fill(pads.reshape(*place.shape, *[1] * (tensor.ndim - 2)), 0) if bool(pads.any()) else read
