"""The cell "alone": rows of a padded batch and packed documents, against each run alone."""

from __future__ import annotations

import inspect

from torch import Tensor
from transformers import PreTrainedModel

import attnflow as af
from tests.conformance import inputs as made
from tests.conformance import oracles
from tests.conformance.inputs import LENGTH, Inputs
from tests.conformance.miniature import NotBuilt

_ROUNDING = 1e-4  # of the largest output, in float32
Place = tuple[int, int, int]  # row, start, end


def rows_alone(model: PreTrainedModel) -> str:
    """Padding on the right and on the left, packed documents: where outputs differ from a row alone, it is found."""
    if not made.is_text(model):
        raise NotBuilt(f"reads {model.main_input_name}")
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False  # as in training: beside a cache, packed documents mix in most families
    answers: list[str] = []
    for name, (call, places) in _calls(model).items():
        try:
            differ = [place for place in places if _differs(model, call, place)]
        except Exception:  # not a call of this class
            continue
        report = af.audit.check_alone(model, call)
        said = {(d.row, d.document) for d in report.differences}
        right = {(row, sum(other[0] == row and other[1] < start for other in places)) for row, start, _ in differ}
        pooled = {(d.row, d.document) for d in report.differences if d.column is None}
        if right - said and not report.uncompared:
            raise _wrong(f"{name}: {sorted(right - said)} differ from the row alone, and the report says {report!r}")
        if said - right - pooled:
            raise _wrong(f"{name}: false alarm: {report.differences[0]}")
        answers.append(f"{name}: {report.verdict}")
    if not answers:
        raise NotBuilt("no padded or packed call runs, in a batch and alone")
    return "; ".join(answers)


def _calls(model: PreTrainedModel) -> dict[str, tuple[Inputs, list[Place]]]:
    left = made.padded(model) | made.beside(model, 2)
    right = dict(left)
    right["input_ids"], right["attention_mask"] = left["input_ids"].roll(-3, 1), left["attention_mask"].roll(-3, 1)
    right["input_ids"][0] = left["input_ids"][0]
    calls = {"left": (left, [(0, 0, LENGTH), (1, 3, LENGTH)]), "right": (right, [(0, 0, LENGTH), (1, 0, LENGTH - 3)])}
    if getattr(model.config, "is_encoder_decoder", False):
        decoder = {"decoder_input_ids": made.ids(LENGTH - 2, seed=1, batch=2)}
        calls = {name: (call | decoder, places) for name, (call, places) in calls.items()}
    elif "position_ids" in inspect.signature(model.forward).parameters:
        calls["packed"] = made.packed() | made.beside(model), [(0, 0, 4), (0, 4, 12)]
    taken = inspect.signature(model.forward).parameters
    return {
        name: ({n: v for n, v in call.items() if n in taken}, places)
        for name, (call, places) in calls.items()
        if name == "packed" or "attention_mask" in taken
    }


def _differs(model: PreTrainedModel, call: Inputs, place: Place) -> bool:
    """Whether the output of a row or document is another one alone, in float32 and, where it runs, in float64."""
    double, dtype = oracles.precise(model, call)
    float32 = _distance(model, call, place)
    return float32 > (dtype.itemsize == 4) * _ROUNDING and (
        float32 > _ROUNDING or _distance(double, call, place) > 1e-6
    )


def _distance(model: PreTrainedModel, call: Inputs, place: Place) -> float:
    row, start, end = place
    single: dict[str, Tensor] = {}
    for name, value in call.items():
        if name in ("attention_mask", "position_ids"):
            continue
        value = value[row : row + 1]
        along = value.dim() > 1 and value.shape[1] == LENGTH and not name.startswith("decoder_")
        single[name] = value[:, start:end] if along else value
    whole = oracles.output(model, call)[row]
    alone = oracles.output(model, single)[0]
    part = whole if "decoder_input_ids" in call else whole[start:end]
    return float((part - alone).abs().amax() / alone.abs().amax().clamp(min=1e-9))


def _wrong(message: str) -> Exception:
    from tests.conformance.cells import Wrong  # which imports this file

    return Wrong(message)
