"""Which entries are kept, and when all are read."""

import pytest
import torch

from attnflow.knowledge import Retrieval
from attnflow.knowledge.retrieval import best


@pytest.mark.parametrize(
    ("retrieval", "total", "queries", "training", "expected"),
    [
        (Retrieval(k=10, search="dense"), 99, 1, False, True),
        (Retrieval(k=10, search="dense"), 99, 1, True, True),
        (Retrieval(threshold=0.0, search="dense"), 99, 1, True, True),
        (Retrieval(k=99, search="exact"), 99, 1, True, True),
        (Retrieval(k=98, search="exact"), 99, 1, False, False),
        (Retrieval(k=24), 99, 1, False, False),
        (Retrieval(k=25), 99, 1, False, True),
        (Retrieval(k=25), 99, 1, True, False),  # what is trained is the function of k entries
        (Retrieval(k=6), 99, 128, False, False),
        (Retrieval(k=7), 99, 128, False, True),
        (Retrieval(threshold=0.0), 99, 128, False, False),
    ],
)
def test_when_all_entries_are_read(retrieval, total, queries, training, expected):
    assert retrieval.reads_all(total, queries, training) is expected


@pytest.mark.parametrize(("queries", "most"), [(1, 1024), (8, 64), (9, 16)])
def test_a_source_that_copies_is_left_sooner(queries, most):
    """`most` of 4,096 entries are as slow to copy as all are to read."""
    assert Retrieval(k=most).reads_all(4096, queries, copied=True)
    assert not Retrieval(k=most - 1).reads_all(4096, queries, copied=True)


def test_what_scores_as_much_as_the_threshold_is_left_out():
    rows = best(torch.tensor([[0.5, 1.0, 0.5, -1.0], [0.5, 1.0, 2.0, -1.0]]), Retrieval(threshold=0.5))
    assert rows.tolist() == [[1, -1], [2, 1]]
