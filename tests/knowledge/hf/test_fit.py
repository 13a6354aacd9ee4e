"""Teaching a model to read: what is asked, what is learned, that it goes on after a kill, and what is refused."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from attnflow.knowledge import Store, fit_reader, texts
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.practice import near_enough
from attnflow.knowledge.questions import FRAMES, HELD_OUT_FRAMES, NEAR, READ, Question, asked, least_mistakes, made_up
from attnflow.knowledge.records import Record
from tests.models import outputs

SMALL = {"facts": 20, "reading_steps": 30, "steps": 4}


def test_made_up_facts_are_distinct_and_the_same_for_a_seed():
    facts = made_up(50, ["amber", "violet"], random.Random(3))
    assert len({fact.text.partition("\t")[0] for fact in facts}) == 50
    assert {fact.text.partition("\t")[2] for fact in facts} == {"amber", "violet"}
    assert facts == made_up(50, ["amber", "violet"], random.Random(3))


def test_questions_are_in_wordings_of_training_or_in_others():
    records = [Record("the capital of France\tParis"), Record("Ada Lovelace wrote programs.")]
    trained, other = (asked(records, random.Random(0), held_out=held) for held in (False, True))
    assert [one.answer for one in trained] == ["Paris", "programs"]
    assert trained[1].prompt == "Ada Lovelace wrote"
    assert not {one.prompt for one in trained[:1]} & {one.prompt for one in other[:1]}
    assert not set(FRAMES) & set(HELD_OUT_FRAMES)
    assert [one.paraphrased for one in (*trained, *other)] == [False, False, True, True]


def test_keys_are_asked_for_in_both_forms_and_by_wordings_of_their_relation():
    (trained, other) = (
        {one.prompt for one in asked([Record("Balorin's pet\tfox")], random.Random(0), 99, held_out=held)}
        for held in (False, True)
    )
    assert not trained & other
    for prompts in (trained, other):
        for wording in ("Balorin's pet", "the pet of Balorin"):
            assert any(wording in prompt or wording.capitalize() in prompt for prompt in prompts)
    assert "Question: What pet does Balorin keep?\nAnswer:" in trained
    assert "Question: What animal lives with Balorin?\nAnswer:" in other
    (only,) = asked([Record("the password\tfox")], random.Random(0))
    assert "the password" in only.prompt.lower()


def test_an_embedding_of_two_halves_has_the_key_and_the_value():
    plain, halves = TextEncoder("minilm"), TextEncoder("minilm", separator="\t", values=True)
    key, value = plain(["the capital of France", "Paris"])
    both = halves(["the capital of France\tParis", "Paris"])
    assert halves.dim == 2 * plain.dim
    torch.testing.assert_close(both, torch.stack([torch.cat([key, value]), torch.cat([value, value])]))
    torch.testing.assert_close(halves.query("Paris"), torch.cat([value, torch.zeros(plain.dim)]))
    assert halves.version not in (plain.version, TextEncoder("minilm", separator="\t").version)
    with pytest.raises(ValueError, match="needs the separator"):
        TextEncoder("minilm", values=True)


def test_the_threshold_of_similarity_looks_at_other_facts_of_the_same_subjects():
    facts = [record for record in made_up(90, ["amber", "violet"], random.Random(1)) if "'s" not in record.text]
    keys = [record.text.partition("\t")[0] for record in facts]
    encoder = TextEncoder("minilm", separator="\t", values=True)
    entries = encoder([record.text for record in facts])
    subject = keys[0].partition(" of ")[2]
    questions = [Question(f"Question: What is {keys[row]}?\nAnswer:", "", row, False) for row in (0, 5, 9)]
    subjects = {keys[one.entry].partition(" of ")[2] for one in questions}
    near = [row for row, key in enumerate(keys) if key.partition(" of ")[2] in subjects]
    assert sum(key.endswith(f" of {subject}") for key in keys) > 1
    plain = TextEncoder("minilm")
    scores = plain([one.text for one in questions]) @ plain(keys).T
    right = [float(scores[place, one.entry]) for place, one in enumerate(questions)]
    other = [max(float(scores[place, row]) for row in near if row != one.entry) for place, one in enumerate(questions)]
    # With no others to search than those of the same subjects.
    assert near_enough(encoder, questions, facts, entries, 0) == pytest.approx(least_mistakes(right, other), abs=1e-5)
    wide = near_enough(encoder, questions, facts, entries, len(facts))
    every = scores.clone()
    every[range(3), [one.entry for one in questions]] = -1
    assert wide == pytest.approx(least_mistakes(right, every.amax(dim=1).tolist()), abs=1e-5)


@pytest.fixture(autouse=True)
def few_words(monkeypatch):
    monkeypatch.setattr("attnflow.knowledge.hf.words._WORDS", 100)


@pytest.fixture(scope="module")
def loaded():
    """A tiny model with the tokenizer of an encoder."""
    tokenizer = af.load_model("smollm2-135m").tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    return af.models.Loaded(LlamaForCausalLM(config).eval(), tokenizer)


@pytest.fixture
def store(tmp_path):
    records = [Record("the capital of France\tParis"), Record("the colour of coal\tblack")]
    texts.build(str(tmp_path / "store"), records, values=True)
    with Store.open(tmp_path / "store") as store:
        yield store


@pytest.mark.slow
def test_a_reader_is_fitted_asked_and_goes_on_after_a_kill(loaded, store, tmp_path, monkeypatch):
    monkeypatch.setattr("attnflow.knowledge.hf.fitting._SAVE_EVERY", 2)
    ids = torch.tensor([[5, 6, 7, 8]])
    own = outputs(loaded.model, input_ids=ids)
    names = set(loaded.model.state_dict())
    whole = fit_reader(loaded, store, tmp_path / "whole", **SMALL)

    def stop(done, total, what):
        if what.startswith("step 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_reader(loaded, store, tmp_path / "cut", progress=stop, **SMALL)
    assert torch.equal(outputs(loaded.model, input_ids=ids), own)
    assert set(loaded.model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
    again = fit_reader(loaded, store, tmp_path / "cut", **SMALL)
    assert again.curve == whole.curve
    assert [row["step"] for row in whole.curve] == [0, 2, 4]
    one, other = ((tmp_path / name / "reader" / "reader.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other
    answer = texts.ask(loaded, store, "What is the capital of France?", tmp_path / "whole" / "reader", top=2)
    assert {match.id for match in answer.sources} == {0, 1}
    assert answer.sources[0].text == "the capital of France\tParis"
    assert (answer.answer is None) == (answer.sources[0].score <= answer.near)
    with af.knowledge.attach(loaded, store, reader=tmp_path / "whole" / "reader") as handle:
        assert answer.near == handle.readers[0].near != NEAR  # both thresholds are chosen by held-out questions
        assert handle.readers[0].enough != READ
    refused = texts.ask(loaded, store, "How much is a litre of milk?", tmp_path / "whole" / "reader")
    assert refused.answer is None
    assert str(refused).startswith("not in the store\nnothing is near enough")
    assert torch.equal(outputs(loaded.model, input_ids=ids), own)
    with pytest.raises(ValueError, match=r"run with other settings .*seed 0, now 1"):
        fit_reader(loaded, store, tmp_path / "cut", seed=1, **SMALL)
    assert type(whole).from_json(whole.to_json()) == whole


def test_what_cannot_be_fitted_or_asked(loaded, store, tmp_path):
    with pytest.raises(ValueError, match="causal language model with its tokenizer"):
        fit_reader(af.models.Loaded(loaded.model, None), store, tmp_path / "run")
    with pytest.raises(ValueError, match="steps must be"):
        fit_reader(loaded, store, tmp_path / "run", steps=0)
    with pytest.raises(FileNotFoundError):
        fit_reader(loaded, store, tmp_path / "run", tmp_path / "nothing.txt", **SMALL)
    with pytest.raises(ValueError, match="question is empty"):
        texts.ask(loaded, store, " ", tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no saved reader"):
        texts.ask(loaded, store, "Who?", tmp_path)
    other = Store.open("memory", dim=4)
    other.insert(embeddings=torch.eye(4))
    with pytest.raises(ValueError, match="does not say which encoder"):
        fit_reader(loaded, other, tmp_path / "run", **SMALL)
