"""How far an edit can move what a layer writes, by how far the layer's input is from those of the edited facts.

An edit changes values by dV and leaves keys alone, so at an input h the output moves by s(h) = a(h) dV. The weights are
a = act(g) for scores g = K h + b, and act(g) u in a gated layer. Let h = h0 + r, and let r add g' and u' to the scores.
Then act(g + g') = act(g) + act'(g) g' + e, where |e| <= B g'^2 / 2 if |act''| <= B, and |e| <= |g'| for ReLU. So s(h)
is s(h0), plus the gradient J at h0 times r, plus at most the sum of |dv_i| (|e_i u_i| + L |g'_i u'_i|), as |act'| <= L:

    |s(h)| <= shift + slope |r| + bend |r|^2

with the norm of s(h0), that of J, and the largest eigenvalue of the quadratic form in r. A linear bound of e adds to
the slope. Of several h0, the largest of each number is taken, and r is the distance to the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from attnflow.knowledge.base import EntryColumns
from attnflow.knowledge.editing.edit_targets import Layers, Spot
from attnflow.knowledge.editing.facts import ShiftBound
from attnflow.knowledge.editing.inputs import inputs_everywhere
from attnflow.knowledge.editing.stack import factors
from attnflow.knowledge.layered import EntryScores
from attnflow.models.subject import Subject

_ACTIVATIONS: Final = (  # each with L, B and the largest |e / g'| where e has no quadratic bound
    (functional.silu, 1.1, 0.5, 0.0),
    (functional.gelu, 1.13, 0.8, 0.0),
    (partial(functional.gelu, approximate="tanh"), 1.13, 0.8, 0.0),
    (functional.relu, 1.0, 0.0, 1.0),
)
_CLOSE: Final = 0.02  # of the norm of weights: by how much lower precision may miss the activation's


def shift_bound(
    layer: int,
    columns: EntryColumns,
    change: Float[Tensor, "entries model_dim"],
    inputs: Float[Tensor, "places model_dim"],
    weights: Float[Tensor, "places entries"],
) -> ShiftBound | None:
    """Bound what a change of values adds; None for an activation that is not known, as the weights show."""
    keys = [key.detach().double().cpu() for key in columns.keys.values()]
    offsets = [threshold.detach().double().cpu() for threshold in columns.thresholds.values()]
    scores, *gated = [inputs @ key.T + offset for key, offset in zip(keys, offsets, strict=True)]
    up = gated[0] if gated else torch.ones_like(scores)
    misses = [float((act(scores) * up - weights).norm() / weights.norm()) for act, *_ in _ACTIVATIONS]
    if not min(misses) <= _CLOSE:
        return None
    act, steepest, curvature, linear = _ACTIVATIONS[misses.index(min(misses))]
    with torch.enable_grad():
        scores = scores.detach().requires_grad_()
        (rises,) = torch.autograd.grad(act(scores).sum(), scores)
    left, right = factors(change)
    turn = torch.linalg.qr(right.T).R @ left.T  # |turn x| = |change^T x|
    slope = 0.0
    for rise, fires in zip(rises * up, act(scores.detach()), strict=True):
        jacobian = (turn * rise) @ keys[0] + ((turn * fires) @ keys[1] if gated else 0)
        slope = max(slope, float(torch.linalg.matrix_norm(jacobian, 2)))
    sizes = change.norm(dim=1)
    share = sizes * up.abs().amax(dim=0)
    cross = sizes * steepest / 2  # |g' u'| <= (g'^2 + u'^2) / 2
    slope += linear * (float(share.sum()) * _largest(keys[0], share)) ** 0.5
    bend = _largest(
        torch.cat(keys), torch.cat([share * curvature / 2 + cross, cross] if gated else [share * curvature / 2])
    )
    return ShiftBound(layer, float((weights @ change).norm(dim=1).max()), slope, bend)


def _largest(rows: Tensor, weights: Tensor) -> float:
    """The largest eigenvalue of rows^T diag(weights) rows, with what rounding may take from it."""
    return float(torch.linalg.eigvalsh(rows.T @ (weights[:, None] * rows))[-1].clamp_min(0)) * (1 + 1e-9)


@torch.no_grad()
def certificate(
    subject: Subject,
    layers: Layers,
    changes: Mapping[int, Tensor],
    places: Sequence[Spot],
    texts: Sequence[Sequence[int]],
) -> tuple[ShiftBound, ...]:
    """Bound what an edit adds to each layer, about some places, and check that at all tokens of some texts."""
    queries = {m.layer: m for m in subject.model.modules() if isinstance(m, EntryScores)}
    modules = {(layer, part): part for layer in layers for part in (queries[layer], layers[layer])}
    lengths = torch.tensor([len(spot.ids) for spot in places])
    rows = lengths.cumsum(0) - lengths + torch.tensor([spot.position for spot in places])
    here, there = (inputs_everywhere(subject, modules, ids) for ids in ([spot.ids for spot in places], texts))
    bounds: list[ShiftBound] = []
    for layer, values in layers.items():
        keys, change = [(layer, queries[layer]), (layer, values)], changes[layer]
        inputs, weights = (here[key][rows] for key in keys)
        found = shift_bound(layer, values.base.columns(layer), change, inputs, weights)
        if found is not None and texts:
            others, weights = (there[key] for key in keys)
            ratios = (weights @ change).norm(dim=1) / found.bound(torch.cdist(others, inputs).amin(dim=1))
            found = replace(found, checked=len(ratios), largest_ratio=float(ratios.max()))
        bounds += [] if found is None else [found]
    return tuple(bounds)
