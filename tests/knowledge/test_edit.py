"""Edits of converted models: what they say, what stays, what comes back; the least change by numpy, in float64."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from attnflow.knowledge import ModularConfig, ModularForCausalLM, edit, from_ffn, to_ffn
from attnflow.knowledge.editing.edit import edited_layers, guarded, least_change, value_changes
from attnflow.knowledge.editing.edit_targets import (
    Method,
    _Continued,
    places_of,
    read_moments,
    sampled_text,
    targets,
    token_ids,
)
from attnflow.knowledge.editing.facts import EditReport, Fact, FactChange, read_facts
from attnflow.knowledge.editing.guard import NO_GUARD, EditGuard, continued, guard_of, likely
from attnflow.knowledge.editing.inputs import inputs_everywhere
from attnflow.models import load_model
from attnflow.models.subject import Subject
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


@pytest.mark.parametrize("guard", [True, False])
def test_a_layer_that_runs_twice_is_refused_and_nothing_changes(guard, tokenizer):
    model = converted()
    model.model.layers[3].mlp = model.model.layers[1].mlp  # as layers that share their weights
    before = state(model)
    with pytest.raises(ValueError, match="layer 1 runs twice in a pass: name layers that run once"):
        edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1], guard=guard)
    assert all(torch.equal(value, before[name]) for name, value in state(model).items())
    with edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[2], guard=guard) as handle:
        assert len(handle.report.facts) == 1


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
        assert all(fact.changed for fact in handle.report.facts)
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
            assert handle.report.facts[0].changed
            assert handle.report.largest_shift < 1e-6
            assert f"{len(texts)} texts that must not change" in str(handle)
            for one, logits in zip(inputs, own, strict=True):
                torch.testing.assert_close(model(**one).logits, logits, rtol=1e-9, atol=1e-9)
        with pytest.raises(ValueError, match="must not change"):
            edit(model, FRANCE, text=TEXT, untouched=[FRANCE["prompt"]], tokenizer=tokenizer, layers=[1])


def test_a_guard_finds_what_the_fact_is_not_and_what_states_it():
    loaded = load_model("smollm2-135m")
    subject = Subject.of(loaded)
    fact = Fact("The capital of France is", "Rome", "France")
    guard = guard_of(subject, fact, [fact])
    assert guard.rewordings == ("The capital city of France is",)
    assert len(guard.about) == len(guard.about_measured) == len(guard.beside) == len(guard.beside_measured) == 8
    prompts = [*guard.about, *guard.about_measured]
    assert all("France" in prompt and "capital" not in prompt for prompt in prompts)
    assert len({*prompts, *guard.rewordings}) == 17
    paris = int(likely(subject, [fact.prompt])[0].argmax())
    assert float(likely(subject, prompts)[:, paris].max()) < 0.05  # none states the fact in other words
    assert {"The capital of Italy is", "The capital of Spain is"} < {*guard.beside, *guard.beside_measured}
    italy = Fact("The capital of Italy is", "Paris", "Italy", ("The capital city of France is in Italy, or",))
    speak = Fact("People in France speak", "Italian", "France")  # of two facts on one subject neither guards the other
    assert "In France, people speak" in {*prompts}
    both = guard_of(subject, fact, [fact, speak, italy])
    assert "The capital of Italy is" not in {*both.beside, *both.beside_measured}
    assert not {"In France, people speak", "The language of France is"} & {*both.about, *both.about_measured}
    unknown = Fact("The of France the is", "Rome", "France")
    assert guard_of(subject, unknown, [unknown]).rewordings == ()
    assert guard_of(subject, Fact("The capital of France is", "Rome"), []) == NO_GUARD


def test_what_a_guard_holds_moves_less(tokenizer):
    subject = Subject(converted(), tokenizer)
    layers = edited_layers(subject.model, [1, 2])
    fact = Fact(**FRANCE)
    guard = EditGuard(
        (), ("the river of France", "the way of France"), ("the capital of Spain", "the capital of Italy"), (), ()
    )
    moments = read_moments(subject, layers, TEXT, 256)
    aims = targets(subject, layers, [fact], [places_of(subject, fact, moments.openings)], moments.openings, Method())

    def moved(moments):
        changes = value_changes(subject, layers, aims, [], moments, Method.ridge)
        held = inputs_everywhere(subject, layers, [token_ids(tokenizer, text) for text in guard.about + guard.beside])
        return [float((held[layer] @ changes[layer]).norm()) for layer in layers]

    free, held = moved(moments), moved(guarded(subject, layers, moments, [guard]))
    assert sum(held) < 0.8 * sum(free)


def test_a_report_counts_what_was_lost_beside_a_fact(tokenizer):
    model = converted()
    with edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1, 2]) as handle:
        report = handle.report
        assert 0 < report.facts[0].beside <= 8
        assert 0 <= report.facts[0].beside_kept <= report.facts[0].beside
        assert report.text is not None
    with edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1, 2], guard=False) as handle:
        assert handle.report.facts[0].about == handle.report.facts[0].beside == 0
        assert "not promised: other statements on the subject stay: not measured for 1 of 1 fact" in str(handle)
        assert handle.report.facts[0].changed
        assert handle.report.ok is (False if handle.report.problems else None)


LOST = {"about": 10, "about_kept": 8, "beside": 20, "beside_kept": 19, "understood": 20, "understood_changed": 17}


@pytest.mark.parametrize(
    ("changes", "text", "problem"),
    [
        ({"about_kept": 9}, 0.01, None),
        ({}, 0.0, "other statements on the subject stay: 8 of 10, fewer than 85%"),
        ({"about_kept": 9, "beside_kept": 18}, 0.0, "the same statement on other subjects stays: 18 of 20"),
        ({"about_kept": 9, "understood_changed": 16}, 0.0, "paraphrases that the model understood follow: 16 of 20"),
        ({"about_kept": 9}, 0.011, "the loss on other text rises by 0.011 nats"),
        ({"about_kept": 9}, float("nan"), "the loss on other text rises by nan"),
        ({"about_kept": 9, "changed": False}, 0.0, "'p' is answered 'b', not 'x'"),
    ],
)
def test_a_report_is_ok_only_within_its_bounds(changes, text, problem):
    values = {"changed": True, "paraphrases_changed": 0, **LOST, **changes}
    fact = FactChange("p", "x", 0.1, 0.9, " a", " b", **values)
    report = EditReport((fact,), (1,), 3, (0.1,), 0, 0.0, text)
    assert report.ok is (problem is None)
    assert [line.startswith(problem or "-") for line in report.problems] == ([True] if problem else [])
    assert problem is None or f"outside its bound: {problem}" in str(report)


@pytest.mark.parametrize("name", ["understood", "about", "beside", "text"])
def test_nothing_is_promised_of_what_was_not_measured(name):
    good = dict.fromkeys(["understood", "understood_changed", "about", "about_kept", "beside", "beside_kept"], 8)
    less = {key: value for key, value in good.items() if not key.startswith(name)}
    text = None if name == "text" else 0.0

    def report(*facts):
        made = [FactChange("p", "x", 0.1, 0.9, " a", " x", True, 0, **values) for values in facts]
        return EditReport(tuple(made), (1,), 3, (0.1,), 0, 0.0, text)

    partly = report(good, less)
    assert partly.ok is None
    assert partly.problems == ()
    (line,) = partly.unmeasured
    assert line.endswith("not measured" if name == "text" else "not measured for 1 of 2 facts")
    assert f"not promised: {line}" in str(partly)
    lost = report(less, {**good, "about_kept": 0, "beside_kept": 0})
    assert lost.ok is False  # what is wrong is said before what was not measured
    assert EditReport.from_json(partly.to_json()).ok is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_pass_that_is_continued_is_the_whole_pass(family):
    subject = Subject.of(converted(family).double())
    rows, positions = [[3, 4, 5, 6, 7], [8, 9], [3, 4, 9, 9, 9, 9, 1], [5, 6, 7]], [2, 0, 5, 1]
    continued = _Continued(subject, rows, positions)
    assert continued.columns == [0, 0, 0, 0]
    for _ in range(2):  # the cache that is kept stays as it is
        logits = continued()
        for row, (ids, position) in enumerate(zip(rows, positions, strict=True)):
            expected = subject.model(torch.tensor([ids])).logits[0, position:]
            torch.testing.assert_close(logits[row, : len(ids) - position], expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(continued.whole[row, : len(ids)], subject.model(torch.tensor([ids])).logits[0])
    whole = _Continued(Subject.of(Forgetful(subject.model)), rows, positions)
    assert whole.columns == positions
    torch.testing.assert_close(whole(), continued.whole)


class Forgetful(torch.nn.Module):
    """Takes a cache, and reads nothing from it."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config = model, model.config

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        mask = attention_mask[:, -input_ids.shape[1] :]
        return self.inner(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=use_cache)


def test_facts_that_share_passes_are_taught_as_each_alone(tokenizer):
    """What is found for a fact does not depend on those that are found beside it."""
    subject = Subject(converted().double(), tokenizer)
    layers = edited_layers(subject.model, [1, 2])
    facts = [Fact(**{**FRANCE, "paraphrases": ()}), Fact(**{**SKY, "paraphrases": ("and the sky",)})]
    leads = ["the sea was blue. "]
    places = [places_of(subject, fact, leads) for fact in facts]
    together = targets(subject, layers, facts, places, leads, Method())
    alone = [
        targets(subject, layers, [fact], [spots], leads, Method()) for fact, spots in zip(facts, places, strict=True)
    ]
    for layer, (rows, added) in together.items():
        torch.testing.assert_close(rows, torch.cat([one[layer][0] for one in alone]), rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(added, torch.cat([one[layer][1] for one in alone]), rtol=1e-4, atol=1e-6)


def test_a_model_writes_the_text_that_it_keeps(tokenizer):
    model = converted()
    begin = torch.get_rng_state()
    subject = Subject(model, tokenizer)
    text = sampled_text(subject, 256)
    assert torch.equal(torch.get_rng_state(), begin)
    assert sampled_text(subject, 256) == text
    assert len(set(text.split())) > 10
    with edit(model, FRANCE, tokenizer=tokenizer, layers=[1], tokens=128) as handle:
        assert handle.report.facts[0].after > handle.report.facts[0].before
        assert handle.moments.tokens <= 128


def test_a_few_entries_change_if_asked(tokenizer):
    model = converted()
    with edit(model, FRANCE, text=TEXT, tokenizer=tokenizer, layers=[1, 2], entries=5) as handle:
        assert handle.count == handle.report.entries == 10


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
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # GPT-2 has no embedding for a position beyond its last
def test_facts_that_are_refused(changes, message, family, tokenizer):
    refused(converted(family), {**FRANCE, **changes}, message, tokenizer)


def test_a_prompt_as_long_as_the_model_reads_is_guarded_by_what_fits(tokenizer):
    model, prompt = converted("gpt2"), " ".join(["the"] * 62 + ["France"])
    with edit(model, {**FRANCE, "prompt": prompt}, text=TEXT, tokenizer=tokenizer, layers=[1]) as handle:
        assert handle.report.facts[0].after > handle.report.facts[0].before


def test_what_else_is_refused(tokenizer):
    model = converted()
    refused(model, [], "at least one fact", tokenizer)
    refused(model, FRANCE, "needs the model's tokenizer", None)
    refused(model, FRANCE, "layers must be", tokenizer, layers=[4])
    refused(model, FRANCE, "layers must be among", tokenizer, layers=[])
    refused(model, FRANCE, "the text is empty", tokenizer, text="")
    refused(model, FRANCE, "entries must be", tokenizer, entries=0)
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


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_model_goes_on_with_is_its_greedy_text(count, tokenizer):
    subject = Subject(converted().double(), tokenizer)
    prompts = ["the capital of France", "the sky", "a long way from the sea and", "and the sky"]
    said, chances = continued(subject, prompts, count)
    assert torch.equal(said, continued(subject, prompts, count, likely(subject, prompts))[0])
    for row, chance, prompt in zip(said, chances, prompts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = subject.model.generate(
            ids,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert out.sequences[0, ids.shape[1] :].tolist() == row.tolist()
        logs = [logits[0].log_softmax(-1)[token] for logits, token in zip(out.logits, row, strict=True)]
        assert float(chance) == pytest.approx(float(torch.stack(logs).mean().exp()), rel=1e-5)
    nothing, _ = continued(subject, [], count)
    assert nothing.shape == (0, count)


def test_answers_of_several_tokens_are_kept_as_a_whole(tokenizer):
    """A statement stays if the model goes on as before for as many tokens as the answer has."""
    model = converted()
    subject = Subject(model, tokenizer)
    fact = Fact("the capital of France", "Rome Spain", "France")
    guard = guard_of(subject, fact, [fact])
    measured = [*guard.about_measured, *guard.beside_measured]
    before, sure = continued(subject, measured, 2)
    assert len(before) > 8
    with edit(model, fact, text=TEXT, tokenizer=tokenizer, layers=[1, 2]) as handle:
        after, _ = continued(subject, measured, 2)
        (change,) = handle.report.facts
    known, stay = sure >= 0.15, before == after
    assert change.about + change.beside == int(known.sum())
    assert change.about_kept + change.beside_kept == int((known & stay.all(dim=1)).sum())
    assert bool((known & stay[:, 0] & ~stay.all(dim=1)).any())  # of these the first token alone would count
