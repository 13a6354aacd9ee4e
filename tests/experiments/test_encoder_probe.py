"""The probe of encoders sees a planted link, its language is what it says, and symmetry is measured as it is proved."""

import pytest

from experiments.encoder_probe.recipe import _links, _symmetry
from experiments.runner.statistics import Interval


def judged(points, gain, plain=0.1, way=0.1):
    found = {"B, effect and cause, one way: less half": way}
    for kind, head in (("verb", "subject"), ("pronoun", "antecedent"), ("effect", "cause")):
        found |= {f"B, {kind} to {head}: less {other}": points for other in ("half", "random")}
        found[f"scores of plain, {kind} to {head}: less half"] = plain
    found |= {f"right, far: guidance less {arm}": gain for arm in ("plain", "key", "dense")}
    (one,) = _links({name: Interval(mean, mean - 0.05, mean + 0.05) for name, mean in found.items()})
    return one.verdict, one.tags


def test_links_are_judged_by_intervals():
    assert judged(0.2, 0.1, plain=0.0) == ("confirmed", ())
    assert judged(0.2, 0.1) == ("confirmed", ("empty",))
    assert judged(0.2, 0.0, plain=0.0) == ("not confirmed", ())
    assert judged(0.2, 0.1, plain=0.0, way=-0.1) == ("corrected", ())
    assert judged(0.0, -0.1, way=-0.1) == ("not confirmed", ("empty",))
    assert judged(-0.2, 0.1) == ("refuted", ("empty",))


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.2, 0.4, "refuted"), (0.0, 0.005, "confirmed"), (-0.01, 0.3, "not confirmed")]
)
def test_symmetry_is_judged_by_the_mean_over_layers(low, high, verdict):
    numbers = {name: [(low + high) / 2, low, high, low] for name in ("scores", "double-centred", "weights")}
    content = {"encoder": "minilm", "sentences": 2, "heads": {name: {"words": numbers} for name in ("real", "random")}}
    content["layers"] = {"words": {name: one[:3] for name, one in numbers.items()}}
    (one,) = _symmetry(content)
    assert (one.claim, one.verdict) == ("D27", verdict)
    assert _symmetry({**content, "encoder": "untrained"}) == []
