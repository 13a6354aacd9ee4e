"""Text to train on: a file, a folder, the works of Shakespeare, or a data set of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from attnflow._core.errors import MissingExtra
from attnflow.models.packages import TEXTS, sample_text

_EDITION: Final = "_gut.txt"
_HELD_OUT: Final = 0.1


def works() -> list[str]:
    """Names of Shakespeare's works that the `shakespeare` package ships, for `af.models.sample_text`."""
    return sorted(path.name.removesuffix(_EDITION) for path in TEXTS.path().glob(f"*{_EDITION}"))


def read_documents(source: str) -> list[str]:
    """Documents of text, none of them empty.

    Args:
        source: a text file (one document), a `.jsonl` file (one object with "text" per line), a folder (each `.txt` and
            `.md` file a document), "shakespeare", or a data set of the hub as `NAME`, `NAME:CONFIG` or
            `NAME:CONFIG:SPLIT`, of which the column "text" is read.

    Raises:
        FileNotFoundError: none of these.
        ValueError: no text in it.
        MissingPackage: "shakespeare", and its package is not installed.
        MissingExtra: a data set, and `datasets` is not installed.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in (".txt", ".md") and file.is_file())
        texts: Iterable[str] = (_text(file) for file in files)
    elif path.is_file():
        texts = _lines(path) if path.suffix.lower() in (".jsonl", ".json") else [_text(path)]
    elif source == "shakespeare":
        texts = [sample_text(work) for work in works()]
    else:
        texts = _data_set(source)
    documents = [text for text in texts if text.strip()]
    if not documents:
        raise ValueError(f"{source} holds no text; of a folder its .txt and .md files are read")
    return documents


def tokenize(documents: Iterable[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each document, with the special tokens that the model expects around one, its end marked."""
    tokens: list[list[int]] = []
    for text in documents:
        ids = list(cast(Sequence[int], tokenizer(text, verbose=False)["input_ids"]))
        end = getattr(tokenizer, "eos_token_id", None)
        tokens.append(ids if end is None or ids[-1:] == [end] else [*ids, end])
    return tokens


def split_documents(documents: Sequence[list[int]], seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """(for training, held out): a tenth of the documents, at least one; of a single document its last tenth.

    >>> [len(part) for part in split_documents([[1]] * 30)]
    [27, 3]
    """
    if len(documents) == 1:
        cut = len(documents[0]) - max(1, int(len(documents[0]) * _HELD_OUT))
        return [documents[0][:cut]], [documents[0][cut:]]
    order = np.random.default_rng(seed).permutation(len(documents)).tolist()
    count = max(1, int(len(documents) * _HELD_OUT))
    held = set(order[:count])
    training = [document for index, document in enumerate(documents) if index not in held]
    return training, [documents[index] for index in sorted(held)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from error


def _lines(path: Path) -> Iterable[str]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is not JSON: {error}") from error
        text = cast(dict[str, object], value).get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'{path}, line {number}: expected an object with the text under "text"')
        yield text


def _data_set(source: str) -> Iterable[str]:
    if source.startswith((".", "/", "~")) or source.endswith((".txt", ".md", ".jsonl")):
        raise FileNotFoundError(f"no file or folder {source!r}")
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "study", f"no file {source!r}; reading it as a data set of the hub") from error

    name, _, rest = source.partition(":")
    config, _, part = rest.partition(":")
    try:
        rows: Any = datasets.load_dataset(name, config or None, split=part or "train")
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(
            f"{source!r} is no file, no folder, and no data set that can be had: {reason}"
        ) from error
    if "text" not in rows.column_names:
        raise ValueError(f"the data set {source!r} has no column 'text'; it has {', '.join(rows.column_names)}")
    return (str(row["text"]) for row in rows)
