"""The share of the key alone: against least squares on design matrices, and what may not move it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
import attnflow.geometry.in_use
from attnflow.geometry.in_use import KeyTerms
from tests.geometry.test_in_use import caught, disturbed
from tests.models import tokens


def by_least_squares(scores, allow):
    """(share, chance) of one table: fit a_i alone, and a_i + b_j, with a column for each query and each key."""
    n = len(scores)
    pairs = [(i, j) for i in range(n) for j in range(n) if allow[i, j]]
    values = np.array([scores[i, j] for i, j in pairs])
    rows = np.array([[float(i == k) for k in range(n)] for i, _ in pairs])
    both = np.hstack([rows, [[float(j == k) for k in range(n)] for _, j in pairs]])
    left, ranks = [], []
    for design in (rows, both):
        fitted, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
        left.append(((values - design @ fitted) ** 2).sum())
        ranks.append(rank)
    free = len(pairs) - ranks[0]
    return 1 - left[1] / left[0] if left[0] > 1e-20 else 0.0, (ranks[1] - ranks[0]) / free if free else 0.0


MASKS = {
    "causal": lambda n, draw: torch.ones(n, n).tril(),
    "window": lambda n, draw: torch.ones(n, n).tril() * torch.ones(n, n).triu(-2),
    "two sequences": lambda n, draw: torch.block_diag(torch.ones(3, 3).tril(), torch.ones(n - 3, n - 3)),
    "random": lambda n, draw: (torch.rand(n, n, generator=draw) < 0.5) | torch.eye(n).bool(),
    "itself alone": lambda n, draw: torch.eye(n),
    "empty rows": lambda n, draw: torch.ones(n, n).tril() * (torch.arange(n) % 3 > 0)[:, None],
}


@given(st.integers(0, 2**31), st.sampled_from([*MASKS, "all"]), st.integers(4, 9))
def test_the_share_is_that_of_least_squares(seed, name, n):
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(3, n, 4, generator=draw, dtype=torch.float64) for _ in range(2))
    allow = None if name == "all" else MASKS[name](n, draw).bool()
    terms = KeyTerms(allow, n)
    expected = [
        by_least_squares(table, np.ones((n, n)) if allow is None else allow.numpy())
        for table in (query @ key.mT).numpy()
    ]
    assert terms.share(query, key).tolist() == pytest.approx([share for share, _ in expected], abs=1e-8)
    assert terms.chance == pytest.approx(expected[0][1], abs=1e-8)


def test_blocks_of_queries_change_nothing(monkeypatch):
    query, key = (torch.randn(2, 11, 3, dtype=torch.float64) for _ in range(2))
    terms = KeyTerms(torch.ones(11, 11).tril().bool(), 11)
    whole = terms.share(query, key)
    monkeypatch.setattr(af.geometry.in_use, "_SCORES", 50)
    assert torch.allclose(terms.share(query, key), whole, atol=1e-13)


def test_noise_has_the_share_of_chance():
    """Independent scores are queries times the identity."""
    n = 12
    terms = KeyTerms(torch.ones(n, n).tril().bool(), n)
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, n, n, generator=draw, dtype=torch.float64)
    assert terms.share(noise, torch.eye(n).double().expand(4000, n, n)).mean().item() == pytest.approx(
        terms.chance, abs=0.003
    )
    assert terms.chance == pytest.approx(2 / n)  # (n - 1) / (n (n + 1) / 2 - n)


def test_random_weights_have_the_share_of_the_mean_token():
    """E |mean x|^2 / E |x|^2 where all meet: the more tokens have in common, the more the key alone decides."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(40, 200, generator=draw, dtype=torch.float64) + 1.0
    query, key = (x @ torch.randn(100, 200, 64, generator=draw, dtype=torch.float64) for _ in range(2))
    expected = x.mean(0).square().sum() / x.square().sum(1).mean()
    assert KeyTerms(None, 40).share(query, key).mean().item() == pytest.approx(expected.item(), abs=0.02)
    assert expected > 0.4


def shares(model, text):
    return [row.in_use.key_share for row in af.geometry.score(model, inputs=text) if row.head != "all"]


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Bert", "Qwen3", "Mistral"])
def test_the_share_is_that_of_the_model_and_of_its_mask(name):
    model, text = disturbed(name, **({"sliding_window": 4} if name == "Mistral" else {})), tokens(1, 9)[0]
    i, j = torch.meshgrid(torch.arange(9), torch.arange(9), indexing="ij")
    allow = torch.ones(9, 9).bool() if name == "Bert" else (j <= i) & (i - j < (4 if name == "Mistral" else 9))
    found = iter(shares(model, text))
    for layer in range(2):
        query, key = caught(model, {"input_ids": text[None]}, layer)
        for table in query @ key.transpose(0, 2, 1):
            assert next(found) == pytest.approx(by_least_squares(table, allow.numpy())[0], abs=1e-7)
    assert next(found, None) is None


def test_the_share_can_be_read_off_attention_alone():
    """Softmax keeps differences within a row, and the share is made of them: whatever keeps attention keeps it."""
    model, text = disturbed("Llama"), tokens(1, 9)[0]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(text[None], output_attentions=True).attentions
    allow = np.tril(np.ones((9, 9)))
    expected = [by_least_squares(np.log(table.numpy() + 1e-300), allow)[0] for one in weights for table in one[0]]
    assert shares(model, text) == pytest.approx(expected, abs=1e-6)


def folded_llama(**changes):
    """A Llama whose gains are 1, so that any rotation of its stream leaves the same function; its own norms round."""
    model = disturbed("Llama", tie_word_embeddings=False, **changes)
    for part in (model.model, *model.model.layers):
        for name in [name for name in part._modules if name.endswith("norm")]:
            setattr(part, name, torch.nn.RMSNorm(32, eps=1e-6, dtype=torch.float64))
    return model


def test_a_rotation_of_the_stream_moves_no_share_and_no_symmetry_but_d():
    model, text = folded_llama(num_key_value_heads=2), tokens(1, 12)[0]
    with torch.no_grad():
        logits = model(text[None]).logits
    before, plain = shares(model, text), af.geometry.score(model, gamma=1.0)
    turn = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ turn)
        model.lm_head.weight.copy_(model.lm_head.weight @ turn)
        for layer in model.model.layers:
            attention, forward = layer.self_attn, layer.mlp
            for part in (attention.q_proj, attention.k_proj, attention.v_proj, forward.gate_proj, forward.up_proj):
                part.weight.copy_(part.weight @ turn)
            for part in (attention.o_proj, forward.down_proj):
                part.weight.copy_(turn.T @ part.weight)
        assert torch.allclose(model(text[None]).logits, logits, atol=1e-9)
    assert shares(model, text) == pytest.approx(before, abs=1e-9)
    after = af.geometry.score(model, gamma=1.0)
    assert [row.symmetry for row in after] == pytest.approx([row.symmetry for row in plain], abs=1e-5)
    assert max(abs(a.directionality - b.directionality) for a, b in zip(after, plain, strict=True)) > 0.1


def test_a_change_of_basis_within_heads_moves_no_share():
    """W_q A and W_k A^-T with any invertible A, head by head, and what keys share: a vector added to all of them."""
    model, text = disturbed("Bert"), tokens(1, 12)[0]
    before = shares(model, text)
    with torch.no_grad():
        for layer in model.encoder.layer:
            attention = layer.attention.self
            for head in range(4):
                rows = slice(8 * head, 8 * head + 8)
                turn = torch.randn(8, 8, dtype=torch.float64)
                for part, by in ((attention.query, turn), (attention.key, turn.inverse().T)):
                    part.weight[rows] = by @ part.weight[rows]
                    part.bias[rows] = by @ part.bias[rows]
            attention.key.bias.add_(torch.randn(32))
    assert shares(model, text) == pytest.approx(before, abs=1e-8)


def test_permuted_heads_have_permuted_shares():
    model, text = disturbed("Llama", num_key_value_heads=2), tokens(1, 12)[0]
    before = shares(model, text)
    order = [2, 3, 1, 0]  # the groups, and the heads of one of them
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for part, heads in ((attention.q_proj, order), (attention.k_proj, [1, 0]), (attention.v_proj, [1, 0])):
                part.weight.copy_(part.weight.unflatten(0, (-1, 8))[heads].flatten(0, 1))
            attention.o_proj.weight.copy_(attention.o_proj.weight.unflatten(1, (4, 8))[:, order].flatten(1))
    expected = [before[4 * layer + head] for layer in range(2) for head in order]
    assert shares(model, text) == pytest.approx(expected, abs=1e-9)


def test_several_sequences_have_their_mean_and_its_error():
    model, ids = disturbed("Llama"), tokens(3, 9)
    rows = [row.in_use for row in af.geometry.score(model, inputs={"input_ids": ids})]
    single = np.array([[row.in_use.key_share for row in af.geometry.score(model, inputs=one)] for one in ids])
    assert [row.key_share for row in rows] == pytest.approx(single.mean(0), abs=1e-9)
    assert [row.key_error for row in rows] == pytest.approx(single.std(0, ddof=1) / 3**0.5, abs=1e-9)
