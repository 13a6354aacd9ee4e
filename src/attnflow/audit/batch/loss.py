"""Compares what a loss was seen to train (`targets`) with what the batch's labels, masks and documents say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from attnflow._core.markup import plural
from attnflow.audit.batch.gradients import NOTHING, UNKNOWN, Targets
from attnflow.audit.batch.labels import Findings
from attnflow.audit.batch.reading import IGNORED, WEIGHTS, BatchReading, moved
from attnflow.audit.packing import numbers_of

SHIFTS: Final = (1, 0, 2, -1, 3, -2)  # label i + shift may be what position i is trained on; the likeliest first
_AGREE: Final = 0.5  # share of the trained positions that decides a shift


@dataclass(frozen=True)
class Trained:
    """Neighbouring positions that a loss trains alike.

    Attributes:
        sequence: row of the batch.
        first: their first column.
        last: their last column.
        weight: the weight of each in the loss.
        label: position i is trained on the label at i + label; None where that is no label.
    """

    sequence: int
    first: int
    last: int
    weight: float
    label: int | None

    def __str__(self) -> str:
        places = f"position {self.first}" if self.first == self.last else f"positions {self.first} to {self.last}"
        what = "a token that is no label" if self.label is None else f"the label {_ahead(self.label)}"
        return f"sequence {self.sequence}, {places}: {what}, weight {self.weight:.4g}"


def in_columns(targets: Targets, reading: BatchReading) -> Targets | None:
    """Match the last rows of logits with the columns of the ids that were passed; None if their number does not fit."""
    batch, n = reading.shape
    ids, token = None if reading.ids is None else reading.ids[..., 0], targets.token
    called = [given.cpu() for given in targets.inputs if given.ndim == 2 and 0 < given.shape[1] <= n]
    places = [(given, at) for given in called for at in (0, n - given.shape[1])]
    fits = (
        part for part in places if ids is not None and torch.equal(part[0], ids[:, part[1] :][:, : part[0].shape[1]])
    )
    given, start = next(fits, (torch.zeros(batch, n), 0))
    width = given.shape[1]
    whole = token.ndim == 1 or 1 in token.shape or (token.ndim == 2 and len(token) == batch)
    if token.numel() % batch or token.numel() < batch * width or not whole:
        return None
    if (token.reshape(batch, -1)[:, : -width - 1] != NOTHING).any():  # but for the last, which predicts the first token
        return None

    def columns(values: Tensor, empty: int | float) -> Tensor:  # what stands before has none
        return F.pad(values.reshape(batch, -1)[:, -width:], (start, n - start - width), value=empty)

    return with_shift(targets.changed(columns), reading)


def matched(targets: Targets, reading: BatchReading, findings: Findings) -> Targets | None:
    loss = in_columns(targets, reading)
    if loss is None:
        shape = f"its logits have rows {list(targets.token.shape)}, the batch {list(reading.shape)}"
        findings.untested.append(("which positions the loss trains", shape))
    return loss


def with_shift(loss: Targets, reading: BatchReading) -> Targets:
    if reading.labels is None:
        return replace(loss, shift=None)
    here = loss.token >= 0
    same = [(moved(reading.labels, shift, IGNORED) == loss.token) & here for shift in SHIFTS]
    shares = [float(equal.sum()) / max(1, int(here.sum())) for equal in same]
    return replace(loss, shift=SHIFTS[shares.index(max(shares))] if max(shares) >= _AGREE else None)


def really_trained(reading: BatchReading, loss: Targets) -> BatchReading:
    if reading.labels is None or loss.shift is None:
        return reading
    hidden = loss.certain == moved(reading.labels, loss.shift, IGNORED)
    back = moved(loss.trained | hidden, -loss.shift, False)
    return replace(reading, labels=reading.labels.where(back, IGNORED))


def compare(reading: BatchReading, loss: Targets, batch: Mapping[str, Any], given: bool, equal: bool) -> Findings:
    """Where the loss and the labels differ; `given` says that the batch has labels, `equal` that weights must agree."""
    findings, labels = Findings(), reading.labels
    if (loss.token == UNKNOWN).any():
        count = int((loss.token == UNKNOWN).sum())
        why = "its gradient there is not that of one token's cross-entropy (soft targets, a ranking or a penalty)"
        findings.untested.append((f"the loss at {plural(count, 'position')}", why))
    if loss.calls > 1:
        why = f"the loss is made of {loss.calls} calls of the model, and one was read"
        findings.untested.append(("the other calls of the model", why))
    rest, named = _rest(loss)
    if rest and not named:
        findings.untested.append(("a part of the loss", rest))
    if labels is not None:
        _against_labels(findings, reading, loss, labels, batch, given)
    _weights(findings, reading, loss, batch, equal)
    return findings


def _against_labels(
    findings: Findings, reading: BatchReading, loss: Targets, labels: Tensor, batch: Mapping[str, Any], given: bool
) -> None:
    if loss.shift is None:
        message = "the loss trains this position on a token that is no label, at any shift"
        findings.add("targets", loss.token >= 0, message)
        return
    wanted, trained = moved(labels, loss.shift, IGNORED), loss.trained
    columns = torch.arange(reading.shape[1]) + loss.shift
    inside = ((columns >= 0) & (columns < reading.shape[1])).expand_as(trained)
    if given:
        extra = trained & inside & (wanted == IGNORED)
        prompt = extra & ~moved((labels != IGNORED).cumsum(-1) > 0, loss.shift, False)
        message = f"the loss trains the token before an answer, whose label is {IGNORED}: a prompt, or padding"
        findings.add("untrained", prompt, message)
        findings.add("untrained", extra & ~prompt, f"the loss trains a token whose label is {IGNORED}")
        lost = ~trained & (wanted != IGNORED) & (loss.calls == 1)
        lost &= True if loss.owner is None else loss.owner >= 0
        if hidden := int((lost & (loss.certain == wanted)).sum()):
            why = "the model gives it all the probability, so that its gradient is zero"
            findings.unchecked.append((f"whether each of {plural(hidden, 'label')} is trained", why))
        lost &= loss.certain != wanted
        kept = trained & (wanted != IGNORED)
        masks = [  # zero exactly where labels are not trained
            name
            for name, places in _entries(batch, loss).items()
            if lost.any() and any(not place[lost].any() and bool((place[kept] != 0).all()) for place in places)
        ]
        if masks:
            findings.notes.append(f"the loss is taken where {masks[0]} says, at {int(trained.sum())} positions")
        else:
            edge = lost & _edges(loss)
            message = "no loss trains the label behind the end of a shard: shift labels before they are sharded"
            findings.add("untrained", edge, f"{message} ({_held_by(loss, edge)})")
            where = _held_by(loss, lost & ~edge)
            message = f"a label that counts, and the loss {f'of {where} ' * bool(where)}does not train it"
            findings.add("untrained", lost & ~edge, message)
    behind = trained & ~inside
    message = "the loss trains the end of a sequence on what begins the next one: rows run together"
    findings.add("rows", behind, message, "loss: no position is trained on a token of another sequence")
    wrong = (loss.token >= 0) & (wanted != IGNORED) & (loss.token != wanted)
    edge = wrong & _edges(loss)
    if edge.any():
        message = f"the end of a shard is trained on {_source(loss, labels, edge)}, and not on the label that follows"
        findings.add("targets", edge, f"{message} ({_held_by(loss, edge)})")
        wrong &= ~edge
    checked = f"loss: {int((loss.token >= 0).sum())} positions are trained on the label {_ahead(loss.shift)}"
    findings.add("targets", wrong, "the loss trains this position on another token than its label", checked)


def _edges(loss: Targets) -> Tensor:
    """Where a position's label is behind the shard of its rank, bool [batch, n]."""
    owner = torch.zeros_like(loss.token) if loss.owner is None else loss.owner
    ahead = moved(owner, loss.shift or 0, -1)
    return (ahead != owner) & (ahead >= 0) & (owner >= 0)


def _held_by(loss: Targets, where: Tensor) -> str:
    if loss.owner is None or not where.any():
        return ""
    held: list[int] = loss.owner[where].unique().tolist()
    return f"rank{'s' * (len(held) > 1)} {', '.join(map(str, held))}"


def _source(loss: Targets, labels: Tensor, edge: Tensor) -> str:
    """Which label the first of these places is trained on, rather one at the beginning of a shard."""
    assert loss.owner is not None
    row, column = edge.nonzero()[0].tolist()
    places = (labels[row] == loss.token[row, column]).nonzero()[:, 0].tolist()
    begins = F.pad(loss.owner[row].diff() != 0, (1, 0), value=True)
    place = next((i for i in places if begins[i]), next(iter(places), None))
    return "a token that is no label" if place is None else f"label {place}, of rank {int(loss.owner[row, place])}"


def _ahead(shift: int) -> str:
    if shift == 0:
        return "in their own place"
    return f"{plural(abs(shift), 'place')} {'ahead' if shift > 0 else 'before'}"


def _entries(batch: Mapping[str, Any], loss: Targets) -> dict[str, tuple[Tensor, Tensor]]:
    """Entries with a number for each token, float64 [batch, n]: where it is predicted, and in its own place."""
    tensors = {name: numbers_of(value) for name, value in batch.items() if not name.endswith(("ids", "labels"))}
    size, fitting = loss.token.numel(), dict[str, tuple[Tensor, Tensor]]()
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() == size and tensor.ndim <= 2 and not tensor.is_complex():
            values = tensor.reshape(loss.token.shape).double()
            fitting[name] = moved(values, loss.shift or 0, 0), values
    return fitting


def _weights(findings: Findings, reading: BatchReading, loss: Targets, batch: Mapping[str, Any], equal: bool) -> None:
    there, precision = loss.token >= 0, loss.precision
    if not there.any():
        return
    weights = loss.weight[there]
    for name, (ahead, here) in _entries(batch, loss).items():
        told = [place[there].where(place[there] != 0, torch.nan) for place in (ahead, here)]
        if WEIGHTS.fullmatch(name) and not any(_alike(weights / place, precision) for place in told):
            message = f"the loss does not weigh its tokens as {name} says"
            findings.add("weights", there & (ahead != here.where(there, torch.nan).nanmean()), message)
            return
        if not _alike(weights, precision) and any(_alike(weights / place, precision) for place in told):
            findings.notes.append(f"tokens count in proportion to {name}")
            return
    if _alike(weights, precision):
        findings.checked.append("loss: all tokens that it trains have the same weight")
        return
    if equal and loss.owner is not None and (message := _between_ranks(loss, there)):
        findings.add("weights", there & (loss.owner == loss.owner[there][weights.argmax()]), message)
        return
    rows = torch.arange(len(there))[:, None].expand_as(there)
    groups = torch.stack([rows[there], reading.documents[there]], 1).unique(dim=0, return_inverse=True)[1]
    parts = [weights[groups == group] for group in range(int(groups.max()) + 1)]
    negative = there & (loss.weight < 0)
    if negative.any():
        message = f"{plural(int(negative.sum()), 'token')} with a negative weight: the loss drives the model away"
    elif all(_alike(part, precision) for part in parts):
        sums = torch.stack([part.sum() for part in parts])
        why = ": each is averaged by itself, so that a token of a short one counts more" if _alike(sums, 0.01) else ""
        what = "sequences" if int(reading.documents.max()) == 0 else "documents"
        message = f"the weight of a token differs between {what}{why}"
    else:
        message = f"the weight of a token differs within a sequence, from {weights.min():.3g} to {weights.max():.3g}"
    if not equal:
        findings.notes.append(message)
        return
    odd = there & ((loss.weight / weights.median() - 1).abs() > precision)
    where = negative if negative.any() else odd
    findings.add("weights", where, message + "; if that is meant, say equal_weights=False")


def _between_ranks(loss: Targets, there: Tensor) -> str:
    """How weights differ where each rank has one of its own; "" otherwise."""
    assert loss.owner is not None
    ranks: list[int] = loss.owner[there].unique().tolist()
    parts = {rank: loss.weight[there & (loss.owner == rank)] for rank in ranks}
    means = sorted((float(part.mean()), rank) for rank, part in parts.items())
    (low, least), (high, most) = means[0], means[-1]
    if not all(_alike(part, loss.precision) for part in parts.values()) or low <= 0:
        return ""
    sizes = len(parts[most]), len(parts[least])
    alike = _alike(torch.stack([part.sum() for part in parts.values()]), 0.01)
    own = f", as each divides by its own {sizes[0]} and {sizes[1]}: divide by the tokens of all (num_items_in_batch)"
    words = f"a token of rank {most} counts {high / low:.3g} times as much as one of rank {least}{own * alike}"
    return f"{words}; if that is meant, say equal_weights=False"


def _alike(values: Tensor, precision: float) -> bool:
    middle = float(values.mean())  # NaN equals nothing
    return bool(((values - middle).abs() <= precision * abs(middle)).all())


def between_batches(losses: list[Targets]) -> str | None:
    means = [float(loss.weight[loss.token >= 0].mean()) for loss in losses if (loss.token >= 0).any()]
    precision = max(loss.precision for loss in losses)
    if _alike(torch.tensor(means), precision):
        return None
    worst = means.index(max(means)), means.index(min(means))
    return (
        f"a token of micro-batch {worst[0]} counts {max(means) / min(means):.3g} times as much as one of micro-batch "
        f"{worst[1]}: divide by the tokens of all of them (num_items_in_batch)"
    )


def terms(loss: Targets, batch: Mapping[str, Any]) -> list[str]:
    there = loss.token >= 0
    weights, count = loss.weight[there], int(there.sum())
    lines: list[str] = []
    if count:
        lines.append(f"cross-entropy of {plural(count, 'token')}, {_normalised(weights, count, batch, loss)}")
    for name, values, usual in (("label smoothing", loss.smoothing, 0.0), ("temperature", loss.temperature, 1.0)):
        numbers = values[there][(values[there] - usual).abs() > loss.precision]
        if len(numbers):
            lines.append(f"{name} {numbers.median():.3g} at {plural(len(numbers), 'position')}")
    penalties = (loss.penalty / loss.weight)[there & (loss.penalty != 0)]
    if len(penalties):
        lines.append(f"z-loss: {penalties.median():.3g} x log(sum of exp(logits))^2 at {len(penalties)} positions")
    return [*lines, rest] if (rest := _rest(loss)[0]) else lines


def _normalised(weights: Tensor, count: int, batch: Mapping[str, Any], loss: Targets) -> str:
    precision, weight = loss.precision, float(weights.mean())
    if not _alike(weights, precision):
        return f"weights from {weights.min():.4g} to {weights.max():.4g}"
    items = batch.get("num_items_in_batch")
    whole = {"their mean": count, "their sum": 1}
    if items is not None:
        whole = {f"their sum over num_items_in_batch = {int(items)}": int(items)} | whole
    whole |= {f"their sum over all {size} positions": size for size in (loss.token.numel(), loss.token[:, 1:].numel())}
    fits = (words for words, n in whole.items() if n and abs(weight * n - 1) < precision)
    return next(fits, f"each times {weight:.4g}")


def _rest(targets: Targets) -> tuple[str, bool]:
    """(what the loss is beyond the positions, "" if nothing; whether the model's output names it)."""
    scale = max(abs(targets.loss), float(targets.value.abs().sum()))
    if not abs(targets.rest) > 2 * targets.precision * scale:  # NaN where some positions are not understood
        return "", True
    share = f"{targets.rest:.4g} of the loss {targets.loss:.4g}"
    for name, value in targets.scalars.items():
        if name != "loss" and value and any(word in name for word in ("aux", "router", "balanc", "z_loss")):
            kind = "a router's loss" if any(word in name for word in ("aux", "router", "balanc")) else "a penalty"
            return f"{kind}: {share} is {targets.rest / value:.3g} x {name}", True
    return f"{share} does not come from these logits: a router's loss, a penalty on weights or another head", False


def trained_runs(loss: Targets, labels: Tensor | None) -> tuple[Trained, ...]:
    runs: list[Trained] = []
    wanted = None if labels is None or loss.shift is None else moved(labels, loss.shift, IGNORED)
    for row, column in (loss.token >= 0).nonzero().tolist():
        weight = float(f"{float(loss.weight[row, column]):.4g}")
        right = wanted is not None and int(wanted[row, column]) == int(loss.token[row, column])
        label = loss.shift if right else None
        next_to = bool(runs) and (runs[-1].sequence, runs[-1].last, runs[-1].label) == (row, column - 1, label)
        if next_to and abs(runs[-1].weight - weight) <= 2 * loss.precision * abs(weight):
            runs[-1] = replace(runs[-1], last=column)
        else:
            runs.append(Trained(row, column, column, weight, label))
    return tuple(runs)
