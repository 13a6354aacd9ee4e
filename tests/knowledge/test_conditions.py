"""When feed-forward layers are cross-attention, and that entries of the stated width do write them."""

import pytest
import torch
from torch.nn import functional

from attnflow.knowledge import conditions


def low_rank(rows, columns, rank):
    return torch.randn(rows, rank, dtype=torch.float64) @ torch.randn(rank, columns, dtype=torch.float64)


def test_ranks_of_gated_layers():
    torch.manual_seed(0)
    gate, up, down = low_rank(8, 40, 3), low_rank(8, 40, 5), low_rank(40, 8, 2)
    found = conditions(up, down, key_dim=5, entry_dim=12, gate=gate)
    assert (found.key_ranks, found.entry_rank, found.gated, found.exact) == ((3, 5), 10, True, True)
    assert str(found) == "exact: rank 3 and 5 <= d_k 5, 10 + 2 <= d_E 12"
    assert found.residual < 1e-12
    narrow = conditions(up, down, key_dim=4, entry_dim=11, gate=gate)
    assert not narrow.exact
    values = torch.linalg.svdvals(torch.cat([gate.T, up.T, down], dim=1))
    assert narrow.residual == pytest.approx(float(values[9:].norm() / values.norm()))
    assert "W_up has rank 5, but keys have width d_k = 4" in str(narrow)
    assert "W_gate has rank" not in str(narrow)
    assert "[W_gate^T | W_up^T | W_2] has rank 10, and the thresholds need two more coordinates" in str(narrow)
    assert conditions(up, down, key_dim=5, entry_dim=12).key_ranks == (5,)


def test_full_rank_gated_layers_need_three_slots_and_two_thresholds():
    torch.manual_seed(0)
    gate, up, down = torch.randn(4, 50), torch.randn(4, 50), torch.randn(50, 4)
    assert conditions(up, down, key_dim=4, entry_dim=3 * 4 + 2, gate=gate).exact
    assert not conditions(up, down, key_dim=4, entry_dim=3 * 4 + 1, gate=gate).exact
    assert not conditions(up, down, key_dim=3, entry_dim=3 * 4 + 2, gate=gate).exact


@pytest.mark.parametrize("gated", [False, True])
def test_entries_of_the_stated_width_write_the_layer(gated):
    torch.manual_seed(0)
    width, entries = 6, 30
    first, second = low_rank(width, entries, 3), low_rank(entries, width, 2)
    gate = low_rank(width, entries, 4) if gated else None
    biases = torch.randn(1 + gated, entries, dtype=torch.float64)
    keys = [first] if gate is None else [gate, first]
    joined = torch.cat([*(key.T for key in keys), second], dim=1)
    found = conditions(first, second, key_dim=4, entry_dim=14, gate=gate)
    assert found.exact
    # Entries: coordinates of the rows of `joined` in its row space, with the thresholds; projections read them off.
    left, values, right = torch.linalg.svd(joined, full_matrices=False)
    base = torch.cat([(left * values)[:, : found.entry_rank], biases.T], dim=1)
    assert base.shape[1] == found.entry_rank + 1 + gated <= found.entry_dim
    slices = right[: found.entry_rank].split(width, dim=1)
    hidden = torch.randn(5, width, dtype=torch.float64)
    scores = [hidden @ (base[:, : found.entry_rank] @ part).T for part in slices[:-1]]
    scores = [score + base[:, found.entry_rank + i] for i, score in enumerate(scores)]
    weights = functional.silu(scores[0]) * (scores[1] if gated else 1)
    expected = functional.silu(hidden @ keys[0] + biases[0])
    if gated:
        expected = expected * (hidden @ first + biases[1])
    torch.testing.assert_close(weights @ base[:, : found.entry_rank] @ slices[-1], expected @ second)
    assert all(torch.linalg.matrix_rank(part) <= found.key_dim for part in slices[:-1])
