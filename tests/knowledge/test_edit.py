"""Edits of converted models: what they say, what stays, what comes back; the least change by numpy, in float64."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from attnflow.knowledge import ModularConfig, ModularForCausalLM, edit, from_ffn, to_ffn
from attnflow.knowledge.editing.edit import least_change
from attnflow.knowledge.editing.facts import EditReport, Fact, read_facts
from tests.models import tiny
from tests.models.saved import word_tokenizer

TEXT = "the capital of France is Paris and the river of Italy was a long way from the sea and the sky is blue"
WORDS = [*dict.fromkeys(TEXT.split()), "Rome", "Lyon", "green", "Spain", "."]
TEXT = " ".join(random.Random(0).choices(WORDS, k=600))
SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
FRANCE = {"prompt": "the capital of France", "answer": "Rome", "subject": "France"}
SKY = {"prompt": "the sky", "answer": "green", "subject": "sky", "paraphrases": ["and the sky"]}


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(["[PAD]", "[UNK]", *WORDS], pad_token="[PAD]")


def converted(family="llama"):
    torch.manual_seed(0)
    if family == "gpt2":
        plain = GPT2LMHeadModel(
            GPT2Config(vocab_size=40, n_embd=32, n_layer=4, n_head=2, n_positions=64, tie_word_embeddings=False)
        )
    else:
        plain = LlamaForCausalLM(LlamaConfig(intermediate_size=48, max_position_embeddings=64, **SIZES))
    with torch.no_grad():
        plain.lm_head.weight.mul_(20)  # so that what a layer adds can make any word the most likely,
        for name, weight in plain.named_parameters():  # and is no less than what it comes to
            weight.mul_(30 if name.endswith(("down_proj.weight", "mlp.c_proj.weight")) else 1)
    return from_ffn(plain.eval())


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, before):
    after = model.state_dict()
    return set(after) == set(before) and all(torch.equal(value, before[name]) for name, value in after.items())


def says(model, tokenizer, prompt):
    with torch.no_grad():
        return tokenizer.decode([int(model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].argmax())])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_model_says_it_and_is_as_it_was_afterwards(family, tokenizer):
    model = converted(family)
    before = state(model)
    with edit(model, [FRANCE, SKY], text=TEXT, tokenizer=tokenizer, layers=[1, 2]) as handle:
        assert handle.report.ok
        assert says(model, tokenizer, "the capital of France") == "Rome"
        assert says(model, tokenizer, "the sky") == "green"
        assert handle.report.facts[1].paraphrases_changed == 1
        assert "2 of 2 facts changed" in str(handle)
        assert EditReport.from_json(handle.report.to_json()) == handle.report
        changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
        assert changed == ["knowledge.entries"]
        base = model.knowledge
        moved = (base.entries.detach() != before["knowledge.entries"]).nonzero()
        assert handle.count == len(moved[:, 0].unique()) <= 2 * base.num_entries
        assert set(base.layer_of(base.ids[moved[:, 0].unique()])) == {1, 2}
        columns = moved[:, 1].unique()
        assert base.layouts[1].value.start <= int(columns.min()) <= int(columns.max()) < base.layouts[1].value.stop
        plain = to_ffn(model)
    assert same(model, before)
    assert says(plain, tokenizer, "the capital of France") == "Rome"
    assert str(handle).endswith("(removed)")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_texts_that_must_not_change_do_not(tokenizer):
    model = converted().double()
    texts = ["the capital of Italy", "the river of France was"]
    inputs = [tokenizer(text, return_tensors="pt") for text in texts]
    with torch.no_grad():
        own = [model(**one).logits for one in inputs]
        with edit(model, FRANCE, text=TEXT, untouched=texts, tokenizer=tokenizer, layers=[1, 2]) as handle:
            assert handle.report.ok
            assert handle.report.largest_shift < 1e-6
            assert f"{len(texts)} texts that must not change" in str(handle)
            for one, logits in zip(inputs, own, strict=True):
                torch.testing.assert_close(model(**one).logits, logits, rtol=1e-9, atol=1e-9)
        with pytest.raises(ValueError, match="must not change"):
            edit(model, FRANCE, text=TEXT, untouched=[FRANCE["prompt"]], tokenizer=tokenizer, layers=[1])


def test_without_a_subject_the_wording_alone_changes(tokenizer):
    model = converted()
    fact = {"prompt": "the capital of France", "answer": "Rome Spain"}
    with edit(model, fact, text=TEXT, tokenizer=tokenizer, layers=[2]) as handle:
        assert handle.report.facts[0].after > handle.report.facts[0].before
    assert handle.report.layers == (2,)


def test_several_edits_come_off_in_any_order(tokenizer):
    model = converted()
    begin = state(model)
    first = edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1, 2])
    second = edit(model, SKY, text=first.moments, tokenizer=tokenizer, layers=[2])
    assert says(model, tokenizer, "the sky") == "green"
    first.remove()
    first.remove()
    assert says(model, tokenizer, "the sky") == "green"
    second.remove()
    assert same(model, begin)


def test_entries_that_others_changed_are_not_overwritten(tokenizer):
    model = converted()
    handle = edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1])
    mine = model.knowledge.rows(1)
    row = model.knowledge.ids[mine][:1]
    entry = model.knowledge.get(row)
    model.knowledge.update(row, entry + 1)
    with pytest.raises(RuntimeError, match="entries of layer 1 were changed"):
        handle.remove()
    model.knowledge.update(row, entry)
    handle.remove()


def refused(model, fact, message, tokenizer, **settings):
    before = state(model)
    with pytest.raises(ValueError, match=message):
        edit(model, fact, **{"text": TEXT, "tokenizer": tokenizer, "layers": [1], **settings})
    after = model.state_dict()
    assert all(torch.equal(value.nan_to_num(), after[name].nan_to_num()) for name, value in before.items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": "  "}, "answer to 'the capital of France' is empty"),
        ({"prompt": "  ", "subject": ""}, "a prompt of a fact must have text"),
        ({"subject": "Spain"}, "must contain the subject 'Spain'"),
        ({"prompt": "the France " * 60}, "but the model reads at most 64"),
        ({"wording": "x"}, "a fact must have the texts prompt, answer, subject"),
        ({"paraphrases": "France"}, "a list paraphrases"),
        ({"answer": 3}, "a fact must have the texts"),
    ],
)
def test_facts_that_are_refused(changes, message, tokenizer):
    refused(converted(), {**FRANCE, **changes}, message, tokenizer)


def test_what_else_is_refused(tokenizer):
    model = converted()
    refused(model, [], "at least one fact", tokenizer)
    refused(model, FRANCE, "needs the model's tokenizer", None)
    refused(model, FRANCE, "layers must be", tokenizer, layers=[4])
    refused(model, FRANCE, "layers must be among", tokenizer, layers=[])
    refused(model, FRANCE, "the text is empty", tokenizer, text="")
    with torch.no_grad():
        model.knowledge.entries[3, 3] = float("nan")
    refused(model, FRANCE, "NaN or infinity", tokenizer)
    refused(LlamaForCausalLM(LlamaConfig(intermediate_size=48, **SIZES)), FRANCE, "from_ffn", tokenizer)
    refused(ModularForCausalLM(ModularConfig(num_entries=9, **SIZES)), FRANCE, "needs a converted model", tokenizer)
    refused(from_ffn(tiny("Mixtral")), FRANCE, "needs a converted model|experts", tokenizer)


def test_facts_are_read_from_lines(tmp_path):
    path = tmp_path / "facts.jsonl"
    path.write_text('{"prompt": "a b", "answer": "c"}\n\n{"prompt": "d", "answer": "e", "paraphrases": ["f"]}\n')
    assert read_facts(path) == [Fact("a b", "c"), Fact("d", "e", "", ("f",))]
    assert read_facts(Fact("a", "b")) == [Fact("a", "b")]


def problem(seed, places, others, entries=12, width=5):
    draw = torch.Generator().manual_seed(seed)
    some = torch.randn(40, entries, generator=draw, dtype=torch.float64)
    moment = some.T @ some / 40 + 1e-3 * torch.eye(entries, dtype=torch.float64)
    shapes = ((places, entries), (places, width), (others, entries))
    return (*(torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes), moment)


def by_conditions(weights, wanted, untouched, moment, ridge):
    """Stationary points of the Lagrangian, one linear system for each column: 2 M X + ... = 0 with its constraints."""
    entries = weights.shape[1]
    others = len(untouched)
    if ridge:
        upper = moment + weights.T @ weights / ridge
        right = weights.T @ wanted / ridge
        bound, target = untouched, torch.zeros(others, wanted.shape[1], dtype=torch.float64)
    else:
        upper, right = moment, torch.zeros(entries, wanted.shape[1], dtype=torch.float64)
        bound = torch.cat([weights, untouched])
        target = torch.cat([wanted, torch.zeros(others, wanted.shape[1], dtype=torch.float64)])
    system = torch.zeros(entries + len(bound), entries + len(bound), dtype=torch.float64)
    system[:entries, :entries] = upper
    system[:entries, entries:], system[entries:, :entries] = bound.T, bound
    solved = np.linalg.lstsq(system.numpy(), torch.cat([right, target]).numpy(), rcond=None)[0]
    return torch.from_numpy(solved[:entries])


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 5), st.sampled_from([0.0, 0.1, 3.0]))
def test_the_least_change_meets_its_conditions(seed, places, others, ridge):
    weights, wanted, untouched, moment = problem(seed, places, others)
    change = least_change(weights, wanted, moment, untouched=untouched, ridge=ridge)
    expected = by_conditions(weights, wanted, untouched, moment, ridge)
    torch.testing.assert_close(change, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))
    size = float(change.abs().max())
    assert float((untouched @ change).abs().max() if others else 0) <= 1e-9 * size
    if not ridge:
        torch.testing.assert_close(weights @ change, wanted, rtol=1e-7, atol=1e-7)


def test_least_changes_that_are_refused():
    weights, wanted, untouched, moment = problem(0, 2, 2)
    with pytest.raises(ValueError, match="must be positive definite"):
        least_change(weights, wanted, -moment)
    for bad in (weights * torch.nan, weights / 0):
        with pytest.raises(ValueError, match="must be finite"):
            least_change(bad, wanted, moment)
    with pytest.raises(ValueError, match="ridge at least 0"):
        least_change(weights, wanted, moment, ridge=-1.0)
    with pytest.raises(ValueError, match="linearly dependent"):
        least_change(torch.cat([weights, weights]), torch.cat([wanted, wanted]), moment)
    with pytest.raises(ValueError, match="must not change"):
        least_change(weights, wanted, moment, untouched=torch.cat([untouched, weights[:1]]), ridge=0.1)
