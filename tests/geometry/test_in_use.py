"""The geometry in use: sums over pairs of tokens, against loops over them, and what follows from the definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import attnflow as af
from attnflow.geometry import in_use
from attnflow.geometry.table import GeometryScores
from attnflow.models.subject import Subject
from attnflow.models.weights.attention import AttentionLayer, attention_layers
from attnflow.models.weights.families.rows import blocks
from tests.geometry import oracle
from tests.models import tiny, tokens

EXACT = {"rel": 1e-8, "abs": 1e-10}
WINDOW = {"sliding_window": 4}
MODELS = {
    "biases, both sides": ("Bert", {}),
    "fused and causal": ("GPT2", {}),
    "rotary, grouped heads": ("Llama", {"num_key_value_heads": 2}),
    "norms of queries and keys": ("Qwen3", {}),
    "a window": ("Mistral", WINDOW),
}


def disturbed(name, **changes):
    """A tiny model in float64, none of whose biases and gains is 0 or 1."""
    torch.manual_seed(1)
    model = tiny(name, torch.float64, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def caught(model, inputs, layer):
    """(queries, keys) [heads, tokens, head_dim] of the first sequence as torch's own attention gets them."""
    calls = []

    def catch(query, key, value, *args, **kwargs):
        calls.append((query[0].double(), key[0].double()))
        return own(query, key, value, *args, **kwargs)

    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = catch
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        F.scaled_dot_product_attention = own
    query, key = calls[layer]
    return query.numpy(), key.repeat_interleave(len(query) // len(key), 0).numpy()


def entering(model, module, inputs):
    """What enters a module, [tokens, width], of the first sequence."""
    seen = []
    hook = model.get_submodule(module).register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0].detach().double().numpy()


def by_loops(scores, form, meets):
    """(S of scores, S of the form, share of the skew part that the form explains), pair by pair."""
    n = len(scores)
    centred = []
    for table in (scores, form):
        mean = [np.mean([table[i, j] for j in range(n) if meets(i, j) or i == j]) for i in range(n)]
        centred.append([[table[i, j] - mean[i] for j in range(n)] for i in range(n)])
    s, f = centred
    where = [(i, j) for i in range(n) for j in range(n) if i != j and meets(i, j)]
    found = [sum(t[i][j] * t[j][i] for i, j in where) / sum(t[i][j] ** 2 for i, j in where) for t in (s, f)]
    skew = np.array([[(t[i][j] - t[j][i]) / 2 for i, j in where] for t in (s, f)])
    share = (skew[0] @ skew[1]) ** 2 / (skew[0] @ skew[0] * (skew[1] @ skew[1]))
    return [*found, share, len(where)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_every_head_is_as_loops_over_pairs_say(name, padded):
    family, changes = MODELS[name]
    model = disturbed(family, **changes)
    ids = tokens(1, 9)
    inputs = {"input_ids": ids}
    if padded:
        inputs = {"input_ids": F.pad(ids, (0, 3), value=3), "attention_mask": torch.tensor([[1] * 9 + [0] * 3])}
    rows = af.geometry.score(model, inputs=inputs, gamma=1.0)
    window = changes.get("sliding_window", 9)
    for layer in attention_layers(model):
        query, key = (side[:, :9] for side in caught(model, inputs, layer.layer))
        x = entering(model, in_use.source_of(layer.query_rows), inputs)[:9]
        weights = (side().detach().numpy() for side in (layer.query, layer.key))
        forms = oracle.head_matrices(*weights, layer.num_heads, layer.num_kv_heads)
        scores, on_tokens = query @ key.transpose(0, 2, 1), [x @ form @ x.T for form in forms]
        expected = {"all": (scores.sum(0), sum(on_tokens), sum(forms))}
        expected |= dict(enumerate(zip(scores, on_tokens, forms, strict=True)))
        for row in (row for row in rows if row.layer == layer.layer):
            s, f, form = expected[row.head]
            found = row.in_use
            loops = by_loops(s, f, lambda i, j: abs(i - j) < window)
            assert [found.symmetry, found.form_symmetry, found.skew_from_form, found.pairs] == pytest.approx(
                loops, **EXACT
            )
            varied = x - x.mean(0)
            of_rows = np.sqrt((x**2).mean(0) * ((varied @ form.T) ** 2).mean(0))
            of_columns = np.sqrt((varied**2).mean(0) * ((x @ form) ** 2).mean(0))
            assert found.directionality == pytest.approx(from_norms(of_rows, of_columns, 1.0), abs=1e-9)


def from_norms(rows, columns, gamma):
    above = [np.clip(side - side.mean() - gamma * side.std(ddof=1), 0, None).sum() for side in (rows, columns)]
    return (above[0] - above[1]) / sum(above) if sum(above) else 0.0


def test_a_batch_adds_up_its_sequences():
    model = disturbed("Llama")
    ids = tokens(2, 8)
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])}
    both = af.geometry.score(model, inputs=batch).matrices[1].in_use
    assert both.pairs == 8 * 7 + 5 * 4
    sums = []
    for row in (ids[0], ids[1, 3:]):
        found = af.geometry.pairs(model, row, layer=0, head=0)
        scores = found.scores * found.meet
        sums.append([(scores * scores.T).sum(), scores.square().sum()])
    turned, squares = np.array(sums).sum(0)
    assert both.symmetry == pytest.approx(turned / squares, abs=1e-6)  # of positions after the pads, up to rounding


def white(d, copies=1):
    """Tokens of mean 0 whose second moments are those of white noise, exactly."""
    return torch.cat([torch.eye(d), -torch.eye(d)]).double().repeat(copies, 1) * d**0.5


def seen_of(query, key, x, heads):
    """What a layer without biases, norms and positions shows of tokens x; `query` and `key` are stored weights."""
    q, k = ((x @ w.T).unflatten(-1, (heads, -1)).transpose(0, 1) for w in (query, key))
    k = k - k.mean(1, keepdim=True)
    return in_use.LayerTokens(torch.arange(len(x)), x, x, ((q, k), (q, k)), None)


def layer_of(query, key, heads):
    stored = {"q": query, "k": key}
    rows = [blocks(name, len(query) // heads, heads, 0, heads) for name in stored]
    read = lambda name, span: stored[name] if span is None else stored[name][slice(*span)]  # noqa: E731
    return AttentionLayer(0, "layer", "", "self", *rows, heads, heads, False, read=read, parameters={})


@given(st.integers(0, 2**31), st.sampled_from([(6, 1), (8, 2), (12, 3)]), st.sampled_from(["excess", "norm"]))
def test_white_tokens_give_the_scores_of_the_weights_back(seed, sizes, mode):
    d, heads = sizes
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(d, d, generator=draw, dtype=torch.float64) for _ in range(2))
    copies = 400
    sums = in_use.Accumulator(layer_of(query, key, heads))
    sums.add(seen_of(query, key, white(d, copies), heads))
    found = sums.result(0.5, mode)
    forms = oracle.head_matrices(query, key, heads, heads)
    for form, one in zip([sum(forms), *forms], found, strict=True):
        expected = oracle.symmetry(form)
        # A pair of a token with itself is none: one in 2 d copies, and all that is left between the two.
        assert one.symmetry == pytest.approx(expected, abs=4 * d / copies)
        assert one.form_symmetry == pytest.approx(one.symmetry, abs=1e-9)
        assert one.directionality == pytest.approx(oracle.directionality(form, 0.5, mode), abs=1e-9)
        assert one.skew_from_form == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_equal_queries_and_keys_are_symmetric_whatever_the_positions(name):
    """M_{j-i} = M_{i-j}^T then, though neither is symmetric."""
    model = disturbed(name, num_key_value_heads=4)
    with torch.no_grad():
        for layer in model.model.layers:
            for query, key in (("q_proj", "k_proj"), ("q_norm", "k_norm")):
                if hasattr(layer.self_attn, query):
                    getattr(layer.self_attn, key).load_state_dict(getattr(layer.self_attn, query).state_dict())
    found = af.geometry.pairs(model, tokens(1, 12)[0], layer=1, head=2)
    plain = found.scores - found.scores.mean(0)
    assert torch.allclose(plain, plain.T, atol=1e-9)


def test_what_a_row_shares_changes_nothing():
    """A bias of the keys adds a constant to each row, which softmax ignores."""
    model, text = disturbed("Bert"), tokens(1, 10)[0]
    before = [row.in_use for row in af.geometry.score(model, inputs=text)]
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key.bias.add_(7.0)
    after = [row.in_use for row in af.geometry.score(model, inputs=text)]
    for one, other in zip(before, after, strict=True):
        assert one.symmetry == pytest.approx(other.symmetry, abs=1e-8)
        assert one.skew_from_form == pytest.approx(other.skew_from_form, abs=1e-8)


def test_blocks_and_factors_agree(monkeypatch):
    model = disturbed("Mistral", sliding_window=5)
    text = tokens(1, 23)[0]
    whole = af.geometry.score(model, inputs=text)
    seen = []
    layers = attention_layers(model)
    in_use.observe(Subject(model), layers, {"input_ids": text[None]}, lambda _, one: seen.append(one))
    assert all(one.meet is not None for one in seen)
    everything = torch.ones(23, 23, dtype=torch.bool)
    monkeypatch.setattr(in_use, "_SCORES", 100)  # blocks of one query
    for one in seen:
        assert torch.allclose(in_use._factored_sums(one.sides), in_use._blocked_sums(one.sides, everything))
    for one, other in zip(whole, af.geometry.score(model, inputs=text), strict=True):
        assert one.in_use.symmetry == pytest.approx(other.in_use.symmetry, abs=1e-12)


def test_pairs_say_what_comes_from_direction():
    model = disturbed("Bert")
    found = af.geometry.pairs(model, tokens(1, 7)[0], layer=1, head=1)
    row = next(r for r in af.geometry.score(model, inputs=found_ids(found)) if (r.layer, r.head) == (1, 1)).in_use
    both, skew = found.symmetric.square().sum(), found.skew.square().sum()
    assert ((both - skew) / (both + skew)).item() == pytest.approx(row.symmetry)
    assert (found.skew_of_form.square().sum() / skew).item() == pytest.approx(row.skew_from_form)
    rest = found.skew - found.skew_of_form
    assert (rest * found.skew_of_form).sum().item() == pytest.approx(0, abs=1e-9)
    assert len(found.rows()) == 21
    one = found.rows()[0]
    assert (one["query"], one["key"]) == (1, 0)
    assert one["score"] - one["reversed"] == pytest.approx(one["difference"])


def found_ids(found):
    return [int(token) for token in found.tokens]


def test_without_biases_positions_and_norms_all_of_it_comes_from_the_form():
    model = disturbed("Bert")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.bias.zero_()
    found = af.geometry.pairs(model, tokens(1, 7)[0], layer=0, head=0)
    assert torch.allclose(found.skew_of_form, found.skew, atol=1e-9)
    assert torch.allclose(found.form * model.encoder.layer[0].attention.self.scaling, found.scores, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_double(dtype):
    model, text = disturbed("Llama", num_key_value_heads=2), tokens(1, 12)[0]
    exact = [row.in_use for row in af.geometry.score(model, inputs=text)]
    half = [row.in_use for row in af.geometry.score(model.to(dtype), inputs=text)]
    for one, other in zip(exact, half, strict=True):
        assert one.symmetry == pytest.approx(other.symmetry, abs=0.03)
        assert one.form_symmetry == pytest.approx(other.form_symmetry, abs=0.03)
        assert one.pairs == other.pairs


def test_the_table_has_columns_only_where_a_text_was_read():
    model = disturbed("Bert")
    plain, read = af.geometry.score(model), af.geometry.score(model, inputs=[5, 6, 7, 8])
    assert list(read.rows()[0]) == [*plain.rows()[0], *(f"{name}_in_use" for name in COLUMNS)]
    assert GeometryScores.from_json(read.to_json()) == read
    assert "in use: symmetry" in repr(read)
    assert "in use" not in repr(plain)


COLUMNS = (
    *("symmetry", "form_symmetry", "skew_from_form", "directionality"),
    *("key_share", "form_key_share", "key_chance", "key_error", "pairs"),
)


def test_the_model_is_as_before():
    model = tiny("Bert", torch.float32).train()
    before = model.config._attn_implementation, {name: value.clone() for name, value in model.state_dict().items()}
    af.geometry.score(model, inputs=[5, 6, 7, 8])
    assert model.training
    assert model.config._attn_implementation == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
