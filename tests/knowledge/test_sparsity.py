"""Shares of active entries: thresholds that hit them, and the term for the loss against float64 and by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from attnflow.knowledge import GeneralizedCrossAttention, ModularConfig, ModularForCausalLM, Store, attach, from_ffn
from attnflow.knowledge.monitor.sparse import sparsity, start_thresholds

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}


def modular(**settings):
    torch.manual_seed(0)
    return ModularForCausalLM(ModularConfig(num_entries=50, **SIZES, **settings)).double()


def tokens(count=60):
    return torch.randint(48, (2, count // 2), generator=torch.Generator().manual_seed(1))


@given(
    st.integers(0, 10_000),
    st.sampled_from([0.02, 0.1, 0.5, 0.9]),
    st.sampled_from(["mlp", "per_entry", "constant"]),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, 5000),
)
def test_thresholds_leave_exactly_the_share(seed, share, threshold, heads, gated, block):
    torch.manual_seed(seed)
    entries = torch.randn(30, 6).double()
    count = 30 if threshold == "per_entry" else None
    attention = GeneralizedCrossAttention(8, 5, 6, heads, "gelu", gated, threshold, count).double()
    hidden = torch.randn(2, 25, 8).double() * 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnflow.knowledge.monitor.sparse._BLOCK", block)
        start_thresholds(attention, hidden, entries, share)
    active = attention.score(hidden, entries, attention.thresholds(entries))[0] > 0  # [2, 25, heads, entries]
    if threshold == "per_entry":
        assert torch.equal(active.flatten(0, 1).sum(dim=0), torch.full((heads, 30), round(share * 50)))
    else:
        assert active.movedim(-2, 0).flatten(1).sum(dim=1).tolist() == [round(share * 1500)] * heads
    if gated:  # the other key is left alone
        assert not attention.thresholds(entries)[1].any()


@pytest.mark.parametrize("threshold", ["mlp", "per_entry"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_model_starts_at_the_share_in_every_layer(threshold, gated):
    model = modular(threshold=threshold, gated=gated, knowledge_activation="silu", num_knowledge_heads=2)
    ids = tokens()
    with sparsity(model, 0.1) as handle:
        model(ids)
        assert all(0.4 < share < 0.6 for share in handle.shares())
        handle.set_thresholds(input_ids=ids)
        model.eval()(ids)
        assert handle.shares() == pytest.approx([0.1] * 3, abs=1e-12)


def by_hand(model, ids, share, temperature):
    """The term from the hidden states that enter the readers."""
    entered, total = {}, 0
    hooks = [r.register_forward_pre_hook(lambda m, args: entered.update({m.layer: args})) for r in model.readers()]
    model(ids)
    for hook in hooks:
        hook.remove()
    for reader in model.readers():
        hidden, entries = entered[reader.layer]
        attention = reader.attention
        query = torch.einsum("btd,hdk->bthk", hidden, attention.query)
        key = torch.einsum("ne,hek->hnk", entries, attention.key[0])
        scores = torch.einsum("bthk,hnk->bthn", query, key) / attention.key_dim**0.5
        scores = scores + attention.thresholds(entries)[0]
        soft = torch.sigmoid(scores / (temperature * scores.detach().std())).mean()
        total = total + (soft - share).clamp(min=0)
    return total


@pytest.mark.parametrize("settings", [{}, {"gated": True}, {"entries_per_token": 5}, {"threshold": "per_entry"}])
def test_the_term_and_its_gradient(settings):
    model, ids = modular(**settings), tokens()
    with sparsity(model, 0.2, temperature=0.3) as handle:
        model(ids)
        term = handle.penalty()
    expected = by_hand(model, ids, 0.2, 0.3)
    torch.testing.assert_close(term, expected)
    parameters = list(model.parameters())
    mine, theirs = (torch.autograd.grad(one, parameters, allow_unused=True) for one in (term, expected))
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def test_the_gradient_is_the_slope():
    """Finite differences in a threshold, the widths held still."""
    model, ids = modular(), tokens()
    bias = model.readers()[2].attention.threshold_network[2].bias  # of the last layer: nothing reads it later
    with sparsity(model, 0.2, temperature=5.0) as handle:
        model(ids)
        slope = torch.autograd.grad(handle.penalty(), bias)[0]

        def at(step):
            with torch.no_grad():
                bias.add_(step)
                model(ids)
                value = handle.penalty()
                bias.sub_(step)
            return value

        numeric = (at(1e-5) - at(-1e-5)) / 2e-5  # a shift of all scores of a layer leaves their width as it is
    torch.testing.assert_close(slope[0], numeric, rtol=1e-6, atol=1e-9)


def test_training_with_it_lowers_the_share_to_what_is_wanted():
    model, ids = modular(threshold="per_entry").float(), tokens()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with sparsity(model, 0.1) as handle:
        for _ in range(150):
            model(ids)
            optimizer.zero_grad()
            handle.penalty().backward()
            optimizer.step()
        model(ids)
        assert max(handle.shares()) < 0.15
        assert handle.penalty().item() < 0.05


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_converted_models_are_seen_too(family):
    if family == "llama":
        plain = LlamaForCausalLM(LlamaConfig(intermediate_size=24, **SIZES))
    else:
        plain = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=16, n_layer=3, n_head=2))
    model, ids = from_ffn(plain).eval(), tokens()
    with torch.no_grad():
        own = model(ids).logits
    with sparsity(model, 0.3) as handle:
        out = model(ids).logits
        assert torch.equal(out, own)
        assert len(handle.shares()) == 3
        handle.penalty().backward()
        assert bool(model.knowledge.entries.grad.any())
        with pytest.raises(ValueError, match="were trained"):
            handle.set_thresholds(input_ids=ids)


def test_a_handle_that_is_removed_leaves_nothing():
    model = modular()
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    handle = sparsity(model)
    assert str(handle) == "3 layers of ModularForCausalLM, 5 % of the entries wanted"
    with pytest.raises(ValueError, match="no forward pass"):
        handle.penalty()
    handle.remove()
    handle.remove()
    assert str(handle).endswith("(removed)")
    assert hooks == sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_what_is_refused():
    for share in (0.0, 1.0, float("nan"), -1.0):
        with pytest.raises(ValueError, match="share"):
            sparsity(modular(), share)
    with pytest.raises(ValueError, match="temperature"):
        sparsity(modular(), temperature=0.0)
    with pytest.raises(ValueError, match="sparsemax"):
        sparsity(modular(knowledge_activation="sparsemax"))
    with pytest.raises(ValueError, match="from_ffn"):
        sparsity(LlamaForCausalLM(LlamaConfig(intermediate_size=24, **SIZES)))
    with sparsity(modular(threshold="coordinate")) as handle, pytest.raises(ValueError, match="which all layers share"):
        handle.set_thresholds(input_ids=tokens())


def test_a_start_that_fails_changes_nothing():
    model = modular(threshold="per_entry")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with sparsity(model, 0.05) as handle, pytest.raises(ValueError, match="4 tokens are too few for a share"):
        handle.set_thresholds(input_ids=tokens(4))
    with torch.no_grad():
        model.readers()[2].attention.query[0, 0, 0] = float("nan")
    before["model.layers.2.reader.attention.query"][0, 0, 0] = float("nan")
    with sparsity(model, 0.1) as handle, pytest.raises(ValueError, match="NaN or infinite"):
        handle.set_thresholds(input_ids=tokens())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_store_has_its_own_thresholds():
    model = modular().float()
    store = Store.open("memory", dim=16, num_thresholds=model.config.threshold_columns)
    store.insert(embeddings=model.knowledge().detach())
    with attach(model, store, write_thresholds=True), sparsity(model, 0.1) as handle:
        with pytest.raises(ValueError, match="reads a store"):
            handle.set_thresholds(input_ids=tokens())
        with pytest.raises(ValueError, match="reads a store"):
            model(tokens())
