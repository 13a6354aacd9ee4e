"""Checks what the labels of a batch ask: which token is predicted where, and whether it can be read there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal, cast

import torch
from scipy.special import bdtrc
from torch import Tensor

from attnflow._core.markup import plural
from attnflow.audit.batch.reading import IGNORED, BatchReading, Family, moved
from attnflow.masks.build import from_dense
from attnflow.order.flow import analyze

Kind = Literal[
    "readable", "shift", "documents", "padding", "unsupervised", "prompt", "mask", "positions", "vocabulary",
    "targets", "untrained", "rows", "weights", "alone",
]  # fmt: skip

_OPEN: Final = 0.1  # of the labels of a masked language model: BERT's recipe leaves a tenth of their tokens in place
_CHANCE: Final = 1e-6  # a clean batch is accused at most so often
_READ: Final = "labels that a position can read"
_TAKEN: Final = {  # (whether the loss was run, whether it shifts)
    (False, True): "labels are predicted one position before their own",
    (False, False): "labels are predicted where they stand",
    (True, True): "its loss trains each position on the next label",
    (True, False): "its loss trains each position on the label that stands there",
}


@dataclass(frozen=True)
class Mistake:
    """One mistake in a batch.

    Attributes:
        kind: "readable" (the position that predicts a label can read it), "shift" (labels are not where the loss takes
            them), "documents" (a label is predicted from another document, or entries disagree on where documents
            begin), "padding" (labels on padding), "unsupervised" (an answer without labels, or without an end),
            "prompt" (labels outside of answers), "mask" (the mask lets positions read other documents or padding),
            "positions" (position ids and mask disagree), "vocabulary" (ids outside the vocabulary). Of the loss that
            was run: "targets" (a position is trained on another token than its label), "untrained" (the loss leaves
            out labels, or trains what has none), "rows" (a sequence is trained on the next one), "weights" (tokens
            count differently). Of the model that was run: "alone" (a row or document has other outputs alone).
        sequence: row of the batch where it first occurs.
        position: column of that place.
        count: number of places in the batch.
        message: what is wrong, and what to do.
    """

    kind: Kind
    sequence: int
    position: int
    count: int
    message: str

    def __str__(self) -> str:
        more = f" ({plural(self.count, 'place')} in all)" if self.count > 1 else ""
        return f"{self.kind}: sequence {self.sequence}, position {self.position}: {self.message}{more}"


@dataclass
class Findings:
    mistakes: list[Mistake] = field(default_factory=list[Mistake])
    checked: list[str] = field(default_factory=list[str])
    unchecked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    untested: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # what leaves the verdict open
    notes: list[str] = field(default_factory=list[str])

    def add(self, kind: Kind, where: Tensor, message: str, checked: str | None = None) -> None:
        """Add a mistake if `where`, bool [batch, n], holds any place; else `checked`, what was found to be right."""
        places = where.nonzero()
        if len(places):
            row, column = places[0].tolist()
            self.mistakes.append(Mistake(kind, row, column, len(places), message))
        elif checked is not None:
            self.checked.append(checked)

    def extend(self, other: Findings) -> None:
        known = {(mistake.kind, mistake.sequence, mistake.position) for mistake in self.mistakes}
        self.mistakes += [m for m in other.mistakes if (m.kind, m.sequence, m.position) not in known]
        self.checked += other.checked
        self.unchecked += other.unchecked
        self.untested += other.untested
        self.notes += other.notes


@dataclass
class LabelUse(Findings):
    words: str = ""  # how they are taken
    shift: int | None = None  # the loss takes label i from position i - shift; None if that is not known
    offset: int | None = None  # label i is the token at i + offset; None if that is not known, or differs
    masked: bool = False  # labels stand where tokens were hidden
    count: int = 0  # labels that count


def supervised(reading: BatchReading, shift: int) -> Tensor:
    """Where labels count, bool [batch, n]; a loss that shifts drops the first ones, or the last."""
    if reading.targets is not None:
        return (reading.targets != IGNORED).any(-1)
    if reading.labels is None:
        return torch.zeros_like(reading.real)
    there = reading.labels != IGNORED
    there[:, slice(shift) if shift >= 0 else slice(shift, None)] = False
    return there


def read_labels(reading: BatchReading, family: Family) -> LabelUse:
    labels = LabelUse(words=family.name, shift=family.shift, count=int(supervised(reading, family.shift or 0).sum()))
    if family.classes:
        labels.unchecked.append(("labels", "they are classes, not tokens"))
        return replace(labels, words=f"{family.name}: labels are classes", shift=None)
    if reading.targets is not None:
        return _merged(reading, family)
    if reading.labels is None:
        labels.unchecked.append(("labels", "the batch has none"))
        return replace(labels, words=family.name or "no model given", shift=None)
    if reading.ids is None:
        labels.unchecked.append((_READ, "the batch has no ids; an encoder-decoder makes them of its labels"))
        labels.words += ": labels stand where they are predicted"
        return labels
    if family.name and family.shift is None:
        labels.words += ": how its loss takes labels is not known"
        why = f"it is not known which position of {family.name} predicts a label: say shift="
        labels.untested.append((_READ, why))
        return labels
    shares = {offset: _share(reading, offset) for offset in (0, 1, -1)}
    right = None if family.shift is None else 1 - family.shift
    best = max(shares, key=lambda offset: (shares[offset], offset == right, -abs(offset)))
    labels.offset = best if shares[best] >= 0.5 else None
    repeats = labels.offset is not None and list(shares.values()).count(shares[best]) > 1
    if not family.name and family.shift is None:  # infer it
        inputs = reading.ids[..., 0][supervised(reading, 0)]
        if labels.offset == 1:
            labels.shift, words = 0, "taken where they stand, since they are the next tokens"
        elif labels.offset is not None:
            labels.shift, words = 1, "taken one position before their own, as a causal language model does"
        elif _hidden(inputs):
            labels.shift, words = 0, "taken where they stand, since one token hides most of them"
        else:
            words = ""
            labels.untested.append((_READ, "labels are not tokens of the batch, and no model says what they are"))
        labels.words = f"assumed, as no model is given: labels are {words}" if words else "no model given"
    else:
        source = "" if family.seen else ", by its class" if family.name else "as the caller says"
        labels.words += f"{source}: {_TAKEN[family.seen, bool(labels.shift)]}"
        if family.seen and labels.shift not in (0, 1):
            labels.words = f"{family.name}: its loss trains position i on the label at i + {labels.shift}"
    known = family.name or family.causal is not None
    hides = family.causal is False if known else labels.shift == 0 and labels.offset != 1
    labels.masked = labels.shift in (0, 1) and not family.decoder and hides  # diffusion models may shift, too
    labels.count = int(supervised(reading, labels.shift or 0).sum())
    if repeats:
        why = "the text repeats itself, so that each label is the token in its place and one beside it"
        labels.untested.append((_READ, why))
    elif labels.count and labels.shift is not None:
        _readable(labels, reading, family)
    return labels


def _hidden(inputs: Tensor) -> bool:
    return len(inputs) > 1 and int((inputs == inputs.mode().values).sum()) >= max(2, len(inputs) / 2)


def _share(reading: BatchReading, offset: int) -> float:
    same, there = _equal(reading, offset)
    return float(same.sum() / there.sum()) if there.any() else 0.0


def _equal(reading: BatchReading, offset: int) -> tuple[Tensor, Tensor]:
    """(the label equals the token at `offset` from it, both exist), bool [batch, n]."""
    assert reading.labels is not None
    assert reading.ids is not None
    there = (reading.labels != IGNORED) & moved(reading.real, offset, False)
    there &= moved(reading.documents, offset, -1) == reading.documents
    return (moved(reading.ids, offset, IGNORED) == reading.labels[..., None]).any(-1) & there, there


def _readable(labels: LabelUse, reading: BatchReading, family: Family) -> None:
    shift, offset = labels.shift, labels.offset
    assert shift is not None
    assert reading.labels is not None
    assert reading.ids is not None
    if labels.masked:
        _open(labels, reading)
        return
    unclear = f"whether {family.name} is causal is not known"
    if offset is None and family.causal is None and family.name and reading.allow is None:
        labels.untested.append((_READ, f"{unclear}, nor where its labels' tokens are"))
        return
    if offset is None:
        message = "labels are not the tokens of the batch, neither in place nor one position before or after"
        labels.add("shift", supervised(reading, shift) & reading.real, message)
        return
    ahead = offset + shift  # from the position that predicts to the token that it predicts
    equal, there = _equal(reading, offset)
    other = there & ~equal & supervised(reading, shift) & reading.real & (reading.labels >= 0)
    if not _hidden(moved(reading.ids[..., 0], offset, IGNORED)[other]):  # else tokens were dropped from the inputs
        where = "in its place" if offset == 0 else f"{offset:+d} of it"
        labels.add("shift", other, f"a label is not the token {where}, as most labels are")
    if ahead > 1:
        twice = "labels are shifted already, and the loss shifts them once more: " if offset else ""
        what = "the token after next" if ahead == 2 else f"the token {ahead} places ahead"
        labels.add("shift", equal, f"{twice}each position learns {what}")
    causal = True if not family.name and family.causal is None and reading.allow is None else family.causal
    if causal is None and reading.allow is None:
        labels.untested.append((_READ, f"{unclear}: say causal="))
        return
    readable = torch.zeros_like(equal)
    for row in range(len(equal)):
        places = equal[row].nonzero().flatten()
        places = places[places >= shift]
        readable[row, places] = _reads(reading, family, row, places - shift, places + offset, bool(causal))
    who = {0: "its own position", 1: "the position before it"}.get(shift, f"the position {shift:+d} before it")
    if readable.any():
        at = int(readable.nonzero()[0, 1]) + offset
        labels.add("readable", readable, f"{who} predicts it, and can read the label's token at position {at}")
    if not family.name and family.causal is None and ahead > 0 and reading.allow is None:
        why = "no model or configuration was given, so that whether it is causal is not known"
        labels.unchecked.append((_READ, why))
    elif not readable.any():
        labels.checked.append("labels: none can be read by the position that predicts it")


def _reads(reading: BatchReading, family: Family, row: int, target: Tensor, source: Tensor, causal: bool) -> Tensor:
    real = reading.real[row]
    if reading.allow is not None:
        if not len(target):
            return torch.zeros(0, dtype=torch.bool)
        flow = analyze(from_dense(reading.allow[row] & (real | torch.eye(len(real), dtype=torch.bool))))
        return flow.reachability(family.layers)[target, source]
    documents, blocks = reading.documents[row], reading.blocks[row]
    together = (documents[target] == documents[source]) & real[source]
    block = (blocks[target] == blocks[source]) & (blocks[target] >= 0)
    return together & ((source <= target) | block | (not causal))


def _open(labels: LabelUse, reading: BatchReading) -> None:
    if labels.offset:
        message = f"labels are the tokens at {labels.offset:+d} of them, which both directions read"
        labels.add("readable", _equal(reading, labels.offset)[0], message)
        return
    equal, there = _equal(reading, 0)
    left, count = int(equal.sum()), int(there.sum())
    if left and float(bdtrc(left - 1, count, _OPEN)) < _CHANCE:
        message = f"{left} of {count} labels are the token that stands in their place, where the model reads it"
        labels.add("readable", equal, f"{message}: hide them (BERT's recipe leaves a tenth)")
        return
    if left == count:
        why = f"all {count} stand open, too few to tell from the tenth that is left open"
        labels.untested.append((_READ, why))
        return
    if left:
        labels.notes.append(f"{left} of {count} labels stand open, as a tenth of them does in BERT's recipe")
    labels.checked.append("labels: their tokens are hidden, but for a tenth")


def _merged(reading: BatchReading, family: Family) -> LabelUse:
    labels = LabelUse(words="labels of af.tasks.Collator, where they are predicted", shift=0)
    ids, positions, targets = reading.ids, reading.positions, cast(Tensor, reading.targets)
    labels.count = int((targets != IGNORED).sum())
    if ids is None or reading.allow is None or positions is None:
        labels.untested.append((_READ, "merged tasks need input_ids, position_ids and a mask of pairs"))
        return labels
    flow = torch.stack([analyze(from_dense(allow)).reachability(family.layers) for allow in reading.allow])
    alone = (ids[..., 1:] == IGNORED).all(-1) & reading.real  # tokens that are not averages of several
    away = positions[:, None, :] - positions[:, :, None]
    seen, unclear = torch.zeros_like(reading.real), 0
    for slot, target in enumerate(targets.unbind(-1)):
        there = target != IGNORED
        same = (ids[:, None] == target[:, :, None, None]).any(-1) & there[..., None] & alone[:, None]
        nearby = [same & (away == offset) for offset in range(slot + 2)]
        carriers = max(nearby, key=lambda pairs: int(pairs.any(-1).sum()))
        unclear += int((there & ~carriers.any(-1)).sum())
        seen |= (carriers & flow).any(-1)
    labels.add("readable", seen, "the position that predicts the label can read its token through attention_mask")
    if unclear < labels.count and not seen.any():
        labels.checked.append(f"labels: {labels.count - unclear} of {labels.count} traced to their tokens in the batch")
    if unclear:
        labels.unchecked.append((f"{unclear} labels", "their tokens are not inputs of the batch, or nowhere near"))
    return labels
