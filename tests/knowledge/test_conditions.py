"""When feed-forward layers are cross-attention: said so, one is built; denied, a rank forbids it with these weights."""

import pytest
import torch

from attnflow.knowledge import GeneralizedCrossAttention
from attnflow.knowledge.attention import named
from attnflow.knowledge.conversion_check import conditions


def low_rank(rows, columns, rank):
    return torch.randn(rows, rank, dtype=torch.float64) @ torch.randn(rank, columns, dtype=torch.float64)


def layer(width, entries, ranks, gated, bias):
    """(keys, W_2, thresholds): low-rank keys and values, with thresholds of a kind."""
    keys = [low_rank(width, entries, rank) for rank in ranks[: 1 + gated]]
    second = low_rank(entries, width, ranks[-1])
    made = {
        "constant": lambda: torch.full((entries,), 0.7, dtype=torch.float64),
        "affine": lambda: second @ torch.randn(width, dtype=torch.float64) - 0.3,
        "free": lambda: torch.randn(entries, dtype=torch.float64),
    }
    return keys, second, [] if bias == "none" else [made[bias]() for _ in keys]


def exhibit(found, keys, second, biases, activation):
    """(a `GeneralizedCrossAttention` of exactly the widths asked for, its entries) that is the layer."""
    width, count = keys[0].shape
    joined = torch.cat([*(key.T for key in keys), second], dim=1)
    ones = torch.ones(count, 1, dtype=torch.float64)
    given = torch.stack(biases or [torch.zeros(count, dtype=torch.float64)] * len(keys), dim=1)
    left, values, _ = torch.linalg.svd(joined, full_matrices=False)
    entries = (left * values)[:, : found.entry_rank]
    known = torch.cat([entries, ones], dim=1)
    own = given - known @ torch.linalg.lstsq(known, given, driver="gelsd").solution
    if found.threshold_rank:
        left, values, _ = torch.linalg.svd(own, full_matrices=False)
        entries = torch.cat([entries, (left * values)[:, : found.threshold_rank]], dim=1)
    entries = torch.cat([entries, entries.new_zeros(count, found.entry_dim - entries.shape[1])], dim=1)
    attention = GeneralizedCrossAttention(
        width, found.key_dim, found.entry_dim, activation=activation, gated=len(keys) == 2
    ).double()

    def read(target):
        return torch.linalg.lstsq(entries, target, driver="gelsd").solution

    query = torch.linalg.svd(torch.cat(keys, dim=1), full_matrices=False)[0][:, : found.key_rank]
    affine = torch.linalg.lstsq(torch.cat([entries, ones], dim=1), given, driver="gelsd").solution
    hidden, out = attention.threshold_network[0], attention.threshold_network[2]
    with torch.no_grad():
        for weight in attention.parameters():
            weight.zero_()
        attention.query[0, :, : found.key_rank] = query * found.key_dim**0.5
        attention.value[0] = read(second)
        for part, key in enumerate(keys):
            attention.key[part, 0, :, : found.key_rank] = read(key.T) @ query
            hidden.weight[2 * part], hidden.weight[2 * part + 1] = affine[:-1, part], -affine[:-1, part]
            out.weight[part, 2 * part], out.weight[part, 2 * part + 1] = 1.0, -1.0  # relu(x) - relu(-x) = x
            out.bias[part] = affine[-1, part]
    return attention, entries


@pytest.mark.parametrize("bias", ["none", "constant", "affine", "free"])
@pytest.mark.parametrize("gated", [False, True])
def test_where_it_says_exact_cross_attention_of_these_widths_is_the_layer(gated, bias):
    torch.manual_seed(0)
    keys, second, biases = layer(6, 30, (2, 3, 2) if gated else (3, 2), gated, bias)
    own = (1 + gated) * (bias == "free")
    needed = sum((2, 3, 2) if gated else (3, 2)) + own
    key_dim = 5 if gated else 3
    found = conditions(keys, second, biases, key_dim, needed)
    assert (found.ok, found.threshold_rank, found.gated) == (True, own, gated)
    assert not conditions(keys, second, biases, key_dim, needed - 1).ok
    assert not conditions(keys, second, biases, key_dim - 1, needed).ok
    activation = "silu" if gated else "relu"
    attention, entries = exhibit(found, keys, second, biases, activation)
    hidden = torch.randn(7, 6, dtype=torch.float64)
    scores = [hidden @ key + b for key, b in zip(keys, biases or [0] * len(keys), strict=True)]
    weights = named(activation)(scores[0]) * (scores[1] if gated else 1)
    torch.testing.assert_close(attention(hidden, entries), weights @ second, rtol=1e-9, atol=1e-9)


def test_where_it_denies_a_rank_forbids_it():
    """No entries of that width have these keys, values and thresholds: the best of lower rank miss by the residual."""
    torch.manual_seed(0)
    first, second, bias = torch.randn(4, 32).double(), torch.randn(32, 4).double(), torch.randn(32).double()
    joined = torch.cat([first.T, second], dim=1)
    found = conditions([first], second, [], key_dim=3, entry_dim=6)
    values = torch.linalg.svdvals(joined)
    assert found.residual == pytest.approx(float(values[6:].norm() / values.norm()))
    assert torch.linalg.matrix_rank(first) == found.key_rank > found.key_dim
    assert torch.linalg.matrix_rank(joined) == found.entry_rank > found.entry_dim
    for _ in range(20):  # whatever the entries, what can be read off them has their rank
        entries, read = torch.randn(32, 6).double(), torch.randn(6, 8).double()
        read = torch.linalg.lstsq(entries, joined).solution
        assert float((entries @ read - joined).norm() / joined.norm()) >= found.residual
    # With thresholds: 8 coordinates are all taken by keys and values, and no affine function of them is b_1.
    full = conditions([first], second, [bias], key_dim=4, entry_dim=8)
    assert (full.entry_rank, full.threshold_rank, full.ok) == (8, 1, False)
    affine = torch.cat([joined, torch.ones(32, 1).double()], dim=1)
    missed = bias - affine @ torch.linalg.lstsq(affine, bias[:, None]).solution[:, 0]
    assert float(missed.norm() / bias.norm()) > 0.1
    assert "[W_1^T | W_2] has rank 8, and thresholds need one more coordinate, but entries have width" in str(full)
    narrow = str(conditions([first], second, [bias], 3, 9))
    assert narrow == "not exact with these weights: W_1 has rank 4, but keys have width d_k = 3"


def test_two_keys_share_one_query():
    """Keys of ranks 3 and 5 in different directions need d_k = 8: each alone would fit in 5."""
    torch.manual_seed(0)
    keys, second, biases = layer(8, 40, (3, 5, 2), gated=True, bias="none")
    assert not conditions(keys, second, biases, 5, 12).ok
    found = conditions(keys, second, biases, 8, 10)
    assert (found.key_rank, found.entry_rank, found.threshold_rank, found.ok) == (8, 10, 0, True)
    assert "[W_gate | W_up] has rank 8, but keys have width d_k = 5" in str(conditions(keys, second, biases, 5, 12))


def test_it_is_a_statement_about_the_weights_and_not_about_the_function():
    """Denied for the weights given, and yet the function is cross-attention of these widths: ReLU neurons rescaled."""
    first, second = torch.tensor([[1.0, 1.0]]).double(), torch.tensor([[1.0], [4.0]]).double()
    bias = torch.tensor([1.0, 2.0]).double()
    found = conditions([first], second, [bias], key_dim=1, entry_dim=1)
    assert not found.ok
    assert str(found).startswith("not exact with these weights: [W_1^T | W_2] has rank 2")
    # Entries 1 and 2 with B1(e) = 3e - 2: relu(e h + B1(e)) e is relu(h + 1) and 2 relu(2h + 4) = 4 relu(h + 2).
    attention = GeneralizedCrossAttention(1, 1, 1).double()
    hidden, out = attention.threshold_network[0], attention.threshold_network[2]
    with torch.no_grad():
        for weight in attention.parameters():
            weight.zero_()
        for ones in (attention.query, attention.key, attention.value):
            ones.fill_(1.0)
        hidden.weight[0], hidden.weight[1] = 3.0, -3.0
        hidden.bias[0], hidden.bias[1] = -2.0, 2.0
        out.weight[0, 0], out.weight[0, 1] = 1.0, -1.0
    tokens = torch.linspace(-5, 5, 101).double()[:, None]
    exact = torch.relu(tokens @ first + bias) @ second
    assert torch.equal(attention(tokens, torch.tensor([[1.0], [2.0]]).double()), exact)

    torch.manual_seed(0)
    keys, scales = torch.randn(3, 12).double(), torch.rand(12).double() + 0.5
    values = keys.T @ torch.randn(3, 3).double()
    tokens = torch.randn(50, 3).double()
    narrow = conditions([keys], values, [], key_dim=3, entry_dim=3)
    rescaled = conditions([keys * scales], values / scales[:, None], [], key_dim=3, entry_dim=3)
    assert (narrow.entry_rank, narrow.ok, rescaled.entry_rank, rescaled.ok) == (3, True, 6, False)
    torch.testing.assert_close(
        torch.relu(tokens @ keys) @ values, torch.relu(tokens @ (keys * scales)) @ (values / scales[:, None])
    )


def gated_neuron(gate):
    """h -> gate(h . g + 0.3) (h . u - 0.2) in two dimensions."""
    directions = torch.tensor([[0.8, -0.5], [0.3, 0.9]]).double()
    return lambda h: gate(h @ directions[0] + 0.3) * (h @ directions[1] - 0.2)


def differentiated(function, directions, point):
    """The mixed derivative of a function along directions, one after the other."""
    point = point.clone().requires_grad_()
    value = function(point)
    for one in directions:
        if not value.requires_grad:  # a constant
            return 0.0
        value = torch.autograd.grad(value, point, create_graph=True, materialize_grads=True)[0] @ one
    return float(value.detach())


def test_a_gated_neuron_is_no_finite_sum_of_entries_but_for_a_polynomial_gate():
    """Derivatives across its keys, one each, are zero for any cross-attention, and not for a gated neuron."""
    torch.manual_seed(0)
    keys, biases, values = torch.randn(4, 2).double(), torch.randn(4).double(), torch.randn(4).double()
    across = [torch.stack([-key[1], key[0]]) for key in keys]
    point = torch.tensor([0.4, -0.7]).double()
    for act in (torch.nn.functional.silu, torch.nn.functional.gelu, torch.tanh):
        entries = lambda h, act=act: act(keys @ h + biases) @ values  # noqa: E731
        assert abs(differentiated(entries, across[:3], point)) > 1e-3, "one key is left"
        assert abs(differentiated(entries, across, point)) < 1e-12
    for gate in (torch.nn.functional.silu, torch.nn.functional.gelu):
        assert abs(differentiated(gated_neuron(gate), across, point)) > 1e-2
    assert abs(differentiated(gated_neuron(lambda x: x), across, point)) < 1e-12


def test_a_layer_with_an_identity_gate_is_cross_attention_with_squares():
    """x y = ((x + y)^2 - (x - y)^2) / 4: two entries for each neuron."""
    torch.manual_seed(0)
    gate, up, down = torch.randn(5, 7).double(), torch.randn(5, 7).double(), torch.randn(7, 5).double()
    gate_bias, bias = torch.randn(7).double(), torch.randn(7).double()
    entries = torch.cat(
        [
            torch.cat([(gate + sign * up).T, sign * down / 4, (gate_bias + sign * bias)[:, None]], dim=1)
            for sign in (1, -1)
        ]
    )
    attention = GeneralizedCrossAttention(5, 5, 11, activation=torch.square, threshold="coordinate", bias=False)
    attention = attention.double()
    with torch.no_grad():
        attention.query[0] = torch.eye(5) * 5**0.5
        attention.key.zero_()[0, 0, :5] = torch.eye(5)
        attention.value.zero_()[0, 5:10] = torch.eye(5)
    hidden = torch.randn(9, 5).double()
    expected = ((hidden @ gate + gate_bias) * (hidden @ up + bias)) @ down
    torch.testing.assert_close(attention(hidden, entries), expected)
