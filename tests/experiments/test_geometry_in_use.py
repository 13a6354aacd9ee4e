"""The measurement of the geometry in use: white tokens give the weights' scores back, ends go, intervals hold."""

import math

import numpy as np

from experiments.geometry_in_use.recipe import _judged
from experiments.geometry_in_use.summary import over_layers


def test_intervals_over_layers_hold_what_they_should():
    """Heads of a layer share a third of their variance; 95 % of intervals hold the true rank correlation."""
    draw = np.random.default_rng(1)
    layers = np.repeat(np.arange(6), 12)
    held = 0
    for _ in range(150):
        shared, own = (draw.multivariate_normal([0, 0], [[1, 0.5], [0.5, 1]], size=size) for size in (6, 72))
        one, other = (0.3**0.5 * shared[layers] + 0.7**0.5 * own).T
        found = over_layers(one, other, layers)
        held += found.low <= 6 / math.pi * math.asin(0.25) <= found.high
    assert 0.88 <= held / 150 <= 1


def judged(white, *towers):
    rows = [
        {"score": "symmetry", "which": which, "weights and use": list(numbers)}
        for which, numbers in zip(("all tokens", "without ends"), towers[:2], strict=True)
    ]
    return _judged("G33", {"a": {"white": {"symmetry, many": [white, 0, 1]}, "rows": rows}}, "symmetry").verdict


def test_the_rule_of_the_verdict():
    high, some, none, other = (0.7, 0.6, 0.8), (0.4, 0.2, 0.6), (0.1, -0.1, 0.3), (-0.3, -0.6, -0.1)
    assert judged(0.99, high, high) == "confirmed"
    assert judged(0.99, high, some) == "not confirmed"
    assert judged(0.99, high, none) == "not confirmed"
    assert judged(0.99, none, none) == "no effect"
    assert judged(0.99, other, other) == "refuted"
    assert judged(0.99, (0.4, -0.5, 0.9), (0.4, -0.5, 0.9)) == "not confirmed"
    assert judged(0.8, high, high) == "not testable here"
