"""The checks of one batch that need no run of the model: documents, padding, answers, positions, vocabulary."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from attnflow.audit.batch.labels import Findings, LabelUse, Mistake, supervised
from attnflow.audit.batch.reading import IGNORED, BatchReading, Family, beside_ends, moved
from attnflow.audit.packing import DOCUMENT_ARGUMENTS

_APART: Final = frozenset({"position_ids", *DOCUMENT_ARGUMENTS})  # by which models keep documents apart


class Checks(Findings):
    """The checks of a batch, most important first; `separate` says that documents were seen to stay apart, if known."""

    def __init__(self, reading: BatchReading, family: Family, labels: LabelUse, separate: bool | None) -> None:
        self.reading, self.family, self.labels, self.separate = reading, family, labels, separate
        super().__init__(labels.mistakes, labels.checked, labels.unchecked, labels.untested, labels.notes)
        if reading.axes:
            self.unchecked.insert(0, ("position_ids", f"they have {reading.axes} axes: all but where time goes back"))
        self._unread()
        self._documents()
        self._padding()
        self._answers()
        self._positions()
        self._vocabulary()

    def _unread(self) -> None:
        for name in self.reading.unknown:
            why = "its form is not one that is read here: map it with names=, or leave it out if it says nothing"
            self.untested.append((f"entry {name!r}", why))
        if self.reading.counts is not None:
            name, counted = self.reading.counts
            if self.family.transformers or self.family.seen:
                message = f"{name} is 0 here, and the loss trains the label all the same: set it to {IGNORED}"
                places = supervised(self.reading, self.labels.shift or 0) & ~counted
                self.add("untrained", places, message, f"labels: count only where {name} says")

    def _documents(self) -> None:
        reading, labels = self.reading, self.labels
        self.mistakes += [Mistake("documents", 0, 0, 1, problem) for problem in reading.problems]
        names = list(reading.starts)
        different = torch.zeros_like(reading.real)
        for other in names[1:]:
            here = (reading.starts[names[0]] != reading.starts[other]) & ~different
            different |= here
            self.add("documents", here, f"{names[0]} and {other} do not agree on where a document begins")
        if len(names) > 1 and not different.any():
            self.checked.append(f"documents: {', '.join(names)} agree")
        if names:
            self._beside_ends(names[0])
        else:
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
        if self.separate:
            self.checked.append("mask: documents have the outputs that they have alone")
        else:
            self._mixing(names)

    def _beside_ends(self, name: str) -> None:
        reading = self.reading
        if reading.ids is None or not self.family.ends or reading.ids.shape[-1] > 1:
            return
        ends = reading.ended(self.family.ends) & ~reading.padding
        begins = reading.starts[name]
        early, late = beside_ends(begins, ends, reading.real)
        self.add("documents", early, f"{name} begins a document at an end token, one token too early")
        right = (begins & moved(ends, -1, False)).any()
        checked = f"documents: {name} begins them behind end tokens" if right else None
        self.add("documents", late, f"{name} begins a document one token late: the end token is two before it", checked)

    def _ends_inside(self) -> None:
        reading = self.reading
        if reading.ids is None or not self.family.ends or reading.single:
            return
        ends = reading.ended(self.family.ends) & ~reading.padding
        inside = ends[:, :-1] & (reading.real & ~reading.padding & ~ends)[:, 1:]
        if inside.any():
            row, column = inside.nonzero()[0].tolist()
            why = (
                f"sequence {row} goes on behind the end token at position {column}, and neither position_ids nor "
                "another entry begins a document there: if documents are packed, they read one another (if a row is "
                "one document, say documents='rows')"
            )
            self.untested.append(("documents", why))

    def _mixing(self, names: list[str]) -> None:
        reading = self.reading
        if reading.allow is not None:
            documents, real = reading.documents, reading.real
            apart = documents[:, :, None] != documents[:, None, :]
            across = (reading.allow & apart & real[:, None]).any(-1) & real
            message = f"attention_mask lets a position read a document that {names[0]} keeps apart"
            self.add("mask", across, message, f"mask: its pairs stay within the documents of {names[0]}")
            return
        named = self.family.takes.intersection(names).difference(_APART, ("attention_mask",))
        if reading.patched or named or (not self.family.transformers and self.family.name):
            return  # a model of another kind may read any of them, and a forward what it names
        message = ""
        if "attention_mask" in names:
            message = (
                "attention_mask numbers documents, and transformers reads every number as 1, so that they mix: pass "
                "position_ids without it (a trainer that patches transformers: documents='attention_mask')"
            )
        elif reading.mask is not None:
            message = (
                f"{names[0]} begins a document, but with a 2D attention_mask transformers does not keep them apart "
                "(SDPA, eager, Flex): leave attention_mask out, or pass a mask of pairs"
            )
        elif self.family.transformers and not _APART.issuperset(names) and not _APART.intersection(names):
            message = f"{names[0]} begins a document, and transformers does not read it: pass position_ids that restart"
        where = reading.starts[names[0]]
        if message:
            self.add("mask", where, message)
        else:
            self.checked.append("mask: none that switches packing off")

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
            for row, inside in reading.parts():
                first, numbers = int(inside.nonzero()[0]), reading.documents[row]
                silent[row, first] = int(inside.sum()) > 1 and not there[row, numbers == numbers[first]].any()
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
            ends = reading.ended(self.family.ends)
            silent = ends & before & follows & (reading.labels == IGNORED)
            unended = torch.zeros_like(ends)
            for row, inside in reading.parts():
                columns, answer = inside.nonzero()[:, 0], ((reading.labels[row] != IGNORED) & inside).nonzero()[:, 0]
                if not len(answer) or int((columns < answer[0]).sum()) < 2 or columns[-1] == len(inside) - 1:
                    continue  # a text without a prompt, or one that may be cut off by the end of the row
                unended[row, answer[-1]] = not ends[row, answer[0] :][inside[answer[0] :]].any()
            message = "an answer has no end token: it was cut off, or the model will not learn to stop"
            self.add("unsupervised", unended, message)
            message = "an answer is supervised, but not the token that ends it: the model will not learn to stop"
            right = not unended.any() and (ends & ~silent).any()
            checked = "answers: the token that ends one is trained" if right else None
            self.add("unsupervised", silent, message, checked)

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
            else:
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
        if size is not None and not any(mistake.kind == "vocabulary" for mistake in self.mistakes):
            self.checked.append("vocabulary: ids and labels are in it")

    def order(self) -> str:
        reading, causal = self.reading, self.family.causal
        if reading.allow is not None:
            return "the pairs of attention_mask"
        words = {None: "order not known", True: "causal", False: "bidirectional"}[causal]
        if (reading.blocks >= 0).any():
            words += " with blocks of token_type_ids"
        return words + (f" within the documents of {next(iter(reading.starts))}" if reading.starts else "")
