"""`check_batch`: do labels, documents, masks and positions of one real batch fit together? No model is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow.audit.batch_labels import Findings, Mistake, read_labels, supervised
from attnflow.audit.batch_reading import IGNORED, Family, Reading, family_of, read_batch


def check_batch(batch: Mapping[str, Any], model_or_config: Any = None) -> BatchReport:
    """Check one batch of a data loader for mistakes in labels, documents, masks and positions, without running a model.

    - Labels: the position that predicts a label can read it; labels are shifted twice or misplaced; a label is
      predicted from another document or lies on padding; an answer has no labels, or none on its end token.
    - Documents and ids: the mask connects documents that positions or lengths separate; two entries disagree on where a
      document begins; an id lies outside the vocabulary.

    Checks that could not be made are listed in `unchecked`.

    Args:
        batch: the collator's output: `input_ids`, `labels` and the model's other arguments. Labels may come from
            transformers, TRL or `af.tasks.Collator`. `completion_mask` or `assistant_masks` mark the answers.
        model_or_config: the model, a result of `af.load_model`, or the configuration. It tells whether the loss shifts
            labels, whether attention is causal, and which ids pad and end. Without it, a batch that looks like one of a
            causal language model is taken as such, and the report says so.

    Raises:
        TypeError: the batch is not a mapping, ids or labels are not integers, or `model_or_config` is neither.
        ValueError: there are neither ids nor labels, or shapes do not fit.

    Cost: milliseconds; with a mask of pairs its closure, about that of `af.order.analyze`.

    >>> import torch
    >>> ids = torch.tensor([[5, 6, 7, 8, 9]])
    >>> print(check_batch({"input_ids": ids, "labels": ids.roll(1, 1)}).mistakes[0].kind)
    readable
    """
    if not isinstance(batch, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"expected a batch as a mapping, such as a collator returns, got {type(batch).__name__}")
    family = family_of(model_or_config)
    return _Lint(read_batch(batch, family), family).report()


@dataclass(frozen=True, repr=False)
class BatchReport(Result):
    """The result of `check_batch`: whether labels, documents, masks and positions of one batch fit together.

    Attributes:
        mistakes: everything that is wrong.
        family: how the loss takes labels, in words, and whether that was read or assumed.
        order: the information flow that the batch allows, in words.
        checked: the checks that were made, in words.
        unchecked: the checks that could not be made, each with the reason.
        notes: remarks that are not mistakes.
        sequences: number of rows of the batch.
        positions: number of columns of the batch.
        labels: number of labels that count.
        documents: number of documents in all rows; equal to the rows if nothing is packed.
    """

    mistakes: tuple[Mistake, ...]
    family: str
    order: str
    checked: tuple[str, ...]
    unchecked: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    sequences: int
    positions: int
    labels: int
    documents: int

    @property
    def ok(self) -> bool:
        """Whether something was checked and no mistake was found; read `unchecked`, too."""
        return bool(self.checked) and not self.mistakes

    def rows(self) -> list[dict[str, object]]:
        """One row for each mistake."""
        return [vars(mistake).copy() for mistake in self.mistakes]

    def __repr__(self) -> str:
        lines = [f"<BatchReport {self._verdict()}; {self.sequences} x {self.positions}", *map(str, self.mistakes[:2])]
        if len(self.mistakes) > 2:
            lines.append(f"and {len(self.mistakes) - 2} more; print(report)")
        return "\n".join(lines) + ">"

    def __str__(self) -> str:
        size = f"{self.sequences} x {self.positions} positions"
        packed = f"{plural(self.documents, 'document')}, {plural(self.labels, 'label')}"
        lines = [f"{self._verdict()}: {size}, {packed}; {self.family}; {self.order}", *map(str, self.mistakes)]
        lines += [f"checked: {what}" for what in self.checked]
        lines += [f"not checked: {what}: {why}" for what, why in self.unchecked]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _verdict(self) -> str:
        if self.mistakes:
            return f"{len(self.mistakes)} MISTAKE{'S' if len(self.mistakes) > 1 else ''}"
        return "no mistake" if self.checked else "NOTHING CHECKED"


class _Lint(Findings):
    def __init__(self, reading: Reading, family: Family) -> None:
        self.reading, self.family = reading, family
        self.labels = labels = read_labels(reading, family)
        super().__init__(labels.mistakes, labels.checked, [*reading.unread, *labels.unchecked], labels.notes)

    def report(self) -> BatchReport:
        """Run all checks, most important first."""
        reading = self.reading
        self._documents()
        self._padding()
        self._answers()
        self._positions()
        self._vocabulary()
        return BatchReport(
            mistakes=tuple(self.mistakes),
            family=self.labels.words,
            order=self._order(),
            checked=tuple(self.checked),
            unchecked=tuple(self.unchecked),
            notes=tuple(self.notes),
            sequences=reading.shape[0],
            positions=reading.shape[1],
            labels=self.labels.count,
            documents=sum(len(row[real].unique()) for row, real in zip(reading.documents, reading.real, strict=True)),
        )

    def _documents(self) -> None:
        reading, labels = self.reading, self.labels
        self.mistakes += [Mistake("documents", 0, 0, 1, problem) for problem in reading.problems]
        names = list(reading.starts)
        for other in names[1:]:
            different = reading.starts[names[0]] != reading.starts[other]
            self.add("documents", different, f"{names[0]} and {other} do not agree on where a document begins")
        if len(names) > 1:
            self.checked.append(f"documents: {', '.join(names)} agree")
        if not names:
            self._ends_inside()
            if reading.targets is None and reading.allow is None and reading.real.all():
                self.notes.append("no entry says where documents begin: each sequence is taken as one")
            return
        same = reading.documents[:, 1:] == reading.documents[:, :-1]
        checked = "documents: no label is predicted from another one"
        if labels.shift == 1 and reading.labels is not None:
            crossing = F.pad(supervised(reading, 1)[:, 1:] & ~same, (1, 0))
            crossing &= reading.real & F.pad(reading.real[:, :-1], (1, 0))
            message = (
                "the first token of a document has a label, which the last one of the document before is to predict: "
                f"set it to {IGNORED}"
            )
            self.add("documents", crossing, message, checked)
        elif labels.shift == 0 and labels.offset == 1 and reading.labels is not None:
            crossing = F.pad(supervised(reading, 0)[:, :-1] & ~same & reading.real[:, 1:], (0, 1))
            message = "the last token of a document is to predict the first of the next one"
            self.add("documents", crossing, message, checked)
        self._mixing(names)

    def _ends_inside(self) -> None:
        """Name an end token with text behind it, where no entry tells packed documents from turns of one."""
        reading = self.reading
        if reading.ids is None or not self.family.ends:
            return
        ends = torch.isin(reading.ids[..., 0], torch.tensor(self.family.ends)) & reading.real & ~reading.padding
        text = reading.real & ~reading.padding & ~ends
        inside = ends[:, :-1] & text[:, 1:]
        if inside.any():
            row, column = inside.nonzero()[0].tolist()
            self.unchecked.append(
                (
                    "documents",
                    f"sequence {row} goes on behind the end token at position {column}, and neither position_ids nor "
                    "another entry begins a document there: if documents are packed, they read one another",
                )
            )

    def _mixing(self, names: list[str]) -> None:
        """Check whether the attention mask connects documents that are to stay apart."""
        reading = self.reading
        if reading.allow is not None:
            documents, real = reading.documents, reading.real
            apart = documents[:, :, None] != documents[:, None, :]
            across = (reading.allow & apart & real[:, None]).any(-1) & real
            message = f"attention_mask lets a position read a document that {names[0]} keeps apart"
            self.add("mask", across, message, f"mask: its pairs stay within the documents of {names[0]}")
        elif "attention_mask" in names:
            self.notes.append(
                "attention_mask numbers documents; transformers reads every number as 1 and lets them mix, unless the "
                "trainer patches it"
            )
        elif reading.mask is not None and (self.family.transformers or not self.family.name):
            message = (
                f"{names[0]} begins a document, but with a 2D attention_mask transformers does not keep them apart "
                "(SDPA, eager, Flex): leave attention_mask out, or pass a mask of pairs"
            )
            self.add("mask", reading.starts[names[0]], message, "mask: none that switches packing off")

    def _padding(self) -> None:
        reading = self.reading
        added = reading.numbers and (reading.numbers != "bool" or self.family.eager)  # SDPA and Flex read bool
        if added and (self.family.transformers or not self.family.name):
            everywhere = torch.zeros_like(reading.real)
            everywhere[0, 0] = True
            message = (
                f"transformers adds this {reading.numbers} attention_mask of 0 and 1 to the scores, which forbids "
                "nothing: pass minus infinity where a pair is forbidden and 0 elsewhere"
                + ("" if self.family.eager else ", or bool where attention is not eager")
            )
            self.add("mask", everywhere, message)
        if reading.labels is not None or reading.targets is not None:
            if reading.mask is not None or reading.allow is not None or self.family.pad is not None:
                message = f"a label on padding: set it to {IGNORED} there"
                self.add("padding", supervised(reading, 0) & ~reading.real, message, "padding: has no labels")
            else:
                why = "there is no mask, and no configuration says which id pads"
                self.unchecked.append(("labels on padding", why))
        if reading.mask is not None:
            if self.family.pad is None:
                self.unchecked.append(("whether attention_mask covers all padding", "the padding id is not known"))
            else:
                message = "attention_mask is 1 on padding: the model reads it"
                self.add("mask", reading.padding & (reading.mask != 0), message, "mask: covers the padding")
        elif reading.allow is None and reading.padding.any():
            read = reading.padding
            if reading.positions is not None:  # each of them a document, as TRL pads what it packs
                read = read & (reading.positions != 0)
            if self.family.causal is not False:  # what is behind them all is read by none
                read = read.long().cumprod(-1) > 0
            message = "padding without an attention_mask: real positions read it"
            self.add("mask", read, message, "mask: no padding that is read")

    def _answers(self) -> None:
        """Check that every sequence, document and answer has labels, up to its end token."""
        reading, labels = self.reading, self.labels
        if reading.labels is None and reading.targets is None:
            return
        there = supervised(reading, labels.shift or 0)
        if not there.any():
            first = torch.arange(there.numel()).view_as(there) == 0
            self.add("unsupervised", first, "no label in the whole batch: there is nothing to learn")
            return
        if labels.masked:
            self.checked.append("answers: the batch has labels")
        else:
            silent = torch.zeros_like(there)
            for row in range(len(there)):
                real, documents = reading.real[row], reading.documents[row]
                number = int(documents.max()) + 1
                has = torch.zeros(number, dtype=torch.int64).index_add_(0, documents, there[row].long())
                size = torch.zeros(number, dtype=torch.int64).index_add_(0, documents, real.long())
                for document in ((has == 0) & (size > 1)).nonzero().flatten().tolist():
                    silent[row, int(((documents == document) & real).nonzero()[0])] = True
            what = "document" if reading.starts else "sequence"
            message = f"a {what} without any label: was its answer cut off, or not recognised?"
            self.add("unsupervised", silent, message, f"answers: every {what} has labels")
        if reading.labels is None or self.family.decoder:
            return
        follows = reading.documents == F.pad(reading.documents[:, :-1], (1, 0), value=-1)
        if reading.answers is not None:
            inside = reading.answers & reading.real & (follows if labels.shift == 1 else reading.answers)
            there = reading.labels != IGNORED
            self.add("unsupervised", inside & ~there, "a token of an answer without a label")
            checked = "answers: labels are where the batch's mask of answers is"
            self.add("prompt", there & ~reading.answers, "a label outside of the answers", checked)
        if not self.family.ends:
            self.unchecked.append(("the token that ends an answer", "no configuration says which id that is"))
        elif reading.ids is not None and labels.shift == 1 and labels.offset == 0:
            before = F.pad((reading.labels != IGNORED)[:, :-1], (1, 0))
            ends = torch.isin(reading.ids[..., 0], torch.tensor(self.family.ends)) & reading.real
            silent = ends & before & follows & (reading.labels == IGNORED)
            message = "an answer is supervised, but not the token that ends it: the model will not learn to stop"
            self.add("unsupervised", silent, message, "answers: the token that ends one has its label")

    def _positions(self) -> None:
        reading = self.reading
        if reading.positions is None or reading.allow is not None:
            return
        if reading.mask is not None:
            counted = (reading.positions == torch.arange(reading.shape[1])).all(-1) & ~reading.real[:, 0]
            first = reading.real & (reading.real.long().cumsum(-1) == 1) & counted[:, None]
            if first.any():
                at = int(first.nonzero()[0, 1])
                message = f"position_ids count the padding that attention_mask hides: the first real token is at {at}"
                self.add("positions", first, message)
            self.checked.append("positions: agree with the mask")
        both = reading.real[:, 1:] & reading.real[:, :-1]
        begins = reading.starts.get("position_ids", torch.zeros_like(reading.real))[:, 1:]
        jumps = (reading.positions.diff(dim=-1) != 1) & both & ~begins
        if jumps.any():
            row, column = jumps.nonzero()[0].tolist()
            self.notes.append(
                f"position_ids do not continue at position {column + 1} of sequence {row}: transformers begins a "
                "document there"
            )

    def _vocabulary(self) -> None:
        reading, size = self.reading, self.family.vocabulary
        if reading.labels is not None:
            strange = (reading.labels < 0) & (reading.labels != IGNORED)
            self.add("vocabulary", strange, f"a negative label that is not {IGNORED}, which alone is ignored")
            if size is not None:
                self.add("vocabulary", reading.labels >= size, f"a label outside the vocabulary of {size}")
        if reading.ids is not None:
            strange = reading.ids[..., 0] < 0
            strange |= reading.ids.amax(-1) >= size if size is not None else False
            self.add("vocabulary", strange, "a token id outside the vocabulary of this size")
        if size is not None:
            self.checked.append("vocabulary: ids and labels are in it")

    def _order(self) -> str:
        reading, causal = self.reading, self.family.causal
        if reading.allow is not None:
            return "the pairs of attention_mask"
        words = {None: "order not known", True: "causal", False: "bidirectional"}[causal]
        if (reading.blocks >= 0).any():
            words += " with blocks of token_type_ids"
        return words + (f" within the documents of {next(iter(reading.starts))}" if reading.starts else "")
