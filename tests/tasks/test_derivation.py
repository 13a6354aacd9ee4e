"""Families by name: merged, compared with their closed forms, proved free of leaks."""

import json

import pytest

from attnflow import tasks
from attnflow.tasks import derivation
from attnflow.tasks.derivation import Derivation, derive, named_families


@pytest.mark.parametrize(
    ("family", "num_tokens", "parameters", "size", "nodes"),
    [
        ("causal_lm", 9, {}, 8, 8),
        ("multi_token_prediction", 9, {"horizon": 3}, 8, 8),
        ("block_two_stream", 12, {"block": 3}, 18, 6),
        ("block_two_stream", 12, {"block": 3, "predict_first": True}, 21, 7),
        ("butterfly", 7, {}, 19, 19),
        ("masked_lm", 6, {"masked": [1, 4]}, 6, 1),
        ("permutation_lm", 5, {"permutation": [3, 1, 4, 0, 2]}, 9, 9),
        ("block_diffusion", 12, {"block": 3}, 21, 7),
        ("block_diffusion", 12, {"block": 3, "masked": [0, 4, 7, 11]}, 21, 7),
    ],
)
def test_every_family_merges_to_its_closed_form(family, num_tokens, parameters, size, nodes):
    made = derive(family, num_tokens, **parameters)
    assert made.ok
    assert made.equals_closed_form is True
    assert (made.merged.task.size, len(made.merged.nodes), made.merged.lower_bound) == (size, nodes, nodes)
    assert f"equal to {made.closed_form}" in str(made)
    assert Derivation.from_json(made.to_json()) == made
    assert tasks.Task.from_dict(json.loads(made.to_json())["task"]) == made.merged.task


def test_a_family_without_a_formula():
    made = derive("block_diffusion", 12, block=3, masked=[0, 4])
    assert made.ok
    assert (made.closed_form, made.equals_closed_form) == (None, None)
    assert "none is known for block_diffusion(12 tokens, block=3, masked=[0, 4])" in str(made)


def test_a_difference_from_the_formula_is_not_ok(monkeypatch):
    monkeypatch.setattr(derivation, "_closed_form", lambda *_: ("as printed", tasks.families.butterfly_as_printed(6)))
    made = derive("butterfly", 6)
    assert not made.ok
    assert "DIFFERENT from as printed" in str(made)


def test_every_family_of_the_library_has_its_name():
    assert all(getattr(tasks, name) is each.function for name, each in named_families().items())
    assert named_families()["block_two_stream"].signature.startswith("block_two_stream(tokens, block, ")
