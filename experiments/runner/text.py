"""Real text in rows of one length: Shakespeare's works, split by work, or a data set that is streamed by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from attnflow._core.errors import MissingExtra
from attnflow._core.files import write_folder
from attnflow.models import sample_text
from attnflow.models.loading.names import TEXTS
from experiments.runner.experiment import ROOT
from experiments.runner.packing import Packed
from experiments.runner.processes import launched
from experiments.runner.sealing import seal, sealed

DATA: Final = ROOT.parent / "out" / "experiments" / "data"  # rows of data sets that are streamed
VALIDATION: Final = ("macbeth", "twelfth_night", "henry_v", "pericles")
TEST: Final = (
    "hamlet",
    "tempest",
    "julius_caesar",
    "as_you_like_it",
    "richard_iii",
    "sonnets",
    "coriolanus",
    "much_ado_about_nothing",
)
_EDITION: Final = "_gut.txt"


def works() -> list[str]:
    """Names of Shakespeare's works that the `shakespeare` package ships, for `af.models.sample_text`."""
    return sorted(path.name.removesuffix(_EDITION) for path in TEXTS.path().glob(f"*{_EDITION}"))


@dataclass(frozen=True)
class Split:
    training: Packed  # packed works
    validation: Packed  # for choosing the learning rate; each row from one work
    test: Packed  # for the results; likewise


@dataclass(frozen=True)
class Text:
    rows: Dataset[dict[str, Tensor]]  # for training
    choosing: Tensor  # tokens [rows, length] by which learning rates are chosen
    results: Tensor  # tokens [rows, length] of the results
    tokenizer: Any  # of all


def load_text(source: str, tokenizer: int | str, length: int, rows: int, held_out: int) -> Text:
    """Rows of a text; some are held out.

    Args:
        source: "shakespeare", or a data set of the hub, which is streamed; see `stream`.
        tokenizer: how many word pieces are learned from Shakespeare, or the name of a tokenizer of the hub.
        length: tokens of a row.
        rows: of a data set, for training; those of Shakespeare are what they are.
        held_out: rows for the results, and of a data set as many for choosing.
    """
    if source == "shakespeare":
        pieces = learned_from_training(cast(int, tokenizer))
        split = split_text(pieces, length, -(-held_out // len(TEST)))
        return Text(split.training, split.validation.tokens, split.test.tokens, pieces)
    named = named_tokenizer(cast(str, tokenizer))
    return Text(*streamed(source, named, length, rows, held_out), named)


def streamed(source: str, tokenizer: Any, length: int, rows: int, held_out: int) -> tuple[Stored, Tensor, Tensor]:
    """(rows for training, tokens for choosing, tokens of the results) of a data set; the first rows are held out."""
    held = stream_rows(source, tokenizer, length, 2 * held_out, DATA)
    if len(held) < 2 * held_out:
        raise ValueError(f"{source!r} has {len(held)} rows, too few for {2 * held_out} that are held out")
    training = stream_rows(source, tokenizer, length, rows, DATA, skip=held.documents)
    tokens = held[list(range(2 * held_out))]["input_ids"]
    return training, tokens[:held_out], tokens[held_out:]


def named_tokenizer(name: str) -> Any:
    """Of the hub, with a token for the end of a document."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = tokenizer.sep_token
    return tokenizer


def split_text(tokenizer: Any, length: int, rows_per_work: int) -> Split:
    """Shakespeare's works in rows of `length` tokens."""
    training = [name for name in works() if name not in {*VALIDATION, *TEST}]
    counts = (rows_per_work * len(VALIDATION), rows_per_work * len(TEST))
    return split_works(tokenizer, length, training, VALIDATION, TEST, *counts)


def split_works(
    tokenizer: Any,
    length: int,
    training: Sequence[str],
    validation: Sequence[str],
    test: Sequence[str],
    held_out: int,
    tested: int | None = None,
) -> Split:
    """Some of Shakespeare's works in rows of `length` tokens.

    Args:
        tokenizer: of the model.
        length: tokens of a row.
        training: works, packed.
        validation: works that equally many rows are taken from, evenly spaced.
        test: likewise.
        held_out: validation rows, at most: a multiple of the works; and test rows, if these are not given.
        tested: test rows.
    """

    def tokens(work: str) -> list[int]:
        return list(tokenizer(sample_text(work), add_special_tokens=False, verbose=False)["input_ids"])

    def spread(names: Sequence[str], count: int) -> Packed:
        each = max(1, count // len(names))
        return Packed((row for name in names for row in _spread(tokens(name), length, each)), length)

    packed = Packed((tokens(name) for name in training), length)
    return Split(packed, spread(validation, held_out), spread(test, held_out if tested is None else tested))


def word_pieces(documents: Iterable[str], size: int) -> Any:
    """A tokenizer of byte pairs learned from documents, with "[MASK]", "[PAD]" and "[END]" as its last tokens.

    Cost: seconds for the five million letters of Shakespeare.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - 3, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(documents, trainer)
    names = {"mask_token": "[MASK]", "pad_token": "[PAD]", "eos_token": "[END]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def learned_from_training(size: int) -> Any:
    """`word_pieces` of the works that are trained on."""
    return word_pieces((sample_text(name) for name in works() if name not in {*VALIDATION, *TEST}), size)


class Stored(Dataset[dict[str, Tensor]]):
    """Rows of tokens in a file; only rows that are asked for are read.

    Attributes:
        documents: of the data set that they were cut from, the first ones after those that were skipped.
    """

    def __init__(self, path: Path, documents: int) -> None:
        self.tokens: Any = np.load(path, mmap_mode="r")
        self.documents = documents

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int | Sequence[int]) -> dict[str, Tensor]:
        return {"input_ids": torch.from_numpy(self.tokens[index].astype(np.int64))}


def hub_rows(source: str, split: str) -> Iterable[dict[str, Any]]:
    """Rows of a data set of the hub, streamed."""
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "study", f"the data set {source!r}") from error
    name, _, rest = source.partition(":")
    config, _, part = rest.partition(":")
    rows: Any = datasets.load_dataset(name, config or None, split=part or split, streaming=True)
    return rows


def stream(source: str) -> Iterator[str]:
    """Documents of a data set of the hub, as they come: nothing is downloaded as a whole."""
    for row in hub_rows(source, "train"):
        text = row.get("text")
        if not isinstance(text, str):
            raise ValueError(f'the data set {source!r} has rows without text under "text"; they have {", ".join(row)}')
        if text.strip():
            yield text


def stream_rows(source: str, tokenizer: Any, length: int, count: int, folder: Path, skip: int = 0) -> Stored:
    """The first `count` rows of a data set, tokenized and laid end to end once, then read from a file.

    Random access by (seed, step) needs a file: a stream can only be read from its start.

    Args:
        source: see `stream`.
        tokenizer: of the model; documents are kept apart by its end.
        length: tokens of a row.
        count: of rows; a data set with fewer has fewer.
        folder: for files of this kind; each has a name that follows from the other arguments.
        skip: documents that are left out at the start, such as those that are held out.
    """
    about = [source, getattr(tokenizer, "name_or_path", ""), len(tokenizer), length, count, skip]
    place = folder / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]

    def lay() -> None:
        if place.is_dir():
            return
        folder.mkdir(parents=True, exist_ok=True)
        with write_folder(place) as new:
            table = np.lib.format.open_memmap(new / "rows.npy", mode="w+", dtype=np.int32, shape=(count, length))
            filled, documents = _fill(table, islice(stream(source), skip, None), tokenizer)
            if not filled:
                raise ValueError(f"{source!r} has less than one row of {length} tokens")
            if filled < count:
                np.save(new / "rows.npy", np.array(table[:filled]))
            seal(new, {"about": about, "rows": filled, "documents": documents})

    launched().once(lay)
    return Stored(place / "rows.npy", sealed(place, contents=False)["documents"])


def _fill(table: Any, documents: Iterable[str], tokenizer: Any) -> tuple[int, int]:
    """(rows of a table that documents end to end have filled, how many documents that took)."""
    count, length = table.shape
    rest: list[int] = []
    filled = taken = 0
    for text in documents:
        taken += 1
        rest += [*cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"]), tokenizer.eos_token_id]
        whole = min(len(rest) // length, count - filled)
        table[filled : filled + whole] = np.array(rest[: whole * length], dtype=np.int32).reshape(whole, length)
        rest, filled = rest[whole * length :], filled + whole
        if filled == count:
            break
    return filled, taken


def _spread(tokens: list[int], length: int, count: int) -> list[list[int]]:
    """`count` rows at equal distances; each a document of its own."""
    last = len(tokens) - length
    if last < (count - 1) * length:
        raise ValueError(f"a work of {len(tokens)} tokens has no {count} rows of {length}")
    starts = torch.linspace(0, last, count + 2)[1:-1] if count > 1 else torch.tensor([last / 2])
    return [tokens[int(start) : int(start) + length] for start in starts]
