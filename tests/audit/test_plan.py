"""Fields and plans against definitions."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow.audit.fields import Fields, Relation, batch_sets, plan

EVERY = torch.ones(6, dtype=torch.bool)


def relations(n):
    return st.lists(st.booleans(), min_size=n * n, max_size=n * n).map(lambda b: torch.tensor(b).reshape(1, n, n))


def pairs_tested(field, passes):
    """Pairs (i, j) that some pass tests, from the definition."""
    found = set()
    for selected in passes:
        for i, row in enumerate(field):
            if not (row & selected).any():
                found |= {(i, j) for j in selected.nonzero().flatten().tolist()}
    return found


@given(st.lists(relations(6), min_size=1, max_size=3), st.integers(1, 12))
@settings(max_examples=100)
def test_coverage_is_what_the_passes_test(layers, passes):
    fields = Fields(Relation(tuple(layers), False, "random"), 1)
    made = plan(fields, {len(layers): EVERY}, passes)
    assert len(made.passes) <= passes
    reach = torch.eye(6, dtype=torch.bool)
    for allow in layers:
        reach = ((allow[0] | torch.eye(6, dtype=torch.bool)).int() @ reach.int()) > 0
    assert torch.equal(fields.at(len(layers))[0], reach)
    forbidden = {(i, j) for i, j in itertools.product(range(6), repeat=2) if not reach[i, j]}
    assert pairs_tested(reach, [p[0] for p in made.passes]) <= forbidden
    if passes >= 12:  # as many as there are positions, twice over
        assert made.coverage == 1.0
        assert pairs_tested(reach, [p[0] for p in made.passes]) == forbidden


@pytest.mark.parametrize("n", [2, 7, 20])
def test_cuts_are_exhaustive_for_a_causal_order(n):
    fields = Fields(Relation((af.masks.causal(n).dense()[None],), True, "causal"), 3)
    everywhere = torch.ones(n, dtype=torch.bool)
    made = plan(fields, {1: everywhere, 2: everywhere, 4: everywhere}, 100)
    assert len(made.passes) == n - 1
    assert made.coverage == 1.0
    assert made.forbidden == 3 * n * (n - 1) // 2
    few = plan(fields, {4: everywhere}, 1)
    assert len(few.passes) == 1
    assert 0.4 < few.coverage <= 1.0


def test_nothing_forbidden_needs_no_pass():
    made = plan(Fields(Relation((torch.ones(1, 5, 5, dtype=torch.bool),), True, "full"), 2), {3: EVERY[:5]}, 32)
    assert (made.passes, made.coverage, made.forbidden) == ((), 1.0, 0)


def test_clean_rows_are_those_that_read_nothing_changed():
    mask = af.masks.sliding_window(8, 3)
    fields = Fields(Relation((mask.dense()[None],), True, "window"), 1)
    selected = torch.zeros(1, 8, dtype=torch.bool)
    selected[0, 3] = True
    for depth in (1, 2):
        reads = af.order.analyze(mask).reachability(depth)[:, 3]
        assert torch.equal(fields.clean(depth, selected)[0], ~reads)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_every_pair_of_sequences_is_told_apart(batch):
    sets = batch_sets(batch, 4)
    pairs = {(a, b) for s in sets for a in range(batch) for b in range(batch) if s[a].all() and not s[b].any()}
    assert pairs == {(a, b) for a in range(batch) for b in range(batch) if a != b}
    assert len(sets) == 2 * (batch - 1).bit_length()


def test_pairs_that_nobody_sees_are_not_counted():
    fields = Fields(Relation((af.masks.causal(6).dense()[None],), True, "causal"), 1)
    made = plan(fields, {1: torch.arange(6) < 3}, 32)
    assert made.forbidden == 5 + 4 + 3
    assert made.coverage == 1.0
    assert len(made.passes) == 3
