"""The cell "loss": what the loss of a class trains, against autograd with one label at a time.

With one label, the position of the logits whose gradient is not zero is the one that predicts it. The weight of a label
among all of them is the share of softmax less one-hot in the gradient there. Nothing here reads a loss as the package
does; mistakes are then put in, and must be found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, pad
from transformers import PreTrainedModel

import attnflow as af
from tests.conformance import inputs as made
from tests.conformance import oracles
from tests.conformance.inputs import LENGTH, Inputs
from tests.conformance.miniature import NotBuilt, Wrong

IGNORED = -100
_HIDDEN = 4  # the token that hides others, of models that read both ways
_CLOSE = 1e-2
Step = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Trained:
    """A label, the position that it trains (None if that is not one token's loss), and its weight among the others."""

    row: int
    column: int
    position: int | None
    weight: float | None = None  # None where rounding hides it


def loss_read(model: PreTrainedModel) -> str:
    """On a right batch: the positions, tokens and weights that autograd shows. On wrong ones: a mistake."""
    if "labels" not in inspect.signature(model.forward).parameters:
        raise NotBuilt("takes no labels")
    batch = _right(model)
    truth = _trained(model, batch)
    plain = all(label.position is not None for label in truth)
    report = af.audit.check_loss(model, batch)
    if not plain:
        if report.ok:
            raise Wrong("false clean: labels do not train one position each, and the report says no mistake")
        return f"{report.verdict}: labels do not train one position each"
    shown = {(r.sequence, at): r for r in report.trained for at in range(r.first, r.last + 1)}
    for label in truth:
        run = shown.pop((label.row, label.position), None)
        if run is None or (label.weight is not None and abs(run.weight / label.weight - 1) > _CLOSE):
            raise Wrong(f"{label} is shown as {run}; {report.untested}")
        if run.label != label.column - label.position:
            raise Wrong(f"{label} is shown as {run}")
    if shown:
        raise Wrong(f"not trained by any label, and shown: {next(iter(shown.values()))}")
    if report.mistakes:
        raise Wrong(f"false alarm: {report.mistakes[0]}")
    if not report.ok:
        return f"{report.verdict}: {report.untested}"
    for name, step, other in _mistakes(model, batch, truth):
        found = af.audit.check_loss(step, other, model)
        if not found.mistakes:
            raise Wrong(f"{name}: {found.verdict} {found.untested}")
    return f"{report.loss[0]}; {report.trained[0].label}" + "".join(f"; {term}" for term in report.loss[1:])


def _right(model: PreTrainedModel) -> Inputs:
    """A batch that is right: each label is the next token, or one that is hidden."""
    if not made.is_text(model):
        raise NotBuilt(f"reads {model.main_input_name}")
    inputs = made.text(model, batch=2)
    if inputs.pop("decoder_input_ids", None) is not None:
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(model.config, name, None) is None:
                setattr(model.config, name, 1)
        labels = made.ids(LENGTH - 2, seed=3, batch=2)
        labels[1, 6:] = IGNORED
        return inputs | {"labels": labels}
    ids = inputs["input_ids"]
    both = type(model).__name__.endswith("ForMaskedLM") or _reads_later(model, inputs)
    where = _trained(model, inputs | {"labels": _only(ids, [(0, 6)])})
    shift = 1 if where[0].position is None else 6 - where[0].position
    if both:
        hidden = (torch.arange(LENGTH) % 3 == 1).expand(2, -1).clone()
        hidden[1, 9:] = False
        hidden[:, 0] = False
        return inputs | {"input_ids": ids.masked_fill(hidden, _HIDDEN), "labels": ids.where(hidden, IGNORED)}
    ahead = ids.roll(shift - 1, 1)  # label i is what follows the position i - shift
    first = 4 + shift
    labels = ahead.where(torch.arange(LENGTH) >= first, IGNORED)
    labels[1, :7] = IGNORED
    if shift < 1:
        labels[:, shift - 1 :] = IGNORED
    return inputs | {"labels": labels}


def _reads_later(model: PreTrainedModel, inputs: Inputs) -> bool:
    """Whether outputs move with a later token, of some."""
    model, dtype = oracles.precise(model, inputs)
    before = oracles.output(model, inputs)
    for place in (LENGTH // 4, LENGTH // 2, LENGTH - 1):
        ids = inputs["input_ids"].clone()
        ids[:, place] = made.LOWEST + (ids[:, place] - made.LOWEST + 7) % (made.HIGHEST - made.LOWEST)
        moved = (before - oracles.output(model, inputs | {"input_ids": ids}))[:, :place].abs().amax()
        if moved > oracles.MOVED[dtype] * before.abs().amax():
            return True
    return False


def _only(labels: Tensor, places: list[tuple[int, int]]) -> Tensor:
    single = torch.full_like(labels, IGNORED)
    for row, column in places:
        single[row, column] = labels[row, column]
    return single


def _trained(model: PreTrainedModel, batch: Inputs) -> list[Trained]:
    """Each label of the batch, by itself and among the others."""
    labels = batch["labels"]
    logits, whole = _gradient(model, batch)
    n = labels.shape[1]
    before = logits.shape[1] - n  # images and virtual tokens stand before
    found: list[Trained] = []
    for row, column in (labels != IGNORED).nonzero().tolist():
        other = batch | {"labels": _only(labels, [(row, column)])}
        alone, single = _gradient(model, {name: value[row : row + 1] for name, value in other.items()})
        moved = (single.abs().amax(-1) > 1e-6 * single.abs().amax()).nonzero()
        position = weight = None
        if len(moved) == 1:
            at = int(moved[0, 1])
            away = [z[at].softmax(-1) - one_hot(labels[row, column], z.shape[-1]) for z in (alone[0], logits[row])]
            pairs = zip((single[0], whole[row]), away, strict=True)
            shares = [float(g[at] @ d / d.square().sum()) for g, d in pairs]
            if (single[0, at] - shares[0] * away[0]).abs().amax() < _CLOSE * single.abs().amax():
                told = float(away[1].abs().amax()) > _CLOSE**2  # else the label has all the probability
                position, weight = at - before, shares[1] if told else None
        found.append(Trained(row, column, position, weight))
    return found


def _gradient(model: PreTrainedModel, batch: Inputs) -> tuple[Tensor, Tensor]:
    """(logits, gradient of the loss by them), float64 [batch, positions, vocabulary]."""
    try:
        result = model(**batch)
    except Exception as error:
        raise NotBuilt(f"no loss of these labels: {type(error).__name__}: {error}") from error
    loss, rows = result.get("loss"), len(batch["labels"])
    if loss is None or loss.numel() != 1 or not loss.requires_grad:
        raise NotBuilt("returns no loss of one number")
    for value in result.to_tuple()[1:]:
        if isinstance(value, Tensor) and value.requires_grad and value.dim() == 3 and value.shape[0] == rows:
            (gradient,) = torch.autograd.grad(loss, value, allow_unused=True, retain_graph=True)
            if gradient is not None and value.shape[-1] > int(batch["labels"].max()):
                return value.detach().double(), gradient.double()
    raise NotBuilt("its loss does not come of logits [batch, positions, vocabulary] that it returns")


def _mistakes(model: PreTrainedModel, batch: Inputs, truth: list[Trained]) -> Iterator[tuple[str, Any, Inputs]]:
    labels, taken = batch["labels"], inspect.signature(model.forward).parameters
    masked = bool((batch["input_ids"] == _HIDDEN).any())
    decoder = getattr(model.config, "is_encoder_decoder", False)
    if masked:
        ids = batch["input_ids"].where(labels == IGNORED, labels)
        yield "nothing is hidden", model, batch | {"input_ids": ids, "labels": ids}
    elif not decoder:
        yield "shifted once more", model, batch | {"labels": pad(labels[:, 1:], (0, 1), value=IGNORED)}
    elif "decoder_input_ids" in taken:
        there = labels.where(labels != IGNORED, 1)
        yield "labels are the decoder's ids", model, batch | {"labels": there, "decoder_input_ids": there}
    if "attention_mask" in taken and not decoder:
        mask = torch.ones_like(batch["input_ids"])
        last = max(label.column for label in truth if label.row == 1)
        mask[1, last:] = 0
        padded = batch | {"attention_mask": mask}
        alone = _gradient(model, padded | {"labels": _only(labels, [(1, last), (0, 0)])})[1]
        if alone[1].any():  # some models leave out such labels themselves
            yield "a label on padding", model, padded
    rows = [sum(other.row == label.row for other in truth) for label in truth]
    yield "a mean for each row", _written(model, truth, [1 / count for count in rows]), batch
    left = next((label for label in truth if label.weight is not None), truth[0])
    yield "a label is left out", _written(model, truth, [float(label != left) for label in truth]), batch
    yield "other tokens", _written(model, truth, [1.0] * len(truth), 1), batch


def _written(model: PreTrainedModel, truth: list[Trained], weights: list[float], add: int = 0) -> Step:
    """The loss of the labels, weighed, from the logits of the model."""

    def step(batch: Inputs) -> Tensor:
        logits = model(**batch).logits
        before = logits.shape[1] - batch["labels"].shape[1]
        terms = [
            weight * cross_entropy(logits[t.row, before + (t.position or 0)], batch["labels"][t.row, t.column] + add)
            for t, weight in zip(truth, weights, strict=True)
            if weight
        ]
        return torch.stack(terms).sum()

    return step
