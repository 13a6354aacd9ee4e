"""`attnflow audit batch FILE`: check the labels, documents and masks of rows of data, as one batch."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from attnflow._core.errors import AttnflowError, MissingExtra
from attnflow._core.markup import plural, shorten
from attnflow.cli._arguments import argument, describe, load, option, require
from attnflow.cli._output import BadUsage, JsonFlag, console, print_json, say, style, working

if TYPE_CHECKING:
    from attnflow.audit.batch.check import BatchReport
    from attnflow.audit.batch.labels import Mistake
    from attnflow.audit.batch.rows import RowBatch

_POSITIONS: Final = re.compile(r"\b(positions?) (\d+)(?: to (\d+))?")
_LONGEST: Final = 1 << 26  # bytes of one line


def batch(
    data: Annotated[Path, argument("FILE", "Rows as JSONL (one object a line; .gz too) or Parquet.")],
    model: Annotated[
        str | None, option("--model NAME", "The model to train: smollm2-135m, a folder, a GGUF file, a hub id.")
    ] = None,
    tokenizer: Annotated[
        str | None, option("--tokenizer NAME", "A tokenizer alone, or another one than the model's.")
    ] = None,
    pack: Annotated[
        bool, option("--pack", "Join the rows to one, as padding-free collators do (default: pad them).")
    ] = False,
    rows: Annotated[int, option("--rows N>=1", "Read the first N rows.")] = 8,
    json_output: JsonFlag = False,
) -> None:
    """Check rows of training data as one batch: labels, documents, masks.

    A row holds input_ids (with labels, attention_mask, position_ids, completion_mask, ...), messages, a prompt with its
    completion, or text, which becomes tokens as in TRL. Findings name lines of the file (rows from 0 of a Parquet file)
    and positions in the row's tokens. Exits with 1 if there is a finding or nothing was tested.
    """
    with working(f"reading {data}") as spinner:
        lines = _read(data, rows)
        texts = any("input_ids" not in row for row in lines.rows)
        for name in (model, tokenizer):
            if name is not None:
                require(name)
        spinner.stage("loading")
        words = None if tokenizer is None else _tokenizer(tokenizer)
        loaded = None if model is None else _model(model, words, texts)
        words = loaded.tokenizer if loaded is not None and words is None else words
        from attnflow.audit import check_batch
        from attnflow.audit.batch.reading import family_of
        from attnflow.audit.batch.rows import as_batch

        spinner.stage("checking")
        try:
            read = as_batch(lines.rows, words, family_of(loaded), pack=pack, places=lines.names)
        except (TypeError, ValueError) as error:
            raise BadUsage(f"{data}, {error}") from error
        ids = {} if loaded is not None else {name: getattr(words, f"{name}_token_id", None) for name in ("eos", "pad")}
        report = check_batch(read.tensors, loaded, documents=read.documents, **ids)
    places = _Places(read, lines, words)
    if json_output:
        found = [places.mistake(mistake) for mistake in report.mistakes]
        about = {"file": str(data), "rows": len(lines.rows), "of": lines.total, "packed": pack, "mistakes": found}
        print_json("attnflow.audit.batch/1", {**about, "notes": read.notes, "report": report.to_dict()})
    else:
        title = f"{data}: {len(lines.rows):,} of {plural(lines.total, 'row')}, {'packed' if pack else 'padded'}"
        _print(report, places, title if loaded is None else f"{title}; {describe(str(model), loaded)}")
    raise typer.Exit(0 if report.ok else 1)


def _print(report: BatchReport, places: _Places, title: str) -> None:
    screen, lines = console(), places.lines
    say(screen, title, "bold")
    verdict, *rest = [places.of(line) for line in str(report).split("\n")]
    say(screen, verdict, style(report.ok))
    say(screen, "\n".join([*rest, *(f"note: {note}" for note in places.read.notes)]))
    if len(lines.rows) < lines.total:
        say(screen, f"{plural(lines.total - len(lines.rows), 'row')} not looked at: --rows {lines.total} reads all")


@dataclass(frozen=True)
class _Lines:
    rows: list[dict[str, object]]
    unit: str  # "line" (from 1) or "row" (from 0)
    numbers: list[int]
    total: int

    @property
    def names(self) -> list[str]:
        return [f"{self.unit} {number}" for number in self.numbers]


def _read(path: Path, limit: int) -> _Lines:
    from attnflow._core.files import to_read

    if to_read(path).is_dir():
        raise BadUsage(f"{path} is a folder: give one file of it, .jsonl or .parquet")
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        lines = _parquet(path, limit)
    elif start[:2] == b"\x1f\x8b":
        with gzip.open(path) as file:
            lines = _jsonl(file, path, limit)
    else:
        with path.open("rb") as file:
            lines = _jsonl(file, path, limit)
    if not lines.total:
        raise BadUsage(f"{path} holds no rows")
    return lines


def _jsonl(file: BufferedIOBase, path: Path, limit: int) -> _Lines:
    from attnflow._core.plain import parse_json

    rows, numbers, total = list[dict[str, object]](), list[int](), 0
    for number, line in _lines(file, path):
        total += 1
        if total > limit:
            continue
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8-sig").strip()
            if total == 1 and text[:1] == "[":
                raise BadUsage(f"{path} is a list: write one object a line, as by jq -c '.[]' {path} > data.jsonl")
            rows.append(parse_json(text, where))
        except UnicodeDecodeError as error:
            raise BadUsage(f"{where} is not UTF-8 text: expected JSONL or Parquet") from error
        except ValueError as error:
            raise BadUsage(f"{str(error).replace(' at line 1,', ' at')} (expected one object a line)") from error
        numbers.append(number)
    return _Lines(rows, "line", numbers, total)


def _lines(file: BufferedIOBase, path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        while line := file.readline(_LONGEST):
            number += 1
            if len(line) == _LONGEST:
                raise BadUsage(f"{path}, line {number} is longer than {_LONGEST >> 20} MiB: expected one row a line")
            if not line.isspace():
                yield number, line
    except (EOFError, OSError) as error:  # a damaged gzip file
        raise BadUsage(f"{path} is damaged after line {number}: {error}") from error


def _parquet(path: Path, limit: int) -> _Lines:
    if find_spec("pyarrow") is None:
        raise MissingExtra("pyarrow", "knowledge", "reading a Parquet file")
    from pyarrow import ArrowException, parquet

    rows: list[dict[str, object]] = []
    try:
        file = parquet.ParquetFile(path)
        for part in file.iter_batches(batch_size=limit):
            rows += part.to_pylist()
            if len(rows) >= limit:
                break
        total = file.metadata.num_rows
    except (ArrowException, OSError) as error:
        raise BadUsage(f"{path} is a damaged Parquet file: {str(error).splitlines()[0]}") from error
    return _Lines(rows[:limit], "row", list(range(len(rows[:limit]))), total)


def _tokenizer(name: str) -> Any:
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "hf", "a tokenizer")
    from attnflow.models.loading.loader import load_tokenizer

    try:
        return load_tokenizer(name)
    except AttnflowError as error:
        raise BadUsage(str(error).removesuffix("; pass tokenizer=False")) from error


def _model(name: str, tokenizer: Any, texts: bool) -> Any:
    if tokenizer is not None:
        return load(name, tokenizer=False)._replace(tokenizer=tokenizer)
    try:
        return load(name, without="give rows with input_ids, or --tokenizer")
    except (BadUsage, AttnflowError):
        if texts:
            raise
        return load(name, tokenizer=False)


@dataclass(frozen=True)
class _Places:
    read: RowBatch
    lines: _Lines
    tokenizer: Any

    def of(self, text: str, sequence: int | None = None) -> str:
        named = re.search(r"\b(?:sequence|row) (\d+)", text)
        sequence = int(named[1]) if named else sequence
        places = [int(place) for match in _POSITIONS.finditer(text) for place in match.groups()[1:] if place]
        rows, columns = self.read.tensors["input_ids"].shape
        if sequence is None or sequence >= rows or any(place >= columns for place in places):
            return text
        if self.read.starts and not places:
            return text
        number = sequence  # for the function below, where it is not None
        home, _ = self.read.place(number, (places or [0])[0])

        def position(match: re.Match[str]) -> str:
            row, first = self.read.place(number, int(match[2]))
            elsewhere = "" if row == home else f" of {self.lines.names[row]}"
            if match[3] is None:
                return f"{match[1]} {first}{elsewhere} ({self.token(number, int(match[2]))})"
            other, last = self.read.place(number, int(match[3]))
            beyond = "" if other == row else f" of {self.lines.names[other]}"
            return f"{match[1]} {first}{elsewhere} to {last}{beyond}"

        moved = _POSITIONS.sub(position, text)
        return moved if named is None else moved.replace(named[0], self.lines.names[home], 1)

    def token(self, sequence: int, position: int) -> str:
        token = int(self.read.tensors["input_ids"][sequence, position])
        text = "" if self.tokenizer is None else shorten(self.tokenizer.decode([token]), 20)
        return repr(text) if text else f"token {token}"

    def mistake(self, mistake: Mistake) -> dict[str, object]:
        row, position = self.read.place(mistake.sequence, mistake.position)
        return {
            "kind": mistake.kind,
            self.lines.unit: self.lines.numbers[row],
            "position": position,
            "token": self.token(mistake.sequence, mistake.position),
            "count": mistake.count,
            "message": self.of(mistake.message, mistake.sequence),
        }
