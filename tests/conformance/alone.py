"""The cell "alone": rows of a padded batch and packed documents, against each run alone."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnflow as af
from tests.conformance import inputs as made
from tests.conformance import oracles
from tests.conformance.inputs import LENGTH, Inputs
from tests.conformance.miniature import NotBuilt, Wrong

_CLEAR, _LITTLE = (
    1e-3,
    1e-6,
)  # of the largest output: no rounding of float32 comes to the one, nor float64's to the other
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
            differ = _differ(model, call, places)
        except Exception:  # not a call of this class
            continue
        report = af.audit.check_alone(model, call)
        said = {(d.row, d.document) for d in report.differences}
        right = {(row, sum(other[0] == row and other[1] < start for other in places)) for row, start, _ in differ}
        pooled = {(d.row, d.document) for d in report.differences if d.column is None}
        if right - said and not report.uncompared:
            raise Wrong(f"{name}: {sorted(right - said)} differ from the row alone, and the report says {report!r}")
        if said - right - pooled:
            raise Wrong(f"{name}: false alarm: {report.differences[0]}")
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


def _differ(model: PreTrainedModel, call: Inputs, places: list[Place]) -> list[Place]:
    """The rows or documents whose outputs are others alone: clearly in float32, or a little and in float64, too."""
    distances = _distances(model, call, places)
    if any(_LITTLE < distance < _CLEAR for distance in distances):
        model, dtype = oracles.precise(model, call)
        exact = _distances(model, call, places) if dtype == torch.float64 else [0.0] * len(places)
        distances = [far if far > _CLEAR else near for far, near in zip(distances, exact, strict=True)]
    return [place for place, distance in zip(places, distances, strict=True) if distance > _LITTLE]


def _distances(model: PreTrainedModel, call: Inputs, places: list[Place]) -> list[float]:
    whole = _outputs(model, call)
    distances: list[float] = []
    for row, start, end in places:
        single: Inputs = {}
        for name, value in call.items():
            along = value.dim() > 1 and value.shape[1] == LENGTH and not name.startswith("decoder_")
            if name not in ("attention_mask", "position_ids"):
                single[name] = value[row : row + 1, start:end] if along else value[row : row + 1]
        distance = 0.0
        for together, alone in zip(whole, _outputs(model, single), strict=True):
            part = together[row] if together.shape[1] == alone.shape[1] else together[row, start:end]
            distance = max(distance, float((part - alone[0]).abs().amax() / alone.abs().amax().clamp(min=1e-9)))
        distances.append(distance)
    return distances


def _outputs(model: PreTrainedModel, call: Inputs) -> list[Tensor]:
    """What the model says at every position, and what its encoder does."""
    seen: list[Tensor] = []
    with torch.no_grad():
        result = model(**oracles.fitting(model, call))
    shape = call[oracles.stream(call)].shape
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    seen += [v for v in values if isinstance(v, Tensor) and v.shape[:2] == shape and v.is_floating_point()][:1]
    if not seen:
        raise NotBuilt(f"{type(model).__name__} returns no tensor of [batch, positions]")
    encoder = getattr(result, "encoder_last_hidden_state", None)
    return seen if encoder is None else [*seen, encoder]
