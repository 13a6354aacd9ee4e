"""The main job in order, each step announced before it starts and told when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attnflow._core.checks import preview
from attnflow._core.markup import percent, plural
from attnflow.cli import demo_job as main_job
from attnflow.cli.demo_job import TOLERANCE, Agreement, Audited, Derived, MainJob, Printed, Settings
from attnflow.models.evaluation import precision
from attnflow.order.hasse import label
from attnflow.tasks import Verification

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Told:
    """What a finished step has to say.

    Attributes:
        name: of the step.
        title: of the step, in words.
        ok: whether it came out as claimed.
        lines: the findings.
        seconds: wall time.
    """

    name: str
    title: str
    ok: bool
    lines: tuple[str, ...]
    seconds: float


class Steps:
    """Runs steps one after the other, and keeps their times."""

    def __init__(self, announce: Callable[[str], None], tell: Callable[[Told], None]) -> None:
        self._announce, self._tell = announce, tell
        self.seconds: dict[str, float] = {}

    def __call__(
        self, name: str, title: str, work: Callable[[], _Result], say: Callable[[_Result], tuple[bool, list[str]]]
    ) -> _Result:
        """Announce, work, tell; returns what the work returned."""
        self._announce(title)
        began = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - began
        ok, lines = say(result)
        self._tell(Told(name, title, ok, tuple(lines), self.seconds[name]))
        return result


def run_main_job(
    model_name: str,
    model: Any,
    token_ids: Sequence[int],
    token_texts: Sequence[str],
    steps: Steps,
    settings: Settings | None = None,
) -> MainJob:
    """Derive, prove, disprove, audit, verify.

    Args:
        model_name: for display.
        model: a causal language model of transformers, left as it was. The verification runs it in float64.
        token_ids: of the text; at least as many as the largest size in `settings`.
        token_texts: each token as text, for display.
        steps: what announces and tells.
        settings: sizes.

    Raises:
        ValueError: fewer tokens than the settings need.
    """
    sizes = Settings() if settings is None else settings
    if len(token_ids) < sizes.num_tokens:
        raise ValueError(f"the main job needs {sizes.num_tokens} tokens of text, got {len(token_ids)}")
    ids = list(token_ids)
    block, butterfly, printed = _derive(steps, ids, sizes)
    audited = steps(
        "audit",
        f"Audit {model_name}",
        lambda: main_job.audit_on(model, ids[: sizes.audit_tokens], sizes.audit_passes),
        _say_audited,
    )
    with precision(model, torch.float64):
        agreements = tuple(_agree(steps, model_name, model, derived) for derived in (block, butterfly))
        wrong = steps(
            "verify_printed",
            f"Run eq. 58, as printed, on {model_name}",
            lambda: main_job.printed_on(model, butterfly, printed),
            _say_wrong,
        )
    return MainJob(
        model_name,
        sum(parameter.numel() for parameter in model.parameters()),
        tuple(token_texts[: sizes.num_tokens]),
        sizes,
        (block, butterfly),
        printed,
        wrong,
        audited,
        agreements,
        steps.seconds,
    )


def _derive(steps: Steps, ids: list[int], sizes: Settings) -> tuple[Derived, Derived, Printed]:
    block = steps(
        "derive_block_two_stream",
        "Derive block two-stream attention from its tasks, and prove it",
        lambda: main_job.derive_block_two_stream(ids[: sizes.block_tokens], sizes.block),
        _say_derived,
    )
    butterfly = steps(
        "derive_butterfly",
        "Derive butterfly attention from its tasks, and prove it",
        lambda: main_job.derive_butterfly(ids[: sizes.butterfly_tokens]),
        _say_derived,
    )
    printed = steps(
        "printed",
        "Hold the paper's eq. 58, as printed, against the same tasks",
        lambda: main_job.disprove_printed(butterfly),
        _say_printed,
    )
    return block, butterfly, printed


def _agree(steps: Steps, model_name: str, model: Any, derived: Derived) -> Agreement:
    return steps(
        f"verify_{derived.name.replace(' ', '_').replace('-', '_')}",
        f"Run {derived.name} on {model_name}, merged and one by one",
        lambda: main_job.verify_on(model, derived),
        _say_agreement,
    )


def _say_derived(derived: Derived) -> tuple[bool, list[str]]:
    merged, check, control = derived.merged, derived.check, derived.control
    least = "the least possible" if merged.is_minimal else f"NOT minimal, {merged.lower_bound} would do"
    equal = "equal to" if derived.equals_closed_form else "DIFFERENT from"
    dense = "one layer lets everything flow" if merged.task.is_dense else "NOT dense"
    labels = plural(check.num_labels, "label")
    leaks = f"none of {labels} leaks, however many layers" if check.ok else f"{len(check.leaks)} of {labels} LEAK"
    lines = [
        f"{plural(len(derived.family), 'subtask')} of {derived.one_by_one:,} positions merge to {merged.task.size:,}",
        f"{plural(len(merged.nodes), 'node')} in the Hasse diagram: {least}",
        f"mask: {equal} {derived.formula}",
        f"depth: {dense}",
        f"leaks: {leaks}",
    ]
    lines += [f"leak: {leak}" for leak in check.leaks[:3]]
    if control.leaks:
        lines.append(f"control, all attention allowed: {len(control.leaks)} leaks, such as {control.leaks[0].route}")
    else:
        lines.append("control, all attention allowed: NO leak was found")
    return derived.ok, lines


def _say_printed(printed: Printed) -> tuple[bool, list[str]]:
    n = printed.num_tokens
    pairs = preview([f"{query}->{key}" for query, key in printed.missing_pairs], 3)
    return printed.ok, [
        f"wrong: {plural(len(printed.missing_pairs), 'pair')} (query->key) are missing: {pairs}",
        f"not embedded: subtasks {label(printed.lost_tasks)} of {n}, whose centres lack a neighbour",
    ]


def _say_audited(audited: Audited) -> tuple[bool, list[str]]:
    report, control = audited.report, audited.control
    tested = f"{percent(report.coverage)} of {report.forbidden:,} forbidden pairs"
    lines = [
        f"{'clean' if report.ok else 'LEAKS'}: {report.order}",
        f"{report.layers} layers, {len(report.modules)} module outputs, {report.forward_passes} passes, {tested}",
    ]
    lines += [f"leak: {violation}" for violation in report.violations[:3]]
    if control.violations:
        first = control.violations[0]
        lines.append(f"control, causal mask removed: {first.module} leaks {first.source} -> {first.target}")
    else:
        lines.append("control, causal mask removed: NOTHING was found")
    return audited.ok, lines


def _say_agreement(agreement: Agreement) -> tuple[bool, list[str]]:
    found = agreement.verification
    alone = sum(each.loss for each in found.tasks)
    return agreement.ok, [
        f"largest relative difference of outputs {found.output_difference:.1e}, of gradients "
        f"{found.gradient_difference or 0.0:.1e}",
        f"tolerance {TOLERANCE:.0e} (float64 rounds at 1e-16; deep models reach about 1e-12)",
        f"loss of the merged task {found.merged_loss:.10f}, of its subtasks {alone:.10f}",
    ]


def _say_wrong(found: Verification) -> tuple[bool, list[str]]:
    wrong = sum(each.output_difference > main_job.WRONG for each in found.tasks)
    return found.output_difference > main_job.WRONG, [
        f"outputs differ by up to {found.output_difference:.2f} of the largest logit, in {wrong} of {len(found.tasks)} "
        "subtasks"
    ]
