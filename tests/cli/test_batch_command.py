"""`attnflow audit batch FILE`: places of the file, exit codes, and every file that cannot be read."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from attnflow.models.loading import loader
from tests.audit.packing import tokenizer

ROW = {"input_ids": [5, 6, 7, 2], "labels": [-100, 6, 7, 2]}
MUTE = {"input_ids": [8, 9, 2], "labels": [8, 9, -100]}  # the end token has no label
ALPACA = {"instruction": "a", "output": "b"}
TEXT = {"text": "w1 w2"}
CHAT = {"messages": [{"role": "user", "content": "w1"}]}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer of words, without a model."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer().save_pretrained(folder)
    return str(folder)


def write(path: Path, rows: list[object]) -> str:
    """Rows as a file of the kind that its name says; texts are lines as they are."""
    lines = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return str(path)


@pytest.mark.parametrize(
    ("name", "place"), [("d.jsonl", "line 4"), ("d.jsonl.gz", "line 4"), ("d.parquet", "row 2"), ("d", "line 4")]
)
@pytest.mark.parametrize("pack", [[], ["--pack"]], ids=["padded", "packed"])
def test_a_finding_names_its_place_in_the_file(
    run: Callable, tmp_path: Path, words: str, name: str, place: str, pack: list[str]
) -> None:
    blank = [] if name.endswith("parquet") else [""]
    path = write(tmp_path / name, [ROW, *blank, ROW, MUTE, ROW])
    code, out, err = run("audit", "batch", path, "--tokenizer", words, *pack)
    assert (code, err) == (1, "")
    assert f"{path}: 4 of 4 rows, {'packed' if pack else 'padded'}" in out
    assert f"unsupervised: {place}, position 2 ('<eos>'): an answer is supervised" in out
    assert "sequence " not in out.replace("every sequence", "").replace("each sequence", "")
    found = json.loads(run("audit", "batch", path, "--tokenizer", words, *pack, "--json").out)
    (mistake,) = found["mistakes"]
    unit, number = place.split()
    wanted = {"kind": "unsupervised", unit: int(number), "position": 2, "token": "'<eos>'"}
    assert wanted.items() <= mistake.items()
    head = {"schema": "attnflow.audit.batch/1", "rows": 4, "of": 4, "packed": bool(pack)}
    assert head.items() <= found.items()
    assert found["report"]["ok"] is False


def test_places_in_the_words_of_a_report(run: Callable, tmp_path: Path, tiny_model: str) -> None:
    """A packed label that its position can read, and text behind an end token: both places move into their rows."""
    early = {"input_ids": [8, 9, 3, 5], "labels": [-100, 8, 9, 3]}
    path = write(tmp_path / "d.jsonl", [{"input_ids": [5], "labels": [-100]}, early, early])
    for pack in ([], ["--pack"]):
        out = run("audit", "batch", path, "--model", tiny_model, *pack).out
        assert "readable: line 2, position 1 ('you'): the position before it predicts it, and can read" in out
        assert "the label's token at position 0 ('his')" in out
    path = write(tmp_path / "e.jsonl", [{"input_ids": [5, 6, 2]}, {"input_ids": [7, 2, 8]}])
    folder = tmp_path / "words"
    tokenizer().save_pretrained(folder)
    out = run("audit", "batch", path, "--tokenizer", str(folder)).out
    assert "line 2 goes on behind the end token at position 1 ('<eos>')" in out


def test_what_the_loss_trains_is_said_by_line(run: Callable, tmp_path: Path, tiny_model: str) -> None:
    path = write(tmp_path / "d.jsonl", [ROW, "", {**ROW, "input_ids": [5, 9, 8, 2], "labels": [-100, 9, 8, 2]}])
    for pack in ([], ["--pack"]):
        out = run("audit", "batch", path, "--model", tiny_model, *pack).out
        assert "loss: line 1, positions 0 to 2: " in out
        assert "loss: line 3, positions 0 to 2: " in out


def test_the_first_rows_alone_are_read(run: Callable, tmp_path: Path) -> None:
    rows = [ROW] * 12 + ["damaged"]
    path = write(tmp_path / "d.jsonl", rows)
    code, out, _ = run("audit", "batch", path)
    assert (code, "8 of 13 rows" in out) == (0, True)
    assert "5 rows not looked at: --rows 13 reads all" in out
    assert "3 of 13 rows" in run("audit", "batch", path, "--rows", "3").out
    assert run("audit", "batch", path, "--rows", "13").code == 2
    table = write(tmp_path / "d.parquet", rows[:12])
    assert "8 of 12 rows" in run("audit", "batch", table).out
    whole = run("audit", "batch", table, "--rows", "50").out
    assert ("12 of 12 rows" in whole, "not looked at" in whole) == (True, False)


def test_a_model_reads_text_with_its_tokenizer(run: Callable, tmp_path: Path, tiny_model: str, words: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"text": "the of and to"}, {"prompt": "the", "completion": "of"}][:1])
    out = run.ok("audit", "batch", path, "--model", tiny_model)
    assert f"; {tiny_model}: LlamaForCausalLM" in out
    assert "labels: all tokens of text" in out
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(tiny_model) / name, bare)
    code, _, err = run("audit", "batch", path, "--model", str(bare))
    assert (code, "has no tokenizer" in err, "--tokenizer" in err) == (2, True, True)
    assert run("audit", "batch", path, "--model", str(bare), "--tokenizer", tiny_model).code == 0
    ids = write(tmp_path / "ids.jsonl", [ROW])
    out = run("audit", "batch", ids, "--model", str(bare)).out
    assert "no mistake" in out, "ids need no tokenizer"


def test_a_tokenizer_alone_loads_no_model(
    run: Callable, tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "load_model", None)
    path = write(tmp_path / "d.jsonl", [{"text": "the of"}])
    assert run("audit", "batch", path, "--tokenizer", tiny_model).code == 0


BAD = {
    "missing": (None, "No such file"),
    "empty": ([], "d.jsonl holds no rows"),
    "blank": (["", "  "], "d.jsonl holds no rows"),
    "damaged": ([ROW, "", '{"input_ids": [5, 6'], "d.jsonl, line 3 is not JSON: Expecting ',' delimiter at column 20"),
    "a number": (["5"], "d.jsonl, line 1: expected a JSON object, got 5"),
    "a list": ([[ROW]], "d.jsonl is a list: write one object a line, as by jq -c '.[]'"),
    "over several lines": (["{", '"input_ids": [5]', "}"], "line 1 is not JSON: Expecting property name"),
    "a name twice": (['{"text": "a", "text": "b"}'], "line 1: the name 'text' appears twice"),
    "another form": ([ALPACA], "d.jsonl, line 1: expected input_ids, messages, prompt with completion, or text"),
    "no tokenizer": ([TEXT], "line 1: messages and text need a tokenizer"),
    "no template": ([CHAT], "line 1: messages need a chat template, and the tokenizer has none"),
    "texts as ids": ([ROW, {**ROW, "input_ids": ["w1"] * 4}], "line 2: input_ids must be one list of whole numbers"),
    "labels of another length": ([ROW, {**ROW, "labels": [5]}], "line 2: labels has 1 entries and input_ids 4"),
    "unequal columns": ([ROW, "", {"input_ids": [5]}], "line 3: it has no labels, and line 1 does"),
    "beyond the vocabulary": ([ROW, {"input_ids": [99], "labels": [5]}], "token 99 at position 0 is not one of the"),
}


@pytest.mark.parametrize("name", BAD)
def test_one_sentence_names_file_and_row(run: Callable, tmp_path: Path, words: str, name: str) -> None:
    rows, message = BAD[name]
    path = tmp_path / "d.jsonl"
    if rows is not None:
        write(path, rows)
    err = run.refused("audit", "batch", str(path), *([] if name == "no tokenizer" else ["--tokenizer", words]))
    assert err.startswith(f"attnflow: {tmp_path / 'd.jsonl'}")
    assert message in err
    assert err.count("\n") == 1


def test_files_of_other_kinds(run: Callable, tmp_path: Path, words: str) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(json.dumps(ROW).encode() * 900)[:60])
    short = tmp_path / "short.parquet"
    short.write_bytes(b"PAR1" + b"\0" * 40)
    binary = tmp_path / "d.arrow"
    binary.write_bytes(b"ARROW1\0\0\xff\xff\xff\xff")
    other = write(tmp_path / "qa.parquet", [{"question": "a", "answer": "b"}])
    for path, message in (
        (cut, "is damaged after line 0"),
        (short, "is a damaged Parquet file"),
        (binary, "line 1 is not UTF-8 text: expected JSONL or Parquet"),
        (tmp_path, "is a folder: give one file of it"),
        (other, "qa.parquet, row 0: expected input_ids, messages, prompt with completion, or text, got answer"),
    ):
        err = run.refused("audit", "batch", str(path), "--tokenizer", words)
        assert message in err


def test_beside_the_audit_of_a_model(
    run: Callable, tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("batch").symlink_to(tiny_model)
    Path("MODEL").symlink_to(tiny_model)
    for name in ("./batch", "MODEL"):
        code, out, _ = run("audit", name, "--tokens", "4")
        assert (code, f"{name}: LlamaForCausalLM" in out) == (0, True)
    out = run("audit", "--help").out
    assert all(word in out for word in ("--against", "MODEL", "batch", "Check rows of training data"))
    path = write(tmp_path / "d.jsonl", [ROW])
    for words in (["d.jsonl"], ["batc", "d.jsonl"], ["d.jsonl", "--model", tiny_model]):
        code, _, err = run("audit", *words)
        assert (code, "attnflow audit batch d.jsonl --model NAME" in err) == (2, True)
    assert run("audit", "batch").err.startswith("attnflow: Missing argument 'FILE'")
    assert run("audit", "batch", path, "--model", "smollm").code == 2
