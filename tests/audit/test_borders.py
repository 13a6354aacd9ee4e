"""Leaks that live at one border of a block, where kernels go wrong, are found with few passes."""

import pytest
import torch

import attnflow as af
from attnflow.audit import audit, check
from attnflow.audit.fields import Fields, Relation, plan
from tests.leaks.borders import at
from tests.leaks.models import Net
from tests.leaks.parts import VOCABULARY
from tests.models import deep

SIZE = 200


BORDERS = {
    "the first position": [0],
    "the last position": [SIZE - 2],
    "the first row of every chunk of 16": list(range(16, SIZE - 1, 16)),
    "the last row of every chunk of 16": list(range(15, SIZE - 1, 16)),
    "the first row of every chunk of 64": list(range(64, SIZE - 1, 64)),
    "the last row of every chunk of 64": list(range(63, SIZE - 1, 64)),
    "the first row of the second chunk of 16": [16],
    "the last row of the first chunk of 64": [63],
    "the first row of an unfinished chunk": [192],
}


def report_on(rows, mode="perturb", passes=8, **more):
    ids = torch.randint(VOCABULARY, (1, SIZE), generator=torch.Generator().manual_seed(0))
    return check(Net(at(rows)).eval(), ids, af.masks.causal(SIZE), mode, passes=passes, **more)


@pytest.mark.parametrize("name", BORDERS)
def test_a_leak_at_a_border(name, mode):
    found = report_on(BORDERS[name], mode).violations[0]
    assert found.source == found.target + 1
    assert found.target in BORDERS[name]


def test_how_many_passes_that_takes():
    clean = report_on([], passes=8, both_sides=False)
    assert clean.ok
    assert clean.forward_passes <= 5 + 8 + 12
    assert clean.coverage > 0.85


@pytest.mark.parametrize("row", [32, 47, 112, 143])
def test_every_block_of_sixteen_within_the_usual_passes(row):
    assert report_on([row], passes=32).violations[0].target == row


@pytest.mark.parametrize("rows", [range(64, SIZE - 1, 64), range(63, SIZE - 1, 64), range(15, SIZE - 1, 16)])
def test_large_models_in_three_forwards(monkeypatch, rows):
    monkeypatch.setattr(audit, "_CHEAP", 0)
    assert report_on([], "quick").forward_passes == 3
    assert report_on(list(rows), "quick").verdict == "leak"


def test_blocks_of_a_decoder_and_of_packed_documents():
    """Joint positions of two runs, and documents whose own blocks begin anywhere."""

    def cuts(allow, passes, runs=()):
        size = len(allow)
        fields = Fields(Relation((allow[None],), True, "test"), 1)
        made = plan(fields, {-1: torch.ones(size, dtype=torch.bool)}, passes, runs, beyond=True)
        return {tuple(selected[0].nonzero()[:, 0].tolist()) for selected in made.passes}

    joint = torch.ones(90, 90, dtype=torch.bool).tril()
    joint[:50, :50] = True
    assert {tuple(range(row + 1, 90)) for row in (50, 65, 66, 88)} <= cuts(joint, 4, [(0, 50), (50, 90)])
    packed = af.masks.document([45, 45]).dense()
    assert tuple(range(45)) + tuple(range(62, 90)) in cuts(packed, 32)  # the second document's row 16 reads ahead


@pytest.mark.parametrize(
    "order",
    [
        af.masks.sliding_window(11, 4),
        af.masks.dilated_window(11, 3, 2),
        af.masks.attention_sink(11, 3, 1),
    ],
    ids=lambda order: order.name,
)
@pytest.mark.parametrize("passes", [1, 4])
def test_few_passes_test_what_only_the_first_layers_may_not_read(order, passes):
    """These fields grow with each layer, and the cuts at borders follow the last of them."""
    ids = torch.arange(5, 5 + order.num_queries)[None]
    report = check(deep("Llama"), ids, order=order, passes=passes)
    assert [violation.kind for violation in report.violations][:1] == ["order"]
    assert report.violations[0].layer == 0
