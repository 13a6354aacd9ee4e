"""Every pair of features that runs in one process and compiles nothing: none is worse than in the committed table."""

from __future__ import annotations

import pytest

from tests.conformance.features import DISTRIBUTED, FEATURES
from tests.conformance.pairs import PAIRS, cell, read

SLOW = {*DISTRIBUTED, "torch.compile"}


def test_the_committed_table_has_every_pair_and_none_is_wrong_or_unclear() -> None:
    table = read()
    assert set(table) == set(PAIRS)
    assert {one.code for one in table.values()} <= {"works", "refused", "none"}
    assert all(one.reason for one in table.values() if one.code != "works")


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in SLOW])
@pytest.mark.slow
def test_no_pair_is_worse_than_in_the_committed_table(name: str) -> None:
    table = read()
    for pair in PAIRS:
        if pair[0] == name and pair[1] not in SLOW:
            assert cell(*pair).code == table[pair].code, f"{pair}: {table[pair]} -> {cell(*pair)}"
