"""Provenance: every contribution is accounted for, in layers and in logits, and only the strongest are kept."""

import sys

import pytest
import torch
import transformers

import attnflow as af
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.layered import readers
from attnflow.knowledge.modular import ModularConfig, ModularForCausalLM
from attnflow.knowledge.reading.trace import trace
from attnflow.models.subject import Loaded
from tests.conformance.miniature import Architecture, build
from tests.memory import Largest
from tests.models import tiny, tokens
from tests.models.saved import word_tokenizer

PLAIN = ["GPT2", "GPTNeoX", "OPT"]
GATED = ["Llama", "Qwen2", "Phi3", "Qwen3"]
MODULAR = {
    "relu": {},
    "heads": {"num_knowledge_heads": 2, "knowledge_activation": "gelu"},
    "gated": {"gated": True, "knowledge_activation": "silu", "threshold": "coordinate"},
    "best": {"entries_per_token": 5},
}


def converted(name, dtype=torch.float64, **changes):
    torch.manual_seed(0)
    return af.knowledge.from_ffn(tiny(name, dtype, **changes))


def modular(kind, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_entries": 40}
    model = ModularForCausalLM(ModularConfig(**{**sizes, "initializer_range": 0.3, **MODULAR[kind], **changes}))
    return model.double().eval()


def made(name):
    return modular(name) if name in MODULAR else converted(name)


def watched(model, ids):
    """(what each layer's entries write, logits), from hooks of our own."""
    paths = {reader.layer: None for reader in readers(model)}
    handles = [
        reader.register_forward_hook(lambda _, __, out, layer=reader.layer: paths.update({layer: out}))
        for reader in readers(model)
    ]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    for handle in handles:
        handle.remove()
    return paths, logits


def total_effect(found):
    layers = sum(one.direct_effect + one.attention_effect for one in found)
    return found.embedding_effect + found.constant_effect + layers


@pytest.mark.parametrize("name", [*PLAIN, *GATED, *MODULAR])
def test_all_contributions_and_b2_sum_to_what_a_layer_writes(name):
    model, ids = made(name), tokens(1, 7)
    outputs, _ = watched(model, ids)
    found = trace(model, ids, top=10_000)
    for one, reader in zip(found, readers(model), strict=True):
        values = reader.values(torch.arange(reader.num_entries)).detach()
        kept = (one.ids >= 0).double()
        rows = one.ids.clamp(min=0) - (reader.ids(torch.tensor([0])).item() if name not in MODULAR else 0)
        written = torch.einsum("pk,pkd->pd", one.weights * kept, values[one.heads.clamp(min=0), rows])
        bias = 0 if reader.output_bias is None else reader.output_bias.detach()
        expected = outputs[one.layer].reshape(7, -1)
        torch.testing.assert_close(written + bias, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(one.explained, torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-11)
        torch.testing.assert_close(one.output_norm, (expected - bias).norm(dim=-1), rtol=1e-11, atol=1e-11)
        norms = (one.weights.abs() * values[one.heads.clamp(min=0), rows].norm(dim=-1)) * kept
        torch.testing.assert_close(one.norms, norms, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [*PLAIN, *GATED, *MODULAR])
def test_direct_effects_sum_to_the_logit(name):
    model, ids = made(name), tokens(1, 7)
    _, logits = watched(model, ids)
    found = trace(model, ids, top=10_000)
    assert found.without == ""
    assert found.answer_ids == (*ids[0, 1:].tolist(), int(logits[0, -1].argmax()))
    centred = logits[0] - logits[0].mean(dim=-1, keepdim=True)
    expected = centred[torch.arange(7), list(found.answer_ids)]
    # RMS norms of transformers compute in float32 whatever they are given.
    close = {"rtol": 1e-11, "atol": 1e-11} if name in PLAIN else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found.logits, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(total_effect(found), expected, **close)
    for one, reader in zip(found, readers(model), strict=True):
        if reader.output_bias is None:  # b2's own effect is in the layer's, and in no entry's
            torch.testing.assert_close(one.direct_effects.sum(dim=-1), one.direct_effect, rtol=1e-11, atol=1e-11)


def test_scores_thresholds_and_weights_are_those_of_the_layer():
    model, ids = tiny("GPT2", torch.float64), tokens(1, 6)
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.bias.normal_()
    inner = af.knowledge.from_ffn(model)
    seen = {}
    layer = model.transformer.h[1].mlp
    layer.c_fc.register_forward_hook(lambda _, __, y: seen.update(scores=y[0].detach()))
    layer.act.register_forward_hook(lambda _, __, y: seen.update(weights=y[0].detach()))
    model(input_ids=ids)
    one = trace(inner, ids, top=10, by="norm").layer(1)
    places = one.ids - one.num_entries
    torch.testing.assert_close(one.scores, seen["scores"].gather(1, places), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.weights, seen["weights"].gather(1, places), rtol=1e-12, atol=1e-12)
    assert torch.equal(one.thresholds, layer.c_fc.bias.detach()[places])
    assert torch.equal(one.active, (seen["scores"] > 0).sum(dim=1))
    norms = (seen["weights"].abs() * layer.c_proj.weight.detach().norm(dim=1)).sort(descending=True).values
    torch.testing.assert_close(one.norms, norms[:, :10], rtol=1e-12, atol=1e-12)


def brute_force(model, ids, by):
    """[(size, layer, id, head)] of every entry at the last token, the largest first: each contribution by itself."""
    every = trace(model, ids, top=10_000, position=-1)
    sizes = []
    for one in every:
        table = {"effect": one.effects, "direct": one.direct_effects, "norm": one.norms}[by].abs()
        sizes += [
            (-float(size), one.layer, int(entry), int(head))
            for size, entry, head in zip(table[0], one.ids[0], one.heads[0], strict=True)
            if entry >= 0
        ]
    return sorted(sizes)


@pytest.mark.parametrize("by", ["effect", "direct", "norm", None])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "heads"])
def test_listed_are_the_largest_of_all_entries(name, by, monkeypatch):
    # entries in blocks, as those of large models are
    monkeypatch.setattr(sys.modules["attnflow.knowledge.reading.layer_watch"], "_BLOCK", 7)
    model, ids = made(name), tokens(1, 6)
    found = trace(model, ids, top=4, by=by)
    assert found.by == by or (by is None and found.by == "effect")
    expected = brute_force(model, ids, found.by)[:4]
    listed = found.fired(-1, count=4)
    assert [(one.layer, one.entry, one.head) for one in listed] == [one[1:] for one in expected]
    sizes = [abs({"effect": one.effect, "direct": one.direct_effect, "norm": one.norm}[found.by]) for one in listed]
    assert sizes == pytest.approx([-one[0] for one in expected], rel=1e-12)
    for one in found:  # and of each layer
        mine = [-size for size, layer, _, _ in brute_force(model, ids, found.by) if layer == one.layer][:4]
        table = {"effect": one.effects, "direct": one.direct_effects, "norm": one.norms}[found.by].abs()
        torch.testing.assert_close(table[-1], torch.tensor(mine, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_unread_entries_are_not_kept():
    found = trace(modular("best"), tokens(1, 6), top=16)
    assert all(one.ids.shape == (6, 16) for one in found)
    assert all(int((one.ids >= 0).sum(dim=1).max()) <= 5 for one in found)
    assert all(bool((one.active <= 5).all()) for one in found)
    for reader in readers(none := modular("relu")):
        reader.retrieval = af.knowledge.Retrieval(threshold=1e9)
    assert all(bool((one.ids == -1).all()) for one in trace(none, tokens(1, 6)))
    silent = modular("relu")
    with torch.no_grad():
        for reader in silent.readers():
            reader.attention.threshold_network[-1].bias.fill_(-1e3)
    assert all(bool((one.ids == -1).all()) and bool((one.explained == 1).all()) for one in trace(silent, tokens(1, 6)))


def test_some_positions():
    model = made("OPT")  # flattens the tokens of a batch
    ids = tokens(1, 6)
    some, every = (trace(model, ids, position=places, by="norm") for places in ([1, -1], None))
    assert some.positions == (1, 5)
    for one, other in zip(some, every, strict=True):
        assert torch.equal(one.ids, other.ids[[1, 5]])
        torch.testing.assert_close(one.direct_effects, other.direct_effects[[1, 5]], rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="trace takes one sequence, got 2"):
        trace(model, [{"input_ids": tokens(2, 6)}])


@pytest.mark.parametrize(("name", "why"), [("Gemma2", "not the sum"), ("Olmo2", "not the sum")])
def test_where_outputs_are_normed_there_is_no_direct_effect(name, why):
    model, ids = made(name), tokens(1, 5)
    found = trace(model, ids)
    assert why in found.without
    assert found.by == "effect"
    assert all(one.direct_effects is None and one.direct_effect is None for one in found)
    assert all(bool((one.norms > 0).all()) for one in found)
    assert found.fired(-1, count=1)[0].direct_effect is None
    with pytest.raises(ValueError, match=why):
        trace(model, ids, by="direct")


def test_norms_after_layers_and_models_without_logits():
    torch.manual_seed(0)
    base = tiny("Bert")
    encoder = trace(af.knowledge.from_ffn(base), tokens(1, 5))
    assert "no unembedding" in encoder.without
    masked = trace(af.knowledge.from_ffn(transformers.BertForMaskedLM(base.config).double().eval()), tokens(1, 5))
    assert "not the sum" in masked.without
    assert masked.promoted == ()
    with pytest.raises(UnsupportedArchitecture, match="has an encoder and a decoder"):
        trace(af.knowledge.from_ffn(tiny("T5")), tokens(1, 4))


def test_promoted_tokens_are_those_of_the_value_read_by_the_unembedding():
    model, ids = made("Llama"), tokens(1, 6)
    found = trace(model, ids, position=-1, top=8, promoted=5)
    assert len(found.promoted) == 5
    strongest = {(one.reader, one.entry, one.head) for one in found.fired(count=5)}
    assert {(one.reader, one.entry, one.head) for one in found.promoted} == strongest
    base, head = model.knowledge, model.lm_head.weight.detach()
    for one in found.promoted:
        value = base.get([one.entry])[0][base.layout.value] * model.model.norm.weight.detach()
        assert one.raised == tuple(map(str, (head @ value).topk(5).indices.tolist()))
        assert one.lowered == tuple(map(str, (head @ -value).topk(5).indices.tolist()))
    signs = set()
    for one in found.fired(count=5):  # a negative weight exchanges them: they are those of weight times value
        value = base.get([one.entry])[0][base.layout.value] * model.model.norm.weight.detach()
        assert one.promotes == tuple(map(str, (head @ (one.weight * value)).topk(5).indices.tolist()))
        assert one.suppresses == tuple(map(str, (head @ (-one.weight * value)).topk(5).indices.tolist()))
        signs.add(one.weight > 0)
    assert signs == {True, False}
    assert trace(model, ids, promoted=0).promoted == ()


def test_texts_tokens_and_answers():
    model, tokenizer = made("Llama"), word_tokenizer(["[UNK]", *(f"w{i}" for i in range(49))])
    loaded = Loaded(model, tokenizer)
    found = trace(loaded, "w4 w5 w6", answer="w9", top=48)
    assert found.tokens == ("w4", " w5", " w6")
    assert found.prompt == "w4 w5 w6"
    assert found.answers == ("w9",) * 3
    listed = trace(loaded, "w4 w5 w6", answer=["w9", 3, "w1"])
    assert listed.answer_ids == (10, 3, 2)
    with pytest.raises(ValueError, match="one answer, or one for each of the 3 positions, got 2"):
        trace(loaded, "w4 w5 w6", answer=[1, 2])
    with pytest.raises(ValueError, match="expected one token, but 'w1 w2' is 2"):
        trace(loaded, "w4 w5 w6", answer="w1 w2", position=-1)
    with pytest.raises(ValueError, match="needs a tokenizer"):
        trace(model, [5, 6], answer="w1")
    with pytest.raises(ValueError, match="in \\[0, 50\\)"):
        trace(model, [5, 6], answer=50)


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Gemma2", "Olmo2", "OPT", "gated", "heads"])
def test_an_effect_is_the_derivative_by_the_size_of_the_value(name):
    """By finite differences: what an entry wrote is scaled by 1 + h and 1 - h in the layer's output."""
    model, ids = made(name), tokens(1, 6)
    found = trace(model, ids, position=[2, -1], answer=[7, 9], against=[3, 4], top=40)
    every, step = {reader.layer: reader for reader in readers(model)}, 1e-2

    def value(entry, factor):
        place = entry.entry if name in MODULAR else entry.entry - int(every[entry.layer].ids(torch.tensor([0])))
        written = entry.weight * every[entry.layer].values(torch.tensor([place])).detach()[entry.head, 0]

        def change(_, __, output):
            flat = output.clone().reshape(-1, output.shape[-1])
            flat[entry.position] += factor * written
            return flat.view_as(output)

        handle = every[entry.layer].register_forward_hook(change)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0]
        handle.remove()
        answers = logits[[2, -1], [7, 9]] - logits[[2, -1]][:, [3, 4]].mean(-1)
        return float(answers.sum())

    for entry in [*found.fired(2, count=3), *found.fired(-1, count=3)]:
        slope = (value(entry, step) - value(entry, -step)) / (2 * step)
        assert entry.effect == pytest.approx(slope, rel=5e-3, abs=1e-4)  # norms compute in float32


def test_several_tokens_count_as_one_answer():
    model, tokenizer = made("Llama"), word_tokenizer(["[UNK]", *(f"w{i}" for i in range(49))])
    found = trace(Loaded(model, tokenizer), "w4 w5 w6", answer="w1 w2")
    assert found.positions == (2, 3)
    assert found.answers == ("w1", "w2")
    chances = model(torch.tensor([[5, 6, 7, 2]])).logits[0, 2:].softmax(-1).detach()
    torch.testing.assert_close(found.probabilities, chances[[0, 1], [2, 3]], rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="several tokens is not ablated"):
        trace(Loaded(model, tokenizer), "w4 w5 w6", answer="w1 w2", ablate=2)


def test_entries_are_named_by_layer_and_number_within_it():
    found = trace(made("Llama"), tokens(1, 4), position=-1, top=48)
    for entry in found.fired():
        assert entry.name == f"L{entry.layer}N{entry.entry - 48 * entry.layer}"
    assert found.fired(count=1)[0].name in repr(found)


@pytest.mark.parametrize("k", [None, 4])
def test_entries_of_a_connected_store(k):
    model = modular("gated").float()
    base = model.knowledge.entries.detach()
    ids = torch.arange(40).flip(0) * 3 + 7  # neither in order nor without gaps
    own, text = trace(model, [5, 6, 7], top=40), [f"entry {i}" for i in range(40)]
    with af.knowledge.Store.open("memory", dim=32, num_thresholds=model.config.threshold_columns) as store:
        af.knowledge.attach(model, store).insert(embeddings=base, ids=ids, texts=text)
        for reader in readers(model):
            reader.retrieval = None if k is None else af.knowledge.Retrieval(k=k, search="exact")
        found = trace(model, [5, 6, 7], top=40)
        if k is None:
            for one, other in zip(found, own, strict=True):
                assert torch.equal(one.ids, ids[other.ids])
                for name in ("scores", "thresholds", "weights", "norms", "direct_effects"):
                    torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4)
        first, expected = found.layer(0), own.layer(0)
        torch.testing.assert_close(total_effect(found), found.logits, rtol=1e-4, atol=1e-4)
        for row in range(3):
            kept = first.ids[row][first.ids[row] >= 0]
            best = expected.ids[row][expected.scores[row].topk(k or 40).indices]
            assert set(kept.tolist()) == set(ids[best].tolist())
        assert all(one.text == f"entry {(ids == one.entry).nonzero().item()}" for one in found.fired())


def hooks_of(model):
    return [(list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.modules()]


def test_the_model_is_left_as_it_was():
    model = made("Llama").train()
    calls = []
    before = hooks_of(model)
    modular_model = modular("relu")
    modular_model.readers()[0].observer = calls.append
    trace(modular_model, [5, 6])
    assert calls == []  # who counts what a model reads does not count this
    assert modular_model.readers()[0].observer == calls.append
    trace(model, [5, 6])
    assert model.training
    assert all(module.training for module in model.modules())
    assert hooks_of(model) == before


def test_no_contribution_of_every_token_and_entry_is_formed():
    """256 tokens of 1,024 entries of width 64 would be 17 million numbers."""
    model = converted("Llama", torch.float32, hidden_size=64, intermediate_size=1024, max_position_embeddings=256)
    with Largest() as largest:
        trace(model, tokens(1, 256))
    assert largest.numel <= 4 * 256 * 1024


@pytest.mark.parametrize(("name", "scale"), [("Cohere", "logit_scale"), ("Granite", "logits_scaling")])
def test_effects_are_on_the_logits_that_the_model_returns(name, scale):
    """Some families multiply what the unembedding gives."""
    config = build(Architecture(name.lower(), f"{name}ForCausalLM", "decoder")).config
    setattr(config, scale, 0.25)
    torch.manual_seed(0)
    opened = af.knowledge.from_ffn(getattr(transformers, f"{name}ForCausalLM")(config).double().eval())
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        logits = opened(ids).logits[0]
    found = trace(opened, ids, answer=7)
    torch.testing.assert_close(found.logits, logits[:, 7] - logits.mean(dim=-1))
    torch.testing.assert_close(total_effect(found), found.logits)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "heads"])
def test_entries_that_write_a_token_are_those_whose_values_point_to_it(name):
    model = made(name)
    found = af.knowledge.writers(model, 7, count=4)
    norm = model.transformer.ln_f if name == "GPT2" else model.model.norm
    head = model.lm_head.weight.detach()
    direction = (head[7] - head.mean(0)) * norm.weight.detach()
    expected = []
    for reader in readers(model):
        values = reader.values(torch.arange(reader.num_entries)).detach()
        values = values - values.mean(-1, keepdim=True) if name == "GPT2" else values
        cosines = torch.nn.functional.cosine_similarity(values, direction, dim=-1)
        expected += [(abs(float(c)), reader.layer, h) for h, row in enumerate(cosines) for c in row]
    sizes = [size for size, _, _ in sorted(expected, reverse=True)[:4]]
    assert [abs(entry.cosine) for entry in found.entries] == pytest.approx(sizes, rel=1e-5)
    with pytest.raises(ValueError, match="token must be"):
        af.knowledge.writers(model, 50)


def test_against_is_a_token_and_gradients_may_be_off():
    model = tiny("Llama")
    wanted = trace(model, [5, 6, 7], answer=8, against=9)
    with torch.inference_mode():
        found = trace(model, [5, 6, 7], answer=8, against=9)
    assert found.layer(0).effects.equal(wanted.layer(0).effects)
    for against, kind in ((50, ValueError), (-1, ValueError), (True, TypeError)):
        with pytest.raises(kind, match="against must be"):
            trace(model, [5, 6, 7], answer=8, against=against)
