"""`attnflow knowledge build, search, insert, delete, stats` with a tiny encoder."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from attnflow.knowledge.duplication import Duplicates
from attnflow.knowledge.hf.encoder import TextEncoder
from attnflow.knowledge.hf.texts import Matches
from attnflow.knowledge.store import Store, StoreStats

pytest.importorskip("lancedb")

LINES = ["the cat sat on the mat", "", "a dog ran", "  the cat sat  ", "rain and wind", "a dog ran in rain"]
TEXTS = [line.strip() for line in LINES if line.strip()]


def save_encoder(folder, seed=0):
    words = sorted({word for line in LINES for word in line.split()} | {"capital", "of", "France"})
    words = ["[PAD]", "[UNK]", *words]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(seed)
    BertModel(BertConfig(vocab_size=len(words), max_position_embeddings=8, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def encoder(tmp_path):
    return save_encoder(tmp_path / "encoder")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES) + "\n")
    return str(path)


@pytest.fixture
def store(run, tmp_path, encoder, file):
    place = str(tmp_path / "store")
    assert run("knowledge", "build", place, file, "--encoder", encoder).code == 0
    return place


def entries(place):
    with Store.open(place, read_only=True) as store:
        return store.get(store.ids())


def test_build_from_lines(run, tmp_path, encoder, file):
    place = str(tmp_path / "store")
    code, out, err = run("knowledge", "build", place, file, "--encoder", encoder)
    version = TextEncoder(encoder).version
    assert (code, err) == (0, "")
    assert out == f"{place}: 5 entries of width 16 by {version}\n"
    found = entries(place)
    assert [(e.id, e.text, e.version, e.encoder) for e in found] == [(i, t, 1, version) for i, t in enumerate(TEXTS)]
    assert [e.source for e in found] == [f"lines.txt:{line}" for line in (1, 3, 4, 5, 6)]
    torch.testing.assert_close(torch.stack([e.embedding for e in found]), TextEncoder(encoder)(TEXTS))


def test_build_from_json_lines(run, tmp_path, encoder):
    path = tmp_path / "facts.jsonl"
    path.write_text('{"text": "capital of France", "source": "atlas"}\n\n{"text": "a dog ran"}\n')
    place = str(tmp_path / "facts")
    assert run("knowledge", "build", place, str(path), "--encoder", encoder).code == 0
    held = entries(place)
    assert [(e.text, e.source) for e in held] == [("capital of France", "atlas"), ("a dog ran", "facts.jsonl:3")]
    maker = TextEncoder(encoder)
    torch.testing.assert_close(torch.stack([e.embedding for e in held]), maker(["capital of France", "a dog ran"]))


def test_what_is_cut_is_said(run, tmp_path, encoder):
    path = tmp_path / "long.txt"
    path.write_text("a dog\n" + "the cat sat on the mat " * 3)
    code, _, err = run("knowledge", "build", str(tmp_path / "store"), str(path), "--encoder", encoder)
    assert code == 0
    assert "1 of 2 texts are longer than the encoder reads, and their ends are not embedded: long.txt:2" in err


def test_an_interrupted_build_writes_nothing(run, tmp_path, encoder, file, monkeypatch):
    place = str(tmp_path / "store")

    def stop(self, texts, progress=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextEncoder, "encode", stop)
        assert run("knowledge", "build", place, file, "--encoder", encoder).code == 130
    assert entries(place) == []
    assert run("knowledge", "build", place, file, "--encoder", encoder).code == 0
    assert [e.text for e in entries(place)] == TEXTS
    code, _, err = run("knowledge", "build", place, file, "--encoder", encoder)
    assert code == 2
    assert "holds 5 entries already: `attnflow knowledge insert` adds to it" in err


def test_search(run, encoder, store):
    code, out, err = run("knowledge", "search", store, "the cat sat", "-k", "2")
    version = TextEncoder(encoder).version
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"2 entries of 5, exact search, scores by {version}"
    assert lines[1].split() == ["id", "score", "text", "source"]
    assert lines[2].split() == ["2", "1.000", "the", "cat", "sat", "lines.txt:4"]
    found = json.loads(run("knowledge", "search", store, "the cat sat", "-k", "9", "--json").out)
    assert Matches.from_dict(found).matches[0].text == "the cat sat"
    assert (found["label"], found["total"], found["other_encoders"]) == ("exact", 5, 0)
    scores = TextEncoder(encoder)(TEXTS) @ TextEncoder(encoder)(["the cat sat"])[0]
    assert [hit["id"] for hit in found["matches"]] == scores.argsort(descending=True).tolist()
    assert [hit["score"] for hit in found["matches"]] == pytest.approx(scores.sort(descending=True).values.tolist())


def test_insert_correct_and_delete(run, encoder, store, file):
    code, out, err = run("knowledge", "insert", store, "--text", "rain", "--text", "wind", "--source", "me")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["5  rain", "6  wind", f"{store} holds 7 entries"]
    found = json.loads(run("knowledge", "insert", store, "--text", "a cat", "--id", "0", "--json").out)
    assert (found["store"], found["ids"], found["entries"]) == (store, [0], 7)
    assert found["encoder"] == TextEncoder(encoder).version
    corrected = entries(store)[0]
    assert (corrected.text, corrected.version, corrected.source) == ("a cat", 2, "lines.txt:1")
    assert json.loads(run("knowledge", "insert", store, "--file", file, "--json").out)["ids"] == [7, 8, 9, 10, 11]
    found = json.loads(run("knowledge", "delete", store, "0", "6", "0", "--json").out)
    assert (found["schema"], found["ids"], found["entries"]) == ("attnflow.knowledge.delete/1", [0, 6], 10)
    code, _, err = run("knowledge", "delete", store, "1", "77")
    assert code == 2
    assert "no entries with ids [77]" in err
    assert len(entries(store)) == 10
    assert json.loads(run("knowledge", "insert", store, "--text", "rain", "--json").out)["ids"] == [12]


def test_the_advice_of_an_error_works(run, tmp_path, encoder, file, monkeypatch):
    """Swapped arguments: no folder appears, and the other order builds the store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts.jsonl").write_text('{"text": "a dog ran"}\n')
    for name in ("facts.jsonl", "other.jsonl"):
        code, _, err = run("knowledge", "build", name, "folder", "--encoder", encoder)
        assert code == 2
        assert "the folder comes first and the file second" in err
    assert not (tmp_path / "other.jsonl").exists()
    assert run("knowledge", "build", "folder", "facts.jsonl", "--encoder", encoder).code == 0
    assert "build nothing FILE" in run("knowledge", "search", "nothing", "a dog").err
    assert run("knowledge", "build", "nothing", file, "--encoder", encoder).code == 0
    assert run("knowledge", "search", "nothing", "a dog").code == 0


def test_stats(run, encoder, store):
    code, out, _ = run("knowledge", "stats", store)
    assert code == 0
    assert out.splitlines()[0].startswith(f"{store} (lancedb): 5 entries of width 16, ")
    assert f"made by    {TextEncoder(encoder).version}: 5" in out
    assert "duplicates" not in out
    assert run("knowledge", "stats", store, "--duplicates", "--threshold", "1").code == 0
    run("knowledge", "insert", store, "--text", "rain and wind")
    code, out, _ = run("knowledge", "stats", store, "--duplicates", "--threshold", "0.9999")
    assert code == 1
    assert "duplicates 1 groups of 6 entries, 1 of which say nothing new" in out
    assert out.splitlines()[-1].split() == ["2", "[3,", "5]", "rain", "and", "wind"]
    found = json.loads(run("knowledge", "stats", store, "--duplicates", "--json").out)
    assert Duplicates.from_dict(found).surplus == 1
    numbers = StoreStats.from_dict(json.loads(run("knowledge", "stats", store, "--json").out))
    assert (numbers.count, numbers.versions) == (6, {1: 6})


def test_an_encoder_that_has_changed(run, tmp_path, encoder, store):
    old = TextEncoder(encoder).version
    save_encoder(tmp_path / "encoder", seed=1)
    new = TextEncoder(encoder).version
    code, out, err = run("knowledge", "search", store, "a dog")
    assert (code, out) == (2, "")
    assert f"the entries were made by {old}, and {encoder} is now {new}: their scores mean nothing" in err
    code, _, err = run("knowledge", "search", store, "a dog", "--encoder", encoder)
    assert code == 0
    assert "5 of 5 entries were made by another encoder" in err


def test_feed_forward_entries_of_a_model(run, tmp_path, tiny_model, store):
    place = str(tmp_path / "entries")
    code, out, err = run("knowledge", "build", place, "--from-model", tiny_model)
    assert (code, err) == (0, "")
    assert out == f"{place}: 96 entries of width 98 by from_ffn:{tiny_model}\n"
    assert [entry.source for entry in entries(place)] == ["layer 0"] * 48 + ["layer 1"] * 48
    assert "96 entries of width 98 and 2 threshold columns" in run("knowledge", "stats", place).out
    code, _, err = run("knowledge", "search", place, "a dog")
    assert code == 2
    assert f"holds feed-forward entries of {tiny_model}, not of texts" in err
    code, _, err = run("knowledge", "build", place, "--from-model", tiny_model)
    assert code == 2
    assert "holds 96 entries already" in err
    assert run("knowledge", "build", store, "--from-model", tiny_model).code == 2
    assert len(entries(store)) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "new"], "give a FILE or --from-model, one of them"),
        (["build", "memory", "FILE"], "a store in memory is gone when the command ends"),
        (["build", "FILE", "FILE", "--encoder", "ENCODER"], "the folder comes first and the file second"),
        (["search", "STORE", " "], "the query is empty"),
        (["insert", "STORE"], "give --text or --file, one of them"),
        (["insert", "STORE", "--text", " "], "a text is empty"),
        (["insert", "STORE", "--text", "a", "--id", "1", "--id", "2"], "one id for each text: got 2 and 1 text"),
        (["insert", "STORE", "--text", "a", "--id", "999"], "has no entries with ids [999] to correct"),
        (["build", "new", "FILE", "--encoder", "DECODER"], "is a decoder that writes texts (LlamaForCausalLM)"),
        (["stats", "STORE", "--duplicates", "--threshold", "2"], "a cosine in (0, 1], got 2.0"),
    ],
)
def test_bad_usage(run, tmp_path, monkeypatch, encoder, file, store, tiny_model, arguments, message):
    monkeypatch.chdir(tmp_path)
    names = {"STORE": store, "FILE": file, "ENCODER": encoder, "DECODER": tiny_model}
    before = [(e.id, e.text, e.version) for e in entries(store)]
    code, out, err = run("knowledge", *(names.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert "defect" not in err
    assert [(e.id, e.text, e.version) for e in entries(store)] == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"{", "bad.jsonl:1 is no JSON"),
        (b'{"text": "a"}\n{"value": "b"}', 'bad.jsonl:2 must be an object with "text"'),
        (b'{"text": "a", "source": 3}', "both strings"),
    ],
)
def test_bad_files(run, tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    code, out, err = run("knowledge", "build", str(tmp_path / "store"), str(path))
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "store").exists()
