"""`check_batch` and `check_loss`: do labels, documents, masks and positions of a batch fit, and what is trained?

With a model the batch is run: its loss is read off its own gradient, and each row and document is compared with the
same one alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

from torch import nn

from attnflow._core.errors import AttnflowError
from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.audit.batch import loss as losses
from attnflow.audit.batch.alone import bound, brief, compare_alone
from attnflow.audit.batch.checks import Checks
from attnflow.audit.batch.gradients import Targets
from attnflow.audit.batch.labels import Findings, Mistake, read_labels
from attnflow.audit.batch.loss import Trained
from attnflow.audit.batch.ranks import RankedLoss
from attnflow.audit.batch.reading import IGNORED, WEIGHTS, BatchReading, Family, family_of, model_of, read_batch
from attnflow.audit.batch.rows import DataRows, as_batch
from attnflow.audit.batch.targets import LossUnread, call_of, least_width, read_targets, run_model
from attnflow.audit.packing import Documents
from attnflow.audit.shards import Shard
from attnflow.models.passes.evaluation import REFUSALS, refusal
from attnflow.models.passes.processes import shared, together, world
from attnflow.models.subject import Loaded, Subject

Verdict = Literal["no mistake", "mistakes", "nothing tested"]
_SHOWN: Final = 16  # runs of trained positions in what a report prints


def check_batch(
    batch: Mapping[str, Any] | DataRows,
    model_or_config: Any = None,
    *,
    shift: int | None = None,
    causal: bool | None = None,
    documents: Documents = None,
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
    names: Mapping[str, str] | None = None,
) -> BatchReport:
    """Check one batch of a data loader for mistakes in labels, documents, masks and positions.

    - Labels: the position that predicts a label can read it. Labels are shifted twice or misplaced. A label is
      predicted from another document or lies on padding. An answer has no labels, or none on its end token.
    - Documents and ids: the mask connects documents that positions or lengths separate; two entries disagree on where a
      document begins; an id lies outside the vocabulary.
    - With a model, its loss is run and read off (`check_loss`), and each row and document is run alone (`check_alone`).

    `untested` lists what keeps the batch from being called clean: a model's loss that could not be read, or an entry of
    unknown form that may give documents, positions or losses. `unchecked` lists smaller checks.

    Args:
        batch: the collator's output: `input_ids`, `labels` and the model's other arguments. Labels may come from
            transformers, TRL or `af.tasks.Collator`. `completion_mask` or `assistant_masks` mark the answers.
            Documents may be numbered (`seq_idx`, `document_ids`, `segment_ids`) or given by lengths or boundaries. Rows
            are padded on the right: a list of them is read whole, of a dataset the first 8. Rows of messages or text
            need what `af.load_model` returned.
        model_or_config: the model, a result of `af.load_model`, or the configuration. It tells whether the loss shifts
            labels, whether attention is causal, and which ids pad and end. A model also runs. Without it, a batch that
            looks like one of a causal language model is taken as such, and the report says so.
        shift: the loss takes label i from position i - shift; None for what the model's class or its loss says.
        causal: whether positions read only what is before them.
        documents: their numbers [batch, n], lengths or boundaries, an entry that holds these, or "rows" if each is one.
        eos: ids that end an answer.
        pad: id of padding.
        names: {name in the batch: name that is known here}, such as {"x": "input_ids", "y": "labels"}.

    Raises:
        TypeError: the batch is neither a mapping nor rows, ids or labels are not integers, or `model_or_config` is
            neither.
        ValueError: there are neither ids nor labels, shapes do not fit, or a row cannot be read.

    Cost: milliseconds; with a mask of pairs its closure, about that of `af.order.analyze`. With a model about three
    forward passes of the batch and part of a backward pass.

    >>> import torch
    >>> ids = torch.tensor([[5, 6, 7, 8, 9]])
    >>> print(check_batch({"input_ids": ids, "labels": ids.roll(1, 1)}).mistakes[0].kind)
    readable
    """
    model, tokenizer = model_of(model_or_config), None
    if isinstance(model_or_config, Loaded):
        tokenizer = model_or_config.tokenizer
    given = _given(shift, causal, eos, pad)
    family = family_of(model)
    if not isinstance(batch, Mapping):
        limit = None if isinstance(batch, list | tuple) else 8
        rows = as_batch(batch, tokenizer, replace(family, **given), limit=limit, rename=names)
        documents = rows.documents if documents is None else documents
        report = check_batch(rows.tensors, model, shift=shift, causal=causal, documents=documents, eos=eos, pad=pad)
        return replace(report, notes=(*rows.notes, *report.notes))
    batch = _renamed(batch, names, documents)
    if batch.get("shift_labels") is not None and family.shift == 1:
        family = replace(family, shift=0)  # transformers' losses take them as they stand
    family, findings = replace(family, **given), Findings()
    reading = read_batch(batch, family, documents)
    if not isinstance(model, nn.Module):
        return _report(batch, family, reading, None, findings)
    subject = Subject(model)
    with shared(model, "audit.check_batch", batch):
        loss = _loss_of_model(subject, batch, reading, findings)
        alone = _rows_alone(subject, batch, reading, findings)
    return _report(batch, family, reading, loss, findings, separate=alone)


def check_loss(
    model_or_step: nn.Module | Loaded | Callable[[Any], object],
    batch: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    model_or_config: Any = None,
    *,
    documents: Documents = None,
    eos: int | Sequence[int] | None = None,
    pad: int | None = None,
    names: Mapping[str, str] | None = None,
    equal_weights: bool = True,
    shard: Shard = None,
) -> BatchReport:
    """Read off a loss what it trains: which token at each position, with what weight, and what else it adds.

    The gradient of cross-entropy by the logits is weight x (softmax - target), whatever code computes it. One pass so
    shows shifts, masks, weights and normalisation, label smoothing, temperatures and a z-loss. They are compared with
    the batch's labels, masks and documents: labels shifted twice or not at all, prompts that are trained, labels that
    are not, rows that run together, tokens that count differently. What the logits do not explain is named as well.

    With `shard=` every rank of a launch calls this with the same batch. Each reads its own loss, and all get the report
    of the whole batch: a label that is lost where shards meet, or taken from the wrong rank, and ranks whose tokens
    count differently. A note tells when ranks draw the same random numbers, and so the same dropout.

    Args:
        model_or_step: a model whose output has a `loss`, or a function of the batch that returns a loss (a tensor, a
            tuple that begins with it, or an output that has it) or calls backward. It must not update parameters.
        batch: one batch, or a list of the micro-batches that one update adds up.
        model_or_config: the model of a function whose loss forms no logits, or what `check_batch` takes.
        documents: as for `check_batch`; so are `eos`, `pad` and `names`.
        equal_weights: whether tokens of different weight are a mistake, as they are not in a preference loss.
        shard: the positions that this rank's logits have, as for `check`: "contiguous", "zigzag", a slice, indices, or
            (rows, positions). The step gets the whole batch and takes its part of it. It returns None on a rank that
            has no loss, such as the first stage of a pipeline. None reads the loss of this process alone.

    Returns:
        The report of `check_batch`; `loss` says what the loss is made of, `trained` what each position learns.

    Raises:
        ValueError: the loss has no gradients, is not one number, or is made of no logits and no hidden states; or the
            function updates parameters.
        RankFailed: the step failed on some ranks, or a rank did not call `check_loss`.

    Cost: one forward pass, and the backward pass down to the logits. Parameters, gradients, buffers and generators
    are as before.
    """
    parts = [batch] if isinstance(batch, Mapping) else list(batch)
    if not parts:
        raise ValueError("expected a batch, or a list of micro-batches, got an empty list")
    step = model_of(model_or_step)
    if not callable(step):
        raise TypeError(f"expected a model or a function of the batch, got {type(step).__name__}")
    ours = isinstance(step, nn.Module)
    model = model_of(step if ours and model_or_config is None else model_or_config)
    call = partial(run_model, Subject(step)) if ours else step
    loss_model = model if isinstance(model, nn.Module) else None
    reports, read = list[BatchReport](), list[Targets]()
    with together(() if shard is None else world(), "audit.check_loss") as processes:
        ranked = RankedLoss(processes, shard)
        for part in parts:
            entries = _renamed(part, names, documents)
            try:
                called = ranked.read(call, part, least_width(entries), loss_model)
            except LossUnread as error:
                raise ValueError(f"the loss cannot be read: {error}") from error
            family = replace(called if model is None else family_of(model), **_given(None, None, eos, pad))
            if not ours:  # the function's, whatever the model's own loss does
                family = replace(family, shift=None)
            if not family.transformers or not ours:
                family = replace(family, causal=family.causal is not False)
            reading, findings = read_batch(entries, family, documents), Findings()
            if family.classes:
                findings.untested.append(("the loss", "its labels are classes, not tokens"))
            loss = None if family.classes else ranked.placed(reading, findings)
            read += [] if loss is None else [loss]
            reports.append(_report(entries, family, reading, loss, findings, equal_weights))
    whole = reports[0] if len(reports) == 1 else _together(reports)
    message = losses.between_batches(read) if len(read) > 1 and equal_weights else None
    mistakes = () if message is None else (Mistake("weights", 0, 0, 1, message),)
    return replace(whole, mistakes=(*whole.mistakes, *mistakes))


@dataclass(frozen=True, repr=False)
class BatchReport(Result):
    """The result of `check_batch` and `check_loss`: whether labels, documents, masks, positions and loss fit together.

    Attributes:
        mistakes: everything that is wrong.
        family: how the loss takes labels, in words, and whether that was seen, read from a class, or assumed.
        order: the information flow that the batch allows, in words.
        checked: the checks that were made and found nothing, in words.
        untested: what keeps the batch from being called clean, each with the reason.
        unchecked: smaller checks that could not be made, each with the reason.
        notes: remarks that are not mistakes.
        sequences: number of rows of the batch.
        positions: number of columns of the batch.
        labels: number of labels that count.
        documents: number of documents in all rows; equal to the rows if nothing is packed.
        loss: what the loss that was run is made of, a line for each kind; empty if none was run.
        trained: what each position learns, neighbours of one row together.
    """

    mistakes: tuple[Mistake, ...]
    family: str
    order: str
    checked: tuple[str, ...]
    untested: tuple[tuple[str, str], ...]
    unchecked: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    sequences: int
    positions: int
    labels: int
    documents: int
    loss: tuple[str, ...] = ()
    trained: tuple[Trained, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict; it is never "no mistake" if something decisive was not read or not run (`untested`)."""
        if self.mistakes:
            return "mistakes"
        return "no mistake" if self.checked and not self.untested else "nothing tested"

    @property
    def ok(self) -> bool:
        """Whether the verdict is "no mistake"; read `unchecked`, too."""
        return self.verdict == "no mistake"

    def rows(self) -> list[dict[str, object]]:
        """One row for each mistake."""
        return [vars(mistake).copy() for mistake in self.mistakes]

    def __repr__(self) -> str:
        return brief(self, self._head(), self.mistakes)

    def __str__(self) -> str:
        size = f"{self.sequences} x {self.positions} positions"
        packed = f"{plural(self.documents, 'document')}, {plural(self.labels, 'label')}"
        lines = [f"{self._head()}: {size}, {packed}; {self.family}; {self.order}", *map(str, self.mistakes)]
        lines += [f"not tested: {what}: {why}" for what, why in self.untested]
        lines += [f"loss: {term}" for term in (*self.loss, *self.trained[:_SHOWN])]
        lines += [f"loss: and {len(self.trained) - _SHOWN} more"] if len(self.trained) > _SHOWN else []
        lines += [f"checked: {what}" for what in self.checked]
        lines += [f"not checked: {what}: {why}" for what, why in self.unchecked]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _head(self) -> str:
        return plural(len(self.mistakes), "mistake").upper() if self.mistakes else self.verdict


def _report(
    batch: Mapping[str, Any],
    family: Family,
    reading: BatchReading,
    loss: Targets | None,
    findings: Findings,
    equal: bool = True,
    separate: bool | None = None,
) -> BatchReport:
    given, whole = reading.labels is not None, reading
    if family.prefix and batch.get("token_type_ids") is None:
        family = replace(family, causal=False)  # all of it is the prefix
    if loss is not None:
        unknown = tuple(name for name in reading.unknown if not WEIGHTS.fullmatch(name))  # compared with the loss's own
        reading = whole = replace(reading, unknown=unknown)
        if not given and reading.ids is not None:
            reading = whole = replace(reading, labels=reading.ids[..., 0].where(reading.real, IGNORED))
            loss = losses.with_shift(loss, reading)
        findings.extend(losses.compare(reading, loss, batch, given, equal))
        family = replace(family, shift=loss.shift, seen=True)  # None where it is not known, whatever the class says
        if loss.shift is not None and loss.calls == 1:
            reading = losses.really_trained(reading, loss)
    elif reading.counts is not None and reading.labels is not None and not family.transformers:
        reading = replace(reading, labels=reading.labels.where(reading.counts[1], IGNORED))
    checks = Checks(reading, family, read_labels(reading, family), separate)
    checks.extend(findings)
    return BatchReport(
        mistakes=tuple(checks.mistakes),
        family=checks.labels.words,
        order=checks.order(),
        checked=tuple(checks.checked),
        untested=tuple(checks.untested),
        unchecked=tuple(checks.unchecked),
        notes=tuple(checks.notes),
        sequences=reading.shape[0],
        positions=reading.shape[1],
        labels=checks.labels.count,
        documents=len(reading.parts()),
        loss=() if loss is None else tuple(losses.terms(loss, batch)),
        trained=() if loss is None else losses.trained_runs(loss, whole.labels),
    )


def _together(reports: Sequence[BatchReport]) -> BatchReport:
    def named(number: int, text: str) -> str:
        return f"micro-batch {number}: {text}"

    numbered = list(enumerate(reports))
    return replace(
        reports[0],
        mistakes=tuple(replace(m, message=named(i, m.message)) for i, r in numbered for m in r.mistakes),
        checked=tuple(dict.fromkeys(what for r in reports for what in r.checked)),
        untested=tuple((named(i, what), why) for i, r in numbered for what, why in r.untested),
        unchecked=tuple(dict.fromkeys(pair for r in reports for pair in r.unchecked)),
        notes=tuple(dict.fromkeys(note for r in reports for note in r.notes)),
        sequences=sum(r.sequences for r in reports),
        positions=max(r.positions for r in reports),
        labels=sum(r.labels for r in reports),
        documents=sum(r.documents for r in reports),
        loss=tuple(named(i, line) for i, r in numbered for line in r.loss),
        trained=(),
    )


def _given(shift: int | None, causal: bool | None, eos: int | Sequence[int] | None, pad: int | None) -> dict[str, Any]:
    ends = None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return {k: v for k, v in {"shift": shift, "causal": causal, "ends": ends, "pad": pad}.items() if v is not None}


def _renamed(batch: Any, names: Mapping[str, str] | None, documents: Documents) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise TypeError(f"expected a batch as a mapping, such as a collator returns, got {type(batch).__name__}")
    entries: dict[str, Any] = dict(batch)
    for old, new in (names or {}).items():
        if old not in entries or (new in entries and new != old):
            problem = f"has no entry {old!r}" if old not in entries else f"has an entry {new!r} already"
            raise ValueError(f"names= maps {old!r} to {new!r}, and the batch {problem}; it holds {sorted(entries)}")
        entries[new] = entries.pop(old)
    if isinstance(documents, str) and documents != "rows" and documents not in entries:
        raise ValueError(f"documents={documents!r} names no entry of the batch; it holds {sorted(entries)}")
    return entries


# -------- the batch run through its model


def _loss_of_model(
    subject: Subject, batch: Mapping[str, Any], reading: BatchReading, findings: Findings
) -> Targets | None:
    if reading.labels is None and reading.targets is None:
        return None
    try:
        targets = read_targets(partial(run_model, subject), batch, least_width(batch), subject.model)
    except LossUnread as error:
        why = f"{error}; pass the function that computes it to check_loss"
    except REFUSALS as error:
        why = f"it does not run on this batch: {refusal(error)}"
    else:
        return losses.matched(targets, reading, findings)
    findings.untested.append((f"the loss of {subject.kind}", why))
    return None


def _rows_alone(subject: Subject, batch: Mapping[str, Any], reading: BatchReading, findings: Findings) -> bool:
    """Run each row and document alone; whether all documents were seen to stay apart."""
    if reading.targets is not None:
        findings.unchecked.append(("rows alone", "positions of merged tasks do not begin at 0 alone"))
        return False
    known = reading.starts or reading.single
    places = [(row, part.nonzero()[:, 0]) for row, part in reading.parts()] if known else None
    try:
        call, labels, _ = bound(subject, call_of(subject, batch))
        report = compare_alone(subject, call, labels, places=places)
    except (AttnflowError, *REFUSALS) as error:
        findings.untested.append(("rows alone", refusal(error)))
        return False
    for gap in report.differences:
        what = f"document {gap.document}" if reading.starts else "the row"
        size = f"{gap.difference:.3g} of {gap.scale:.3g}"
        message = f"outputs of {what} ({gap.output}) are others alone, by {size}: {gap.cause}"
        findings.mistakes.append(Mistake("alone", gap.row, gap.column or 0, 1, message))
    read = {*reading.starts, *(() if reading.counts is None else reading.counts[:1])}  # as documents and labels
    left = [(f"alone: {what}", why) for what, why in report.uncompared if what not in read]
    findings.untested += left
    same = report.compared == report.documents and not report.differences and not left
    if same and report.compared:
        findings.checked.append(f"alone: {report.compared} rows or documents have the same outputs as in the batch")
    return same
