"""The steps of `attnflow demo`: two masks derived from their tasks, proved, and held against a model on real text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch

from attnflow import audit, masks, tasks
from attnflow._core.checks import preview
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import percent, plural
from attnflow._core.results import Result
from attnflow.masks import Mask
from attnflow.models.evaluation import precision
from attnflow.order.hasse import label
from attnflow.tasks import Task, Verification
from attnflow.tasks.families import butterfly_as_printed
from attnflow.tasks.merging import MergedTask, embedding

# Largest relative difference, in float64, at which a merged task counts as equal to its subtasks: rounding of a
# 30-layer model gives about 1e-12, one dropped pair of a mask 1e-3 and more.
TOLERANCE: Final = 1e-9
WRONG: Final = 1e-3  # relative difference of outputs above which a mask is wrong, not rounded


@dataclass(frozen=True)
class Step(Result):
    """One step: whether it came out as claimed, in words and in numbers."""

    name: str
    title: str
    ok: bool
    lines: tuple[str, ...]
    numbers: dict[str, Any]
    seconds: float = 0.0


@dataclass(frozen=True)
class Demo(Result):
    """All steps on one model."""

    model: str
    steps: tuple[Step, ...]

    @property
    def ok(self) -> bool:
        """Whether everything came out as claimed."""
        return all(step.ok for step in self.steps)


@dataclass(frozen=True)
class Sizes:
    """Tokens of each part; `block` is how many make a block, `passes` how many inputs the audit changes."""

    block_tokens: int = 96
    block: int = 16
    butterfly_tokens: int = 16
    audit_tokens: int = 64
    passes: int = 32


@dataclass(frozen=True)
class Objective:
    """A family of subtasks, the closed form of the mask that trains them, and what merging the family gives."""

    name: str
    family: Sequence[Task]
    formula: str
    closed_form: Mask
    merged: MergedTask

    def under(self, mask: Mask) -> Task:
        """The merged inputs and labels under another mask."""
        return Task(self.merged.task.inputs, self.merged.task.labels, mask)


class Outcome(NamedTuple):
    """Whether a step came out as claimed, in words and in numbers, and what a page shows of it."""

    ok: bool
    lines: Sequence[str]
    numbers: dict[str, Any]
    results: Sequence[object] = ()


def run(
    name: str,
    model: Any,
    token_ids: Sequence[int],
    sizes: Sizes | None = None,
    announce: Callable[[str], None] = lambda title: None,
    tell: Callable[[Step], None] = lambda step: None,
) -> tuple[Demo, list[Any]]:
    """(what came out, the results for a page): derives, proves, disproves, audits, verifies.

    The causal language model is left as it was; the verification runs it in float64. `announce` is called with the
    title of each step before it starts, `tell` with the step when it is done.
    """
    steps: list[Step] = []
    results: list[Any] = []
    for key, title, work in _plan(name, model, token_ids, sizes or Sizes()):
        announce(title)
        began = time.perf_counter()
        try:
            outcome = work()
        except UnsupportedArchitecture as error:  # a model that mixes positions beside its attention: a finding
            outcome = Outcome(False, [f"refused: {error}"], {})
        seconds = time.perf_counter() - began
        steps.append(Step(key, title, outcome.ok, tuple(outcome.lines), outcome.numbers, seconds))
        results += outcome.results
        tell(steps[-1])
    return Demo(name, tuple(steps)), results


def _plan(
    name: str, model: Any, token_ids: Sequence[int], size: Sizes
) -> Iterator[tuple[str, str, Callable[[], Outcome]]]:
    """(key, title, work) of each step."""
    needed = max(size.block_tokens, size.butterfly_tokens, size.audit_tokens)
    if len(token_ids) < needed:
        raise ValueError(f"the demo needs {needed} tokens of text, got {len(token_ids)}")
    block, butterfly = _objectives(token_ids, size)
    named = {"block_two_stream": block, "butterfly": butterfly}
    for key, each in named.items():
        title = f"Derive {each.name} attention from its tasks, and prove it"
        yield f"derive_{key}", title, lambda each=each: _prove(each)
    yield "printed", "Hold the paper's eq. 58, as printed, against the same tasks", lambda: _disprove(butterfly)
    yield "audit", f"Audit {name}", lambda: _audit(model, token_ids[: size.audit_tokens], size.passes)
    with precision(model, torch.float64):
        for key, each in named.items():
            title = f"Run {each.name} on {name}, merged and one by one"
            yield f"verify_{key}", title, lambda each=each: _verify(model, each)
        yield "verify_printed", f"Run eq. 58, as printed, on {name}", lambda: _verify_printed(model, butterfly)


def _objectives(token_ids: Sequence[int], size: Sizes) -> tuple[Objective, Objective]:
    blocks, n = size.block_tokens // size.block, size.butterfly_tokens
    family = tasks.block_two_stream(token_ids[: size.block_tokens], size.block)
    other = tasks.butterfly(token_ids[:n])
    formula = f"eq. 45, block_two_stream({blocks}, {size.block})"
    closed_form = masks.block_two_stream(blocks, size.block)
    return (
        Objective("block two-stream", family, formula, closed_form, tasks.merge(family)),
        Objective("butterfly", other, f"eq. 58 corrected, butterfly({n})", masks.butterfly(n), tasks.merge(other)),
    )


def _prove(objective: Objective) -> Outcome:
    """The least sequence, equal to the closed form, and no label leaks; with all attention allowed some must."""
    merged, check = objective.merged, tasks.check(objective.merged.task)
    control = tasks.check(objective.under(masks.full(merged.task.size)))
    numbers = {
        "num_subtasks": len(objective.family),
        "subtask_positions": sum(task.size for task in objective.family),
        "merged_positions": merged.task.size,
        "num_nodes": merged.num_nodes,
        "lower_bound": merged.lower_bound,
        "is_minimal": merged.is_minimal,
        "is_dense": merged.task.is_dense,
        "equals_closed_form": merged.task.mask == objective.closed_form,
        "leaks": len(check.leaks),
        "leaks_of_control": len(control.leaks),
    }
    labels = plural(check.num_labels, "label")
    leaks = f"none of {labels} leaks, however many layers" if check.ok else f"{len(check.leaks)} of {labels} LEAK"
    least = "the least possible" if merged.is_minimal else f"NOT minimal, {merged.lower_bound} would do"
    equal = "equal to" if numbers["equals_closed_form"] else "DIFFERENT from"
    such = "NO leak was found" if control.ok else f"{len(control.leaks)} leaks, such as {control.leaks[0].route}"
    lines = [
        f"{plural(len(objective.family), 'subtask')} of {numbers['subtask_positions']:,} positions merge to "
        f"{merged.task.size:,}",
        f"{plural(merged.num_nodes, 'node')} in the Hasse diagram: {least}",
        f"mask: {equal} {objective.formula}",
        f"depth: {'one layer lets everything flow' if merged.task.is_dense else 'NOT dense'}",
        f"leaks: {leaks}",
        *(f"leak: {leak}" for leak in check.leaks[:3]),
        f"control, all attention allowed: {such}",
    ]
    good = all(numbers[name] for name in ("is_minimal", "is_dense", "equals_closed_form"))
    return Outcome(good and check.ok and not control.ok, lines, numbers, [merged.task.flow, check])


def _disprove(butterfly: Objective) -> Outcome:
    """Eq. 58 as printed is one pair short for n - 1 of n subtasks."""
    n, right = len(butterfly.family), butterfly.closed_form
    printed = butterfly_as_printed(n)
    missing = right.difference(printed, limit=right.num_queries * right.num_keys)
    lost = sorted({node.task for node in embedding(butterfly.under(printed), butterfly.family).missing})
    pairs = preview([f"{query}->{key}" for query, key in missing], 3)
    lines = [
        f"wrong: {plural(len(missing), 'pair')} (query->key) are missing: {pairs}",
        f"not embedded: subtasks {label(tuple(lost))} of {n}, whose centres lack a neighbour",
    ]
    good = len(missing) == n - 1 and lost == list(range(n - 1))
    return Outcome(good, lines, {"missing_pairs": [list(pair) for pair in missing], "tasks_not_embedded": lost})


def _audit(model: Any, token_ids: Sequence[int], passes: int) -> Outcome:
    """The model is clean, and with its causal mask taken away it is not."""
    inputs, n = torch.tensor([list(token_ids)]), len(token_ids)
    report = audit.check(model, inputs, passes=passes)
    with masks.attach(model, masks.full(n), other_mixers="keep"):
        control = audit.check(model, inputs, order=masks.causal(n), passes=1)
    tested = f"{percent(report.coverage)} of {report.forbidden:,} forbidden pairs"
    first = control.violations[0] if control.violations else None
    lines = [
        f"{'clean' if report.ok else 'LEAKS'}: {report.order}",
        f"{report.layers} layers, {len(report.modules)} module outputs, {report.forward_passes} passes, {tested}",
        *(f"leak: {violation}" for violation in report.violations[:3]),
        "control, causal mask removed: "
        + (f"{first.module} leaks {first.source} -> {first.target}" if first else "NOTHING was found"),
    ]
    numbers = {"leaks": len(report.violations), "leaks_of_control": len(control.violations)}
    return Outcome(report.ok and not control.ok, lines, {**numbers, "coverage": report.coverage}, [report])


def _verify(model: Any, objective: Objective) -> Outcome:
    """Every subtask alone and the merged task once, forward and backward."""
    comparison = tasks.verify(objective.family, objective.merged, model)
    outputs, gradients = comparison.output_difference, comparison.gradient_difference or 0.0
    losses = comparison.loss_difference
    alone = sum(task.loss for task in comparison.tasks)
    lines = [
        f"largest relative difference of outputs {outputs:.1e}, of losses {losses:.1e}, of gradients {gradients:.1e}",
        f"tolerance {TOLERANCE:.0e} (float64 rounds at 1e-16; deep models reach about 1e-12)",
        f"loss of the merged task {comparison.merged_loss:.10f}, of its subtasks {alone:.10f}",
    ]
    return Outcome(max(outputs, losses, gradients) <= TOLERANCE, lines, _differences(comparison), [comparison])


def _verify_printed(model: Any, butterfly: Objective) -> Outcome:
    """What the printed mask does to the outputs of a real model."""
    printed = butterfly.under(butterfly_as_printed(len(butterfly.family)))
    comparison = tasks.verify(butterfly.family, replace(butterfly.merged, task=printed), model, gradients=False)
    wrong = sum(task.output_difference > WRONG for task in comparison.tasks)
    worst = comparison.output_difference
    line = f"outputs differ by up to {worst:.2f} of the largest logit, in {wrong} of {len(comparison.tasks)} subtasks"
    return Outcome(worst > WRONG, [line], _differences(comparison))


def _differences(comparison: Verification) -> dict[str, Any]:
    return {
        "output_difference": comparison.output_difference,
        "gradient_difference": comparison.gradient_difference,
        "merged_loss": comparison.merged_loss,
        "subtasks": [[task.output_difference, task.loss] for task in comparison.tasks],
    }
