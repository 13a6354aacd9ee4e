"""`guard`: audits the batches of a real training run, the first one and every n-th."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from attnflow._core.checks import integer
from attnflow._core.errors import AttnflowError, LeakFound, RankFailed, UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow._core.markup import plural
from attnflow._core.per_thread import untraced
from attnflow._core.threads import Turns
from attnflow.audit.audit import AuditOptions, audited
from attnflow.audit.batch.alone import compare_alone
from attnflow.audit.batch.cutting import attached_masks
from attnflow.audit.declared import Order
from attnflow.audit.inputs import LOSS_ARGUMENTS, Inputs, fresh, read, with_decoder_inputs
from attnflow.audit.packing import BOUNDARIES
from attnflow.audit.passes import on_ranks
from attnflow.audit.report import AuditReport, Violation
from attnflow.masks.batches import MaskGrid
from attnflow.masks.mask import Mask
from attnflow.models.passes.evaluation import (
    REFUSALS,
    WithoutDropout,
    evaluating,
    examined,
    examining,
    refusal,
    unchanged,
)
from attnflow.models.passes.processes import Peers, Processes, digest, on_device, sharded_over, together, world
from attnflow.models.subject import Loaded, Subject

_LOG: Final = logging.getLogger("attnflow.audit")
_counting: Final = threading.Lock()
_ALONE: Final = 2  # rows, and documents of each, that run alone


class Guard(Handle):
    """The handle of `guard`: audits calls of a model until it is removed.

    Attributes:
        model: the model.
        reports: one report for each audit so far.
        refusals: {number of the call: why it could not be audited}, with `on_leak="log"`.
        elsewhere: {rank: what its audits found}, on several processes.
    """

    def __init__(
        self, model: nn.Module, every: int | None, on_leak: str, order: Order, passes: int, sequences: int
    ) -> None:
        super().__init__(model)
        self.reports: list[AuditReport] = []
        self.refusals: dict[int, str] = {}
        self.elsewhere: dict[int, str] = {}
        size = sum(parameter.numel() for parameter in model.parameters())
        self._peers = Peers(f"{self.kind} of {size}, every {every}") if world() else None
        self._every, self._on_leak, self._passes, self._sequences = every, on_leak, passes, sequences
        self._order: Order = order
        self._calls, self._turns = 0, Turns()
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        )

    @property
    def ok(self) -> bool:
        fine = bool(self.reports) and not self.refusals and all(report.ok for report in self.reports)
        return fine and not self.elsewhere

    def results(self) -> Sequence[AuditReport]:
        """The reports of all audits so far."""
        return tuple(self.reports)

    @property
    def seconds(self) -> float:
        """Seconds that all audits took so far."""
        return sum(report.seconds for report in self.reports)

    @untraced
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if examined():  # a pass of an audit, or of another look at the model
            return
        if not self._turns.mine:  # else a call inside another
            with _counting:
                call, self._calls = self._calls, self._calls + 1
            if not call or (self._every is not None and call % self._every == 0):
                self._check(call, model, args, kwargs)
        self._turns.enter()

    @untraced
    def _after(self, model: nn.Module, args: object, output: object) -> None:
        if not examined():
            self._turns.leave()

    def _check(self, call: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Audit a call before it runs, while other threads wait: its passes watch modules and replace buffers."""
        found, raised = "", None
        try:
            with self._turns.alone():
                reports = self._on_all_ranks(model, args, kwargs)
            self._log(call, reports)
            leaks = [f"{of}{report.violations[0]}" for of, report in reports if report.violations]
            witness = next((report.violations[0] for _, report in reports if report.violations), None)
            found = next(iter(leaks), "")
            if witness is not None and self._on_leak == "raise":
                places = () if witness.source is None else (witness.source, witness.target)
                raised = LeakFound(found, places)
        except Exception as error:
            found, raised = f"call {call} could not be audited: {error}", error
            if not isinstance(error, (AttnflowError, *REFUSALS)):
                self._tell(call, found, None)
                raise
            if self._on_leak == "log":  # who wants a log does not want the run to end
                self.refusals[call] = str(error)
                _LOG.warning("%s", found)
        self._tell(call, found, raised)

    def _tell(self, call: int, found: str, raised: Exception | None) -> None:
        """Tell other ranks what was found here, and raise what was found anywhere."""
        told: dict[int, str] = {}
        absent: tuple[int, ...] = ()
        if self._peers is not None:
            told = self._peers.exchange(f"call {call}", found)
            told = {rank: words for rank, words in told.items() if words not in ("", found)}
            absent = self._peers.absent
            if self._peers.slow:
                _LOG.warning("call %d: ranks %s did not reach it, and are not waited for again", call, self._peers.slow)
        if raised is not None and self._on_leak == "raise":
            raise raised
        for rank, words in (told | dict.fromkeys(absent, "no guard")).items():
            self.elsewhere.setdefault(rank, words)
            _LOG.warning("rank %d: %s", rank, words)
        if told and self._on_leak == "raise":
            rank, words = next(iter(told.items()))
            raise RankFailed(f"rank {rank}: {words}")

    def _log(self, call: int, reports: Sequence[tuple[str, AuditReport]]) -> None:
        for of, report in reports:
            self.reports.append(report)
            cost = f"{report.forward_passes} passes in {report.seconds:.1f} s"
            if report.violations:
                _LOG.warning("call %d leaks (%s): %s%s", call, cost, of, report.violations[0])
            else:
                _LOG.info("call %d: %s%s (%s; %s)", call, of, report.verdict, report.order, cost)

    def _on_all_ranks(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, AuditReport]]:
        """The reports of a call: of its own batch, or of the batches of all ranks that run a sharded model together."""
        call = _named(model, args, kwargs)
        with together(sharded_over(model), "a guarded model") as processes:
            if processes is None:
                return [("", self._audit(model, call))]
            batches: dict[str, tuple[int, dict[str, Any]]] = {}  # each once, of the first rank that has it
            for rank, given in zip(processes.ranks, processes.gather(call), strict=True):
                batches.setdefault(digest(given), (rank, given))
            device = Subject(model).device
            return [
                (f"batch of rank {rank}: ", self._audit(model, on_device(given, device), processes))
                for rank, given in batches.values()
            ]

    def _audit(self, model: nn.Module, call: dict[str, Any], processes: Processes | None = None) -> AuditReport:
        masks = attached_masks(model)
        # Where each sequence of the batch has a mask of its own, none can be left out.
        sequences = None if any(mask.forms.shape[0] > 1 for mask in masks) else self._sequences
        order = self._order if sequences is None else _of_first(self._order, sequences)
        began = time.perf_counter()
        with unchanged(model), examining(model):
            batch = on_ranks(read(Subject(model), without_loss(model, call, sequences)), processes)
            report = _in_its_mode(batch, order, self._passes)
            if self._order is None and not report.violations and not masks:
                report = _with_rows_alone(batch, report)
        return replace(report, seconds=time.perf_counter() - began)

    def _restore(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _summary(self) -> str:
        name = type(self.model).__name__
        if not self._calls:
            return f"guard of {name}: no call yet"
        leaks = [f"LEAK: {report.violations[0]}" for report in self.reports if report.violations]
        untested = ["NOTHING TESTED" for report in self.reports if not report.ok]
        parts = [*leaks, *untested, "no leak" if self.reports else "NOTHING AUDITED"][:1]
        if self.reports:
            passes = sum(report.forward_passes for report in self.reports)
            audits = f"{len(self.reports)} of {plural(self._calls, 'call')} audited"
            parts.append(f"{audits} in {passes} forward passes, {self.seconds:.1f} s")
            parts.append(self.reports[-1].order)
        if self.refusals:
            refused = f"{plural(len(self.refusals), 'call')} could not be audited"
            parts.append(f"{refused}: {next(iter(self.refusals.values()))}")
        return f"guard of {name}: {'; '.join(parts)}"


def guard(
    model: nn.Module | Loaded,
    every: int | None = None,
    *,
    on_leak: str = "raise",
    order: Order = None,
    passes: int = 8,
    sequences: int = 2,
) -> Guard:
    """Audit the first batch of a training run before the model computes it, and every n-th batch after it.

    Put it around the run, `with af.audit.guard(model): trainer.train()`, or give `af.audit.GuardCallback()` to a
    `Trainer`. A leak stops the run before its first step. The audit restores training flags, random generators and
    gradients, so that each batch is computed exactly as without the guard.

    On several processes, put it on each rank. Each audits its own batch, and what one finds reaches all. The batches of
    ranks that hold one model together (FSDP2, tensor parallelism) are audited by all of them, one after the other.

    Args:
        model: any module that is called with token ids or embeddings, or a result of `af.load_model`.
        every: also audit each call whose number is a multiple of this; None for only the first call.
        on_leak: "raise" raises `LeakFound`; "log" sends a warning to the logger `attnflow.audit` and goes on. A call
            that cannot be audited is then logged as well, and listed in `refusals`.
        order: the order to test against; None for what the model declares for the batch; "mask" for the pairs of each
            batch's own `attention_mask`. Merged tasks need "mask": their position ids go back inside a document.
        passes: perturbations for each audit; fewer than for `check`, since a real batch seldom needs its coverage.
        sequences: how many rows of the batch are audited. Two are enough to show leaks between sequences.

    Returns:
        A handle with `.reports`, `.ok`, `.seconds` and `.remove()`; print it to see the audits and their cost.

    Raises:
        LeakFound: the model is called with a batch that leaks; the error's witness is (source, target).
        RankFailed: another rank found a leak, or could not audit its batch.
        UnsupportedArchitecture: the model is called and declares no order: give `order`.

    Cost: about passes + 6 forward passes over `sequences` rows for each audit, and up to five of parts of them that
    run alone. These are compared unless `order` is given or a mask is attached.
    """
    if every is not None:
        integer("every", every, 1)
    if on_leak not in ("raise", "log"):
        raise ValueError(f"on_leak must be 'raise' or 'log', got {on_leak!r}")
    integer("passes", passes, 1)
    integer("sequences", sequences, 1)
    return Guard(Subject.of(model).inside.model, every, on_leak, order, passes, sequences)


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(model.forward)
    call = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            call |= call.pop(name, {})
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:  # PEFT hands them on to the model inside
            call |= zip(Subject(Subject(model).transformer).parameters, call.pop(name, ()), strict=False)
    return call


def _in_its_mode(inputs: Inputs, order: Order, passes: int) -> AuditReport:
    model, why = inputs.model, ""
    if any(module.training for module in model.modules()):
        for module in model.modules():  # without gradients there is nothing to compute again
            if getattr(module, "gradient_checkpointing", None) is True:
                setattr(module, "gradient_checkpointing", False)  # noqa: B010 - modules declare no such attribute
        try:
            with WithoutDropout():
                report = audited(inputs, order, AuditOptions(passes=passes))
            state = next((violation for violation in report.violations if violation.kind == "state"), None)
            if state is None and not report.noise:
                return replace(report, notes=(*report.notes, "audited in training mode, without dropout"))
            why = f"equal calls differ, first in {state.module}" if state else "two equal calls differ"
        except (*REFUSALS, UnsupportedArchitecture) as error:
            why = f"it does not run without a loss ({refusal(error)})"
    with evaluating(model):
        report = audited(inputs, order, AuditOptions(passes=passes))
    notes = [f"audited in evaluation mode, as in training mode {why}: a leak there is not seen"] if why else []
    return replace(report, notes=(*report.notes, *notes))


def _with_rows_alone(inputs: Inputs, report: AuditReport) -> AuditReport:
    """The report with what a few rows and documents read that they do not have alone; other differences are notes."""
    try:
        alone = compare_alone(inputs.subject, inputs.kwargs, rows=_ALONE, documents=_ALONE)
    except (AttnflowError, *REFUSALS) as error:
        return replace(report, notes=(*report.notes, f"rows were not compared with themselves alone: {refusal(error)}"))
    read = [gap for gap in alone.differences if gap.cause.startswith("it reads")]
    violations = tuple(
        Violation("alone", None, gap.output, None, gap.column or 0, gap.difference, None, gap.row, why=gap.cause)
        for gap in read
    )
    notes = tuple(str(gap) for gap in alone.differences if gap not in read)
    passes = report.forward_passes + alone.forward_passes
    return replace(report, violations=violations, notes=(*report.notes, *notes), forward_passes=passes)


def without_loss(model: nn.Module, batch: Mapping[str, Any], sequences: int | None = None) -> dict[str, Any]:
    """A batch's model call without the arguments for the loss, on its first sequences or on all (None)."""
    call = with_decoder_inputs(model, batch)
    if call.get("fused_lm_head"):  # TRL's loss without logits: its forward needs labels, and runs without a cache
        call["use_cache"] = False
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor) and value.ndim > 1}
    size = next((len(value) for name, value in tensors.items() if name != "position_ids"), 0)
    whole = any("pixel" in name or "image" in name for name in tensors)  # images belong to the batch, not to its rows
    if sequences is None or whole or any(not _can_be_cut(value) for value in call.values()):
        sequences = size
    return {name: _rows(name, value, size, sequences) for name, value in call.items() if name not in LOSS_ARGUMENTS}


def _of_first(order: Order, sequences: int) -> Order:
    if isinstance(order, MaskGrid):
        return MaskGrid(order.masks[:sequences], order.num_queries, order.num_keys)
    if isinstance(order, Sequence) and not isinstance(order, str):
        return [cast(Mask | MaskGrid, _of_first(mask, sequences)) for mask in order]
    return order


def _can_be_cut(value: object) -> bool:
    layers = getattr(value, "layers", None) if hasattr(value, "get_seq_length") else None
    return all(hasattr(layer, "batch_select_indices") for layer in layers or ())


def _rows(name: str, value: Any, batch: int, sequences: int) -> Any:
    if isinstance(value, Mapping):
        return {key: _rows(str(key), item, batch, sequences) for key, item in cast(Mapping[Any, Any], value).items()}
    if hasattr(value, "batch_select_indices") and batch > sequences:
        value = fresh({"cache": value})["cache"]
        value.batch_select_indices(torch.arange(sequences))
        return value
    if isinstance(value, BlockMask):
        return value[:sequences] if value.shape[0] == batch > sequences else value
    if not isinstance(value, Tensor) or not value.ndim or name in BOUNDARIES:
        return value
    if name == "position_ids" and value.ndim == 3 and value.shape[1] == batch:  # of time, height and width
        return value[:, :sequences]
    return value[:sequences] if len(value) == batch else value
