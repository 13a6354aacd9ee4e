"""Rows of data as a batch: the tensors of the collators that people use, and the rows that cannot be read."""

import numpy as np
import pandas
import pytest
import torch
from datasets import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    T5ForConditionalGeneration,
)
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as TrlCollator

from attnflow.audit import check_batch
from attnflow.audit.batch.reading import Family, family_of
from attnflow.audit.batch.rows import as_batch
from attnflow.models.subject import Loaded
from tests.audit.batches import CAUSAL, MASKED, SEQUENCES, completions, pairs
from tests.audit.common import tiny
from tests.audit.packing import EOS, PAD, samples, texts, tokenizer

MARKED = (
    "{% for m in messages %}w0 {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <eos>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %} {% endfor %}{% if add_generation_prompt %}w0 {% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LAST_ONLY = UNMARKED.replace("{{ m.content }} <eos>", "{{ m.content if loop.last else 'w1' }} <eos>")


def chats(count=3):
    words = texts(4 * count)
    roles = ["user", "assistant"] * 2
    return [{"messages": [{"role": r, "content": words[4 * i + j]} for j, r in enumerate(roles)]} for i in range(count)]


def lengths(count=3):
    """TRL's packed rows: several documents each, and their lengths."""
    rows = samples(2 * count)
    both = [(rows[2 * i]["input_ids"], rows[2 * i + 1]["input_ids"]) for i in range(count)]
    return [{"input_ids": a + b, "labels": a + b, "seq_lengths": [len(a), len(b)]} for a, b in both]


def seq2seq(rows):
    return DataCollatorForSeq2Seq(tokenizer())(rows)


def flattening(rows):
    return DataCollatorWithFlattening()(rows)


def trl(rows, **more):
    return TrlCollator(PAD, **more)([dict(row) for row in rows])


def arrays(rows):
    return [{name: np.array(value) for name, value in row.items()} for row in rows]


COLLATORS = {
    "labels, padded": (completions(), {}, seq2seq),
    "labels, padded by TRL": (completions(), {}, trl),
    "no labels, padded": (samples(), {}, DataCollatorForLanguageModeling(tokenizer(), mlm=False)),
    "no labels, padded by TRL": (samples(), {}, trl),
    "labels, packed": (completions(), {"pack": True}, flattening),
    "no labels, packed": (samples(), {"pack": True}, flattening),
    "labels, packed by TRL": (completions(), {"pack": True}, lambda rows: trl(rows, padding_free=True)),
    "documents, packed by TRL": (lengths(), {"pack": True}, lambda rows: trl(rows, padding_free=True)),
    "documents, padded by TRL": (lengths(), {}, lambda rows: trl(rows, return_position_ids=True)),
    "encoder and decoder": (
        pairs(),
        {"family": family_of(SEQUENCES)},
        DataCollatorForSeq2Seq(tokenizer(), T5ForConditionalGeneration(SEQUENCES)),
    ),
}


@pytest.mark.parametrize("form", [list, arrays, Dataset.from_list])
@pytest.mark.parametrize("name", COLLATORS)
def test_the_same_batch_as_from_a_collator(name, form):
    rows, options, collate = COLLATORS[name]
    expected, made = collate([dict(row) for row in rows]), as_batch(form(rows), tokenizer(), **options)
    shared = [key for key in made.tensors if key in expected]
    assert {"input_ids", "labels"} <= set(shared)
    assert all(torch.equal(made.tensors[key], expected[key]) for key in shared), made
    assert set(made.tensors) <= set(expected)
    for row, data in enumerate(rows):
        for position, token in enumerate(data["input_ids"]):
            place = (0, made.starts[row] + position) if made.starts else (row, position)
            assert made.place(*place) == (row, position)
            assert made.tensors["input_ids"][place] == token


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ([{"text": text} for text in texts(6)], {}),
        ([{"prompt": a, "completion": f" {b}"} for a, b in zip(texts(6), texts(6, 1), strict=True)], {}),
        (chats(), {"assistant_only_loss": True}),
        ([{"prompt": c["messages"][:3], "completion": c["messages"][3:]} for c in chats()], {}),
    ],
    ids=["text", "prompt", "messages", "prompt of messages"],
)
def test_texts_as_trl_makes_tokens_of_them(rows, options, tmp_path):
    from trl import SFTConfig, SFTTrainer

    from tests.tasks.hf.test_trl import QUIET, model

    words = tokenizer(chat_template=MARKED)
    arguments = SFTConfig(str(tmp_path), **QUIET, **options)
    trainer = SFTTrainer(model(), arguments, train_dataset=Dataset.from_list(rows), processing_class=words)
    expected = trl(
        [{name: trainer.train_dataset[i][name] for name in ("input_ids", "labels")} for i in range(len(rows))]
    )
    made = as_batch(rows, words).tensors
    assert all(torch.equal(made[name], expected[name]) for name in made)


def answers(row, words):
    """The learned tokens, as text."""
    made = as_batch([row], words)
    return words.decode(made.tensors["labels"][0][made.tensors["labels"][0] != -100]), made.notes[0]


def test_answers_of_messages():
    row = {"messages": [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}] * 2}
    marked, note = answers(row, tokenizer(chat_template=MARKED))
    assert (marked, "marks" in note) == ("w7 <eos> w7 <eos>", True)
    text, note = answers(row, tokenizer(chat_template=UNMARKED))
    assert (text, "the chat template marks none" in note) == (marked, True)
    text, note = answers(row, tokenizer(chat_template=LAST_ONLY))
    assert text == "w0 w5 w6 w0 w1 <eos> w0 w5 w6 w0 w7 <eos>"
    assert note.startswith("labels: all tokens, of prompts, too")


MASKS = {
    "completion_mask": ({"completion_mask": [0, 0, 1, 1]}, [-100, -100, 7, 2]),
    "bool": ({"assistant_masks": [False, True, True, False]}, [-100, 6, 7, -100]),
    "floats": ({"loss_mask": [0.0, 1.0, 1.0, 1.0]}, [-100, 6, 7, 2]),
    "two": ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 0, 1, 1]}, [-100, -100, 7, 2]),
    "padding": ({"attention_mask": [1, 1, 1, 0]}, [5, 6, 7, -100]),
}


@pytest.mark.parametrize("name", MASKS)
def test_labels_are_made_of_masks(name):
    masks, labels = MASKS[name]
    made = as_batch([{"input_ids": [5, 6, 7, 2], **masks}])
    assert made.tensors["labels"].tolist() == [labels]
    assert made.notes[0].startswith("labels: ")
    assert set(made.tensors) == {"input_ids", "labels", *(masks.keys() & {"attention_mask"})}


def test_masks_are_kept_beside_labels_that_the_rows_have():
    row = {"input_ids": [5, 6, 7, 2], "labels": [-100, 6, 7, 2], "completion_mask": [0, 0, 1, 1]}
    (mistake,) = check_batch([row], CAUSAL).mistakes
    assert (mistake.kind, mistake.sequence, mistake.position) == ("prompt", 0, 1)


@pytest.mark.parametrize("column", ["seq_lengths", "cu_seqlens", "doc_boundaries", "document_lengths"])
@pytest.mark.parametrize("pack", [False, True])
def test_documents_of_a_row(column, pack):
    value = [0, 2, 5] if column in ("cu_seqlens", "doc_boundaries") else [2, 3]
    rows = [{"input_ids": [5, 2, 7, 8, 2], column: value}]
    made = as_batch(rows, pack=pack)
    assert made.tensors["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert any(column in note for note in made.notes)
    report = check_batch(made.tensors, CAUSAL)
    assert report.documents == 2
    assert [m.kind for m in report.mistakes] == ([] if pack else ["documents"])


class Counting:
    """A dataset of many rows that says which were read."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        self.read.append(index)
        return self.rows[index % len(self.rows)]


def test_of_a_dataset_only_the_first_rows_are_read():
    rows = Counting(samples())
    report = check_batch(rows, CAUSAL)
    assert rows.read == list(range(8))
    assert report.sequences == 8
    assert "only the first 8 of 1000000 rows were read" in report.notes
    assert check_batch(samples(12), CAUSAL).sequences == 12, "a list is a batch"


@pytest.mark.parametrize(
    "form", [list, tuple, Dataset.from_list, lambda rows: Dataset.from_list(rows).with_format("torch")]
)
def test_a_check_of_rows_is_that_of_their_batch(form):
    rows = completions()
    rows[2]["labels"][-1] = -100
    made = check_batch(form(rows), CAUSAL)
    expected = check_batch(seq2seq([dict(row) for row in rows]), CAUSAL)
    assert (made.mistakes, made.labels, made.checked) == (expected.mistakes, expected.labels, expected.checked)
    assert [(m.kind, m.sequence, m.position) for m in made.mistakes] == [
        ("unsupervised", 2, len(rows[2]["input_ids"]) - 1)
    ]


def test_rows_of_text_take_the_tokenizer_of_a_loaded_model():
    model = tiny("Llama", vocab_size=44, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    report = check_batch([{"text": text} for text in texts(3)], Loaded(model, tokenizer()))
    assert report.ok, report
    assert report.labels > 0


def test_no_labels_are_made_for_a_masked_language_model():
    report = check_batch(samples(), MASKED)
    assert report.labels == 0
    assert any(note.startswith("labels: none") for note in report.notes)


def test_eos_and_pad_may_be_said():
    rows = [{"input_ids": [5, 6, 2], "labels": [5, 6, -100]}, {"input_ids": [5, 2], "labels": [5, 2]}]
    assert {m.kind for m in check_batch(rows, eos=2, pad=1).mistakes} == {"unsupervised"}
    assert check_batch(rows).mistakes == ()


def bad(row, words=None, **options):
    return lambda: as_batch([{"input_ids": [5, 6, 2]}, row], words, **options)


IDS = [5, 6, 2]
CHAT = tokenizer(chat_template=UNMARKED)
FAILS = tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
JOINS = tokenizer(chat_template="{% for m in messages %}{{ 'w0 ' + m.content }}{% endfor %}")
PARTS = [{"role": "user", "content": [{"type": "text", "text": "w5"}]}]
USER = [{"role": "user", "content": "w5"}]
BAD = {
    "texts": (
        bad({"input_ids": ["w5", "w6"]}),
        "row 1: input_ids must be one list of whole numbers, got the text 'w5'",
    ),
    "floats": (bad({"input_ids": [5, 6.5]}), "whole numbers, got 6.5 at position 1"),
    "bools": (bad({"input_ids": [True, False]}), "whole numbers, got true at position 0"),
    "a gap": (bad({"input_ids": [5, None]}), "whole numbers, got null at position 1"),
    "nested": (bad({"input_ids": [[5, 6]]}), "one list of whole numbers, got a list at position 0"),
    "a text": (bad({"input_ids": "5 6 7"}), "one list of whole numbers, got the text '5 6 7'"),
    "a number": (bad({"input_ids": 5}), "one list of whole numbers, got 5"),
    "none": (bad({"input_ids": []}), "got an empty list"),
    "huge": (bad({"input_ids": [2**70]}), "whole numbers, got 1180591620717411303424 at position 0"),
    "not in the vocabulary": (
        lambda: as_batch([{"input_ids": [5, 44]}], tokenizer()),
        "row 0: token 44 at position 1 is not one of the tokenizer's 44",
    ),
    "short labels": (bad({"input_ids": IDS, "labels": [5]}), "row 1: labels has 1 entries and input_ids 3"),
    "a short mask": (bad({"input_ids": IDS, "attention_mask": [1]}), "attention_mask has 1 entries"),
    "labels of floats": (
        bad({"input_ids": IDS, "labels": [5.0, 6.0, 2.0]}),
        "labels must be one list of whole numbers",
    ),
    "a mask of numbers": (bad({"input_ids": IDS, "loss_mask": [0, 5, 1]}), "loss_mask must hold 0 and 1, got 5"),
    "a mask of weights": (bad({"input_ids": IDS, "loss_mask": [0.5, 1, 1]}), "loss_mask must be one list of whole"),
    "other columns": (bad({"input_ids": IDS, "labels": IDS}), "row 1: it has labels, and row 0 does not: give all"),
    "missing columns": (
        lambda: as_batch([{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS}]),
        "row 1: it has no labels, and row 0 does",
    ),
    "another form": (bad({"text": "w5"}, CHAT), "row 1: it has no input_ids, and row 0 does"),
    "not a row": (lambda: as_batch([{"input_ids": IDS}, [5, 6]]), "row 1: expected an object with input_ids"),
    "nothing": (bad({}), "row 1: expected input_ids, messages, prompt with completion, or text, got an empty row"),
    "other names": (bad({"question": "a"}), "got question: rename the columns"),
    "lengths": (bad({"input_ids": IDS, "seq_lengths": [1, 1]}), "the lengths of its documents, which add up to its 3"),
    "unclear lengths": (bad({"input_ids": IDS, "doc_ends": [1, 9]}), "doc_ends holds [1, 9]: expected the lengths"),
    "two opinions": (
        bad({"input_ids": IDS, "seq_lengths": [1, 2], "position_ids": [0, 1, 2]}),
        "position_ids do not restart where its lengths",
    ),
    "ShareGPT": (bad({"conversations": [{"from": "human", "value": "w5"}]}, CHAT), '"from" is role (human is user'),
    "ShareGPT as messages": (bad({"messages": [{"from": "human", "value": "w5"}]}, CHAT), "got from, value: write"),
    "Alpaca": (bad({"instruction": "a", "output": "b"}, CHAT), "name the output completion"),
    "preferences": (bad({"prompt": "a", "chosen": "b", "rejected": "c"}, CHAT), "one answer as completion"),
    "half": (bad({"prompt": "a"}, CHAT), "a prompt needs a completion"),
    "no tokenizer": (bad({"text": "w5"}), "row 1: messages and text need a tokenizer"),
    "no template": (bad({"messages": USER}, tokenizer()), "messages need a chat template, and the tokenizer has none"),
    "parts": (lambda: as_batch([{"messages": PARTS}], JOINS), "row 0: the chat template refuses its messages"),
    "parts as Python prints them": (lambda: as_batch([{"messages": PARTS}], CHAT), "writes a list of parts as Python"),
    "a template that refuses": (bad({"messages": USER}, FAILS), "refuses its messages: TemplateError: roles must"),
    "messages as text": (bad({"messages": "[]"}, CHAT), "a list of objects with role and content, got the text '[]'"),
    "no messages": (bad({"messages": []}, CHAT), "with role and content, got an empty list"),
    "a template of the row": (
        bad({"messages": USER, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, CHAT),
        "chat_template_kwargs sets chat_template, which is not for a row to set",
    ),
    "damaged tools": (bad({"messages": USER, "tools": "[{"}, CHAT), "tools must be a list of objects"),
    "text of a list": (bad({"text": ["w5"]}, CHAT), "text must be text, got a list"),
    "a completion of messages": (
        bad({"prompt": "w5", "completion": USER}, CHAT),
        "completion must be text like prompt",
    ),
    "packed padding": (
        bad({"input_ids": IDS, "attention_mask": [1, 1, 0]}, pack=True),
        "it has attention_mask, and row 0 does not",
    ),
    "packed padding of all": (
        lambda: as_batch([{"input_ids": IDS, "attention_mask": [1, 1, 0]}], pack=True),
        "row 0: its attention_mask is not 1 everywhere: packing drops it",
    ),
    "packed documents": (
        lambda: as_batch([{"input_ids": IDS, "position_ids": [0, 1, 0]}], pack=True),
        "row 0: its position_ids restart, which packing undoes: give seq_lengths",
    ),
    "packed halves": (
        lambda: as_batch(pairs(), tokenizer(), family_of(SEQUENCES), pack=True),
        "has an encoder and a decoder",
    ),
    "no rows": (lambda: as_batch([]), "expected at least one row of data"),
    "a stream": (lambda: as_batch(iter(samples())), "of a loader or a stream pass what it gives first"),
    "a loader": (lambda: as_batch(torch.utils.data.DataLoader(samples())), "got DataLoader; of a loader"),
    "a table": (
        lambda: as_batch(pandas.DataFrame(samples())),
        "expected rows[0] to be a row, but this DataFrame has none: pass a list of dicts",
    ),
    "a name": (lambda: check_batch("data.jsonl"), "a list of rows or a dataset with len() and [i], got str"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_said(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_columns_are_named():
    made = as_batch([{"input_ids": IDS, "id": 7, "source": "web", "scores": [0.5], "weights": [0.5, 1.0, 1.0]}] * 2)
    assert "not read, as they hold no number for each token: id, scores, source" in made.notes
    assert made.tensors["weights"].shape == (2, 3), "one for each token"
    made = as_batch([{"text": "w5", "url": "x"}], tokenizer())
    assert "not read, as they hold no number for each token: url" in made.notes


def test_a_prompt_that_the_completion_changes():
    merging = tokenizer()
    made = as_batch([{"prompt": "w1", "completion": "2 w5"}], merging)
    assert made.tensors["labels"].tolist() == [made.tensors["input_ids"][0].tolist()], "w12 is another token"
    assert any("the prompt's last 1 token change" in note for note in made.notes)


def test_the_padding_token():
    rows = [{"input_ids": [5, 6]}, {"input_ids": [7]}]
    assert as_batch(rows, family=Family(pad=8)).tensors["input_ids"][1, 1] == 8
    assert as_batch(rows, tokenizer()).tensors["input_ids"][1, 1] == PAD
    made = as_batch(rows)
    assert made.tensors["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert "padded with token 0, as no model or tokenizer names the padding token" in made.notes
    assert "attention_mask" not in as_batch(rows[:1] * 2).tensors, "nothing is padded"


def test_columns_by_other_names():
    rows = [{"x": row["input_ids"], "y": row["labels"]} for row in completions()]
    report = check_batch(rows, CAUSAL, names={"x": "input_ids", "y": "labels"})
    assert (report.mistakes, report.labels) == ((), check_batch(completions(), CAUSAL).labels)


def test_rows_of_text_are_documents_and_rows_of_ids_may_be_packed():
    """An end token inside: of a chat it closes a turn, of ids perhaps a document."""
    words = tokenizer(chat_template=MARKED)
    assert as_batch(chats(), words).documents == "rows"
    assert as_batch(chats(), words, pack=True).documents is None
    assert as_batch(samples()).documents is None
