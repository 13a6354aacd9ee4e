"""`check_alone`: does each row, and each document of a packed row, give in its batch what it gives alone?"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.audit.batch.comparison import AloneComparison, Difference
from attnflow.audit.batch.cutting import BOUNDARY_NAME
from attnflow.audit.inputs import LOSS_ARGUMENTS, read, with_decoder_inputs
from attnflow.models.passes.evaluation import WithoutDropout, evaluating, unchanged
from attnflow.models.passes.processes import shared
from attnflow.models.subject import Loaded, Subject


def check_alone(
    model: nn.Module | Loaded,
    batch: str | Sequence[int] | Tensor | Mapping[str, Any],
    *,
    rows: int | None = None,
    documents: int | None = None,
    training: bool = False,
    seed: int = 0,
) -> AloneReport:
    """Run each row of a batch, and each document of a packed row, alone: its outputs must be those it has in the batch.

    Alone means a batch of one, without padding, masks of padding, position ids and boundaries of documents. So this
    finds padding that is read, rows and documents that mix, and positions that do not begin at 0. Where the model
    returns a loss per token or per row, it is compared, too. Any other loss depends on the outputs compared here.

    The rest of a batch is cut along: `token_type_ids`, masks of pairs, images with one entry per row. Whatever cannot
    be cut or compared is named, and then the report is not ok.

    Args:
        model: any module that takes token ids or embeddings, or a result of `af.load_model`.
        batch: the keyword arguments of a call, with or without labels, or token ids.
        rows: how many rows run alone, those with the most padding first; None for all.
        documents: how many documents of each row run alone, the last ones; None for all.
        training: run in training mode without dropout, where statistics of a batch mix its rows. Otherwise the model
            runs in eval mode.
        seed: seed of the random generators in every pass.

    Returns:
        A report; `print` it to see each difference with its likeliest cause, which small experiments decide.

    Raises:
        TypeError: the batch is neither a mapping nor token ids.
        ValueError: entries of the batch do not fit together.

    Cost: one pass of the batch and one short pass for each row or document. Each of the first four differences takes
    up to seven passes more. What differs runs again in float64, which takes a second copy of the weights.

    >>> import torch
    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    >>> check_alone(torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)), ids).verdict
    'same'
    """
    for name, value in (("rows", rows), ("documents", documents)):
        if value is not None:
            checks.integer(name, value, 1)
    subject = Subject.of(model).inside
    call, losses, left = bound(subject, batch if isinstance(batch, Mapping) else read(subject, batch).kwargs)
    with shared(subject.model, "audit.check_alone", call):
        report = compare_alone(subject, call, losses, rows=rows, documents=documents, training=training, seed=seed)
    named = tuple(entry for entry in left if BOUNDARY_NAME.search(entry[0]))
    notes = tuple(f"{name}: {why}" for name, why in left if (name, why) not in named)
    return replace(report, uncompared=named + report.uncompared, notes=notes + report.notes)


def bound(subject: Subject, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]]:
    """(the call that a batch makes, on the model's device; what it holds for the loss; what forward does not take)."""
    parameters = inspect.signature(subject.model.forward).parameters
    call, losses, left = dict[str, Any](), dict[str, Any](), list[tuple[str, str]]()
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in with_decoder_inputs(subject.model, batch).items():
        if name not in parameters and not hands_on:
            left.append((name, "the model's forward does not take it"))
            continue
        needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        part = losses if name in LOSS_ARGUMENTS and not needed else call
        part[name] = value.to(subject.device) if isinstance(value, Tensor) else value
    return call, losses, left


def compare_alone(
    subject: Subject,
    kwargs: Mapping[str, Any],
    losses: Mapping[str, Any] | None = None,
    *,
    rows: int | None = None,
    documents: int | None = None,
    training: bool = False,
    seed: int = 0,
    places: Sequence[tuple[int, Tensor]] | None = None,
) -> AloneReport:
    """Compare a call, with `losses` beside; `places` (row, columns) replace the documents that it declares."""
    began, model = time.perf_counter(), subject.model
    modes = [(module, module.training) for module in model.modules()]
    with unchanged(model), evaluating(model), WithoutDropout(), cast(Any, torch.compiler).set_stance("force_eager"):
        if training:
            model.train()
            for module, flag in modes if modes[0][1] else ():
                module.training = flag
        work = AloneComparison(subject, kwargs, seed)
        work.choose(rows, documents, places)
        if work.parts:
            work.begin(losses or {})
            work.compare()
        if work.compared and modes[0][1] and not training:
            work.look_in_training(modes)
    main = work.batch.axes[-1].length if work.batch.axes else 0
    return AloneReport(
        differences=tuple(work.differences),
        compared=work.compared,
        documents=work.documents,
        sequences=work.batch.size,
        positions=main,
        outputs=tuple(work.outputs),
        uncompared=tuple(work.uncompared.items()),
        notes=tuple(work.notes),
        forward_passes=work.passes,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, repr=False)
class AloneReport(Result):
    """The result of `check_alone`: whether rows and documents have the outputs in the batch that they have alone.

    Attributes:
        verdict: "same", "differs", or "nothing tested" where nothing could differ or something was not compared.
        ok: whether the verdict is "same".
        differences: one for each row or document that differs, in order.
        compared: number of rows and documents that ran alone and could be compared.
        documents: number of rows and documents that the batch has.
        sequences: number of rows of the batch.
        positions: number of columns of the batch.
        outputs: names of the outputs that were compared.
        uncompared: what was not compared, each with the reason.
        notes: remarks that do not weaken the verdict.
        forward_passes: number of forward passes that were run.
        seconds: wall time.
    """

    differences: tuple[Difference, ...]
    compared: int
    documents: int
    sequences: int
    positions: int
    outputs: tuple[str, ...]
    uncompared: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    forward_passes: int
    seconds: float

    @property
    def verdict(self) -> Literal["same", "differs", "nothing tested"]:
        """The verdict; never "same" if something was left out."""
        if self.differences:
            return "differs"
        return "same" if self.compared and not self.uncompared else "nothing tested"

    @property
    def ok(self) -> bool:
        """Whether rows or documents were compared, all of them have the same outputs, and nothing was left out."""
        return self.verdict == "same"

    def rows(self) -> list[dict[str, object]]:
        """One row for each difference."""
        return [vars(difference).copy() for difference in self.differences]

    def __repr__(self) -> str:
        return brief(self, self.verdict, self.differences)

    def __str__(self) -> str:
        verdict = "DIFFERS" if self.differences else self.verdict
        ran = f"{self.compared} of {plural(self.documents, 'document')} alone"
        cost = f"{self.forward_passes} forward passes in {self.seconds:.1f} s"
        lines = [f"{verdict}: {self.sequences} x {self.positions} positions, {ran}; {cost}"]
        lines += map(str, self.differences)
        lines += [f"compared: {', '.join(self.outputs)}"] if self.outputs else []
        lines += [f"not compared: {what}: {why}" for what, why in self.uncompared]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def brief(report: Any, head: str, findings: Sequence[object]) -> str:
    lines = [f"<{type(report).__name__} {head}; {report.sequences} x {report.positions}", *map(str, findings[:2])]
    lines += [f"and {len(findings) - 2} more; print(report)"] if len(findings) > 2 else []
    return "\n".join(lines) + ">"
