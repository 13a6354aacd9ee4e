"""Hooks that run a backbone on prefix trees, and replace calls with labels as a whole so that the head shares, too."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attnflow._core.checks import IntArray
from attnflow._core.markup import plural
from attnflow._core.per_thread import PerThread, untraced
from attnflow._core.results import Result
from attnflow.models.passes.evaluation import examined, examining, unchanged
from attnflow.models.passes.interception import FLEX, Interceptor, base_implementation, in_force
from attnflow.tasks.embedding import NO_ID, additive
from attnflow.tasks.hf.call_rows import (
    CACHE,
    PACKED,
    NotShared,
    flag,
    in_rows,
    named_arguments,
    other_arguments,
    read_batch,
    router_rows,
    text_config,
)
from attnflow.tasks.prefixes import Batch, PassCost, SharedPlan, plan

_NOTHING: Final = "its sequences share no prefix, or one so short that sharing is more work"
_STATES: Final = ("last_hidden_state", "hidden_states")
_ROUTERS: Final = "router_logits"  # of every token, for the loss that balances experts
_log: Final = logging.getLogger("attnflow.tasks")
_counting: Final = threading.Lock()

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class SharingReport(Result):
    """What a model's calls have shared so far.

    Attributes:
        calls: calls whose sequences could be shared; calls with a cache are not counted here.
        shared: calls that ran on prefix trees.
        tokens_before: tokens of all these calls, without padding.
        tokens_after: tokens that were run for them; calls that were not shared count in full.
        last_before: `tokens_before` of the last call.
        last_after: `tokens_after` of the last call.
        stock: for each reason, the number of calls that were not shared because of it.
    """

    calls: int = 0
    shared: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    last_before: int = 0
    last_after: int = 0
    stock: Mapping[str, int] = field(default_factory=lambda: dict[str, int]())

    def refused(self, reason: str) -> SharingReport:
        return replace(self, stock={**self.stock, reason: self.stock.get(reason, 0) + 1})

    def ran(self, before: int, after: int, shared: bool = True) -> SharingReport:
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
            f"{self.shared:,} of {plural(self.calls, 'call')} shared prefixes: {self.tokens_before:,} tokens -> "
            f"{self.tokens_after:,}; the last call {self.last_before:,} -> {self.last_after:,}"
        ]
        lines += [f"{plural(number, 'call')} not shared: {reason}" for reason, number in self.stock.items()]
        return "\n".join(lines)


@dataclass(eq=False)
class _Running:
    plan: SharedPlan | None = None  # of the call of the backbone
    outer: SharedPlan | None = None  # of the call of the model around it
    refused: str = ""  # why the call of the model around it must not be shared
    call: tuple[dict[str, Any], list[Tensor]] | None = None  # of the backbone, and the random generators before it
    positions: Tensor | None = None  # of the slots of the trees that the backbone runs on


@dataclass(eq=False)
class Calls:
    """The hooks, and what they need to know of the model; copies of it have their own. Examined calls stay stock."""

    windows: Mapping[str, int | None]  # how far back layers read, by name in `config.layer_types`; "" if all are alike
    cost: PassCost
    attention: Sequence[nn.Module]
    long_positions: bool = False
    with_labels: bool = True
    tables: Sequence[nn.Module] | None = None  # the position embeddings of a model that takes no `position_ids`
    counted: bool = False  # whether pads take no position where a call gives none
    always: bool = False  # share calls even where nothing is gained, as the check of a model needs
    unsupported: dict[str, str] = field(default_factory=lambda: dict[str, str]())  # why packed rows, ... are not shared
    report: SharingReport = field(default_factory=SharingReport)
    masks: dict[str, object] = field(default_factory=lambda: dict[str, object]())  # of the last call, by kind of layer
    _running: PerThread[_Running] = field(default_factory=lambda: PerThread(_Running))
    _settled: tuple[int, bool] | None = None  # hooks in training, and whether numbers are drawn to no effect

    def __post_init__(self) -> None:
        self._attention = self._interceptors()

    def _interceptors(self) -> list[list[Interceptor]]:
        return [in_force(module, "mask", "bias") for module in self.attention]

    @untraced
    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        running = self._running()
        running.outer, running.refused = None, ""
        if examined() and not self.always:
            return None
        named = named_arguments(model, args, kwargs)
        labels, ids = named.get("labels"), named.get("input_ids")
        if not isinstance(labels, Tensor) or not isinstance(ids, Tensor) or labels.shape != ids.shape or ids.ndim != 2:
            return None
        if named.get("fused_lm_head") is True:  # trl's, which runs the backbone without a cache
            named["use_cache"] = False
        try:
            batch = self._batch(named, model)
        except NotShared:
            return None  # the backbone will say why
        expected = labels.cpu().numpy()
        if (~batch.real[:, :-1] & (expected[:, 1:] != NO_ID)).any():  # as before a row that is padded on the left
            running.refused = (
                "a pad would predict a label (the first token of a sequence padded on the left): set that label to -100"
            )
            return None
        if not self.with_labels or other_arguments(named) or flag(named, model, "output_router_logits"):
            return None  # routers are balanced over the tokens of the rows, not over the labels' copies
        labelled = replace(batch, labels=expected)
        try:
            whole, alone = self._planned(model, labelled), self._planned(model, batch)
        except NotShared:
            return None
        others = alone.cost(self.cost_of(model)), self._cost_of_rows(model, batch)
        if whole.cost(self.cost_of(model)) > min(others) and not self.always:
            return None
        running.outer = whole
        named |= {"input_ids": _tensor(whole.ids, ids), "labels": _tensor(cast(IntArray, whole.labels), labels)}
        return (), {n: v for n, v in named.items() if n not in ("attention_mask", "position_ids", *PACKED)}

    @untraced
    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: object) -> object:
        running = self._running()
        outer, running.outer, running.refused = running.outer, None, ""
        return output if outer is None or output is None else in_rows(output, outer)

    @untraced
    def before_backbone(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        running = self._running()
        running.plan = running.call = running.positions = None
        if examined() and not self.always:
            return None
        named = named_arguments(model, args, kwargs)
        ids = named.get("input_ids")
        outer = running.outer
        if outer is not None and isinstance(ids, Tensor) and tuple(ids.shape) == outer.shape:
            chosen = outer
        else:
            if running.refused:
                return self._stock(model, running.refused, named)
            try:
                batch = self._batch(named, model)
                if extra := other_arguments(named):
                    raise NotShared(f"it had the argument {', '.join(extra)}")
                chosen = self._planned(model, batch)
                if not self.always and chosen.cost(self.cost_of(model)) >= self._cost_of_rows(model, batch):
                    raise NotShared(_NOTHING)
            except NotShared as reason:
                return self._stock(model, str(reason), named)
            running.plan = chosen
        _refuse_dropout(model)
        with _counting:
            self.report = self.report.ran(chosen.tokens, chosen.nodes)
        self.masks = masks = attention_masks(model, self.windows, chosen, cast(Tensor, ids).device)
        mask = next(iter(masks.values())) if len(masks) == 1 else masks
        named = {name: value for name, value in named.items() if name not in PACKED}
        named |= {
            "input_ids": _tensor(chosen.ids, cast(Tensor, ids)),
            "position_ids": _tensor(chosen.positions, cast(Tensor, ids)),
            "attention_mask": mask,
        }
        running.positions = named["position_ids"]
        if model.training and not self.always:
            running.call = named, _generators(cast(Tensor, ids).device)
        return (), named

    @untraced
    def after_backbone(self, model: nn.Module, args: tuple[Any, ...], output: object) -> object:
        running = self._running()
        chosen, call = running.plan, running.call
        running.plan = running.call = running.positions = None
        if call is not None and output is not None:
            self._refuse_random(model, *call)
        if chosen is None or output is None:
            return output
        values = {n: value for n, value in cast(Mapping[str, object], output).items() if value is not None}
        if unknown := sorted({*values} - {*_STATES, _ROUTERS}):
            raise RuntimeError(
                f"{type(model).__name__} returns {', '.join(unknown)}, which cannot be mapped back from shared "
                "prefixes: do not request it, or remove the handle of share_prefixes"
            )
        if _ROUTERS in values:
            values[_ROUTERS] = tuple(router_rows(one, chosen) for one in cast(Sequence[Tensor], values[_ROUTERS]))
        read = {name: value if name == _ROUTERS else in_rows(value, chosen) for name, value in values.items()}
        return cast(Any, type(output))(**read)

    @untraced
    def before_positions(self, table: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Give a table the positions of the trees' slots: flat, as some add a dimension."""
        positions = self._running().positions
        named = named_arguments(table, args, kwargs)
        return None if positions is None else ((), {**named, "position_ids": positions.flatten()})

    @untraced
    def after_positions(self, table: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        positions = self._running().positions
        return output if positions is None else output.reshape(*positions.shape, -1)

    def _refuse_random(self, model: nn.Module, call: Mapping[str, Any], before: Sequence[Tensor]) -> None:
        """Raise `ValueError` if two runs of a call differ; looked at once, and when hooks or draws change."""
        drawn = not all(map(torch.equal, before, _generators(call["input_ids"].device)))
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        if self._settled in ((hooks, drawn), (hooks, True)):
            return
        with unchanged(model), examining(model):
            first, second = (cast(Tensor, model(**call).last_hidden_state).detach() for _ in range(2))
        if not (torch.equal(first, second) if drawn else float((first - second).abs().max()) <= rounding(first)):
            raise ValueError(
                f"{type(model).__name__} draws random numbers in training (such as NEFTune's noise), so two runs of "
                "one call differ, and common prefixes would share their noise: switch it off, or remove the handle of "
                "share_prefixes"
            )
        self._settled = hooks, drawn

    def _batch(self, named: Mapping[str, Any], model: nn.Module) -> Batch:
        if not self.always and self._attention != self._interceptors():
            raise NotShared("a mask or a bias was attached or removed after share_prefixes: do that before")
        named = named if self.tables is None else {n: v for n, v in named.items() if n != "position_ids"}
        by_column = any(window is not None for window in self.windows.values())
        batch = read_batch(named, model, by_column, self.counted)
        asked = {"packed rows": batch.starts is not None, "router logits": flag(named, model, "output_router_logits")}
        for name, reason in self.unsupported.items() if not self.always else ():
            if reason and asked[name]:
                raise NotShared(f"{name}: {reason}")
        return batch

    def cost_of(self, model: nn.Module) -> PassCost:
        return PassCost(self.cost.token, 0.0, self.cost.head) if skips_pairs(model) else self.cost

    def _cost_of_rows(self, model: nn.Module, batch: Batch) -> float:
        cost = self.cost_of(model)
        return cost.rows(*batch.ids.shape) + cost.head * batch.ids.size

    def _planned(self, model: nn.Module, batch: Batch) -> SharedPlan:
        chosen = plan(batch, self.cost_of(model), one_row=skips_pairs(model))
        if chosen is None:
            raise NotShared("it holds only padding")
        alone = all(len(tree.node_of) == int(tree.node_of.max(initial=-1)) + 1 for tree in chosen.trees)
        if alone and not self.always:
            raise NotShared(_NOTHING)
        if self.long_positions and int(batch.positions.max()) != int(chosen.positions.max()):
            raise NotShared("its rotary embedding depends on the length of the batch, and only padding is that long")
        return chosen

    def _stock(self, model: nn.Module, reason: str, named: Mapping[str, Any]) -> None:
        with _counting:
            if reason not in self.report.stock and (reason != CACHE or (model.training and torch.is_grad_enabled())):
                _log.warning("share_prefixes: a call of the model was not shared: %s", reason)
            self.report = self.report.refused(reason)
            mask, ids = named.get("attention_mask"), named.get("input_ids")
            if reason != CACHE and isinstance(ids, Tensor):
                tokens = int((mask != 0).sum()) if isinstance(mask, Tensor) and mask.shape == ids.shape else ids.numel()
                self.report = self.report.ran(tokens, tokens, shared=False)


def attention_masks(
    model: nn.Module, windows: Mapping[str, int | None], chosen: SharedPlan, device: torch.device
) -> dict[str, object]:
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
    return _implementation(model) == FLEX


def _implementation(model: nn.Module) -> str:
    return base_implementation(cast(Any, text_config(model)))


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
                    f"{value:g} in training: all sequences of a prefix would drop the same features. Set it to 0 in "
                    "the config, or remove the handle"
                )


def _generators(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def rounding(states: Tensor) -> float:
    """How far equal computations may lie apart in the type of these states; models of float64 use float32 in parts."""
    eps = max(torch.finfo(states.dtype).eps, torch.finfo(torch.float32).eps)
    return min(1e3 * eps, 0.05) * max(float(states.abs().max()), 1.0)


def _tensor(array: IntArray, like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device, like.dtype)
