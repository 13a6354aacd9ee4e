"""Audits of models under masks by sequence and by head, whether fixed or brought by each batch."""

import pytest
import torch

import attnflow as af
from tests.models import tiny, tokens

masks = af.masks
GRID = masks.batch([masks.sliding_window(7, 2), masks.document([2, 3]), masks.block_two_stream(4, 1)])
HEADS = masks.per_head(
    [masks.causal(6), masks.sliding_window(6, 2), masks.causal(6), masks.full(6)[:6, :6] & masks.causal(6)]
)


def batch_of(grid, sequences=3):
    size = grid.num_queries
    positions = torch.arange(size).expand(sequences, -1)
    return {"input_ids": tokens(sequences, size), "position_ids": positions, "attention_mask": grid.row_intervals()}


@pytest.mark.parametrize("order", ["mask", GRID, [GRID, GRID]], ids=["mask", "grid", "by layer"])
def test_a_batch_keeps_to_its_own_masks(order):
    model = tiny("Llama")
    with masks.attach(model, "batch"):
        report = af.audit.check(model, batch_of(GRID), order=order)
    assert report.ok, str(report)
    assert report.coverage == 1.0


def test_what_flows_in_one_sequence_alone_is_found_there():
    """The second sequence may read less than the batch lets it."""
    model = tiny("Llama")
    narrower = masks.batch([GRID[0, 0], masks.document([2, 1, 2]), GRID[2, 0]], size=GRID.num_queries)
    with masks.attach(model, "batch"):
        report = af.audit.check(model, batch_of(GRID), order=narrower)
    assert not report.ok
    assert {violation.target_row for violation in report.violations} == {1}


def test_heads_are_audited_against_their_union():
    model, ids = tiny("Llama"), tokens(2, 6)
    with masks.attach(model, HEADS):
        assert af.audit.check(model, ids, order=HEADS).ok
        assert not af.audit.check(model, ids, order=masks.per_head([masks.sliding_window(6, 2)])).ok


def test_a_guard_reads_the_masks_of_each_batch():
    model = tiny("Llama")
    with masks.attach(model, "batch"):
        for order in ("mask", GRID):
            with af.audit.guard(model, order=order) as guard:
                model(**batch_of(GRID))
            assert guard.ok
        with af.audit.guard(model, order=masks.batch([masks.sliding_window(7, 1)])), pytest.raises(af.LeakFound):
            model(**batch_of(GRID))


def test_a_batch_of_row_intervals_is_read_before_it_trains():
    """`check_batch` sees the pairs, and the labels that they let leak."""
    collate = af.tasks.Collator(af.tasks.causal_lm, masks="intervals")
    batch = collate([[5, 6, 7, 8], [5, 6]])
    assert af.audit.check_batch(batch).ok
    batch["attention_mask"] = masks.batch([masks.full(3)] * 2).row_intervals()
    assert not af.audit.check_batch(batch).ok
