"""The settings of the measurement, and its jobs: a model on some texts, and a text cut in one way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

from attnflow._core.progress import Progress
from attnflow.models import load_model, sample_text
from attnflow.models.subject import Subject
from experiments.geometry_corpus.combination import averaged, measure, record
from experiments.geometry_corpus.counts import CUTS, OBJECTIVES, Cut, compare, cut_rows
from experiments.runner import text as texts
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, Plan
from experiments.runner.text import works

_SMALL: Final = (
    *("openai-community/gpt2", "EleutherAI/pythia-160m", "HuggingFaceTB/SmolLM2-360M"),
    *("google-bert/bert-base-uncased", "FacebookAI/roberta-base"),
)
_PAPER: Final = (
    *("google-bert/bert-base-uncased", "answerdotai/ModernBERT-base", "openai-community/gpt2"),
    *("meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1"),
)


@dataclass(frozen=True)
class Measurement:
    """What is measured. The defaults are the scale "tiny"."""

    models: tuple[str, ...] = ("smollm2-135m", "minilm")  # as `af.load_model` takes them
    texts: int = 12  # that each model reads
    tokens: int = 64  # of such a text
    # of the text whose tokens are counted: "shakespeare", or a data set of the hub, which is streamed
    source: str = "shakespeare"
    tokenizers: tuple[int | str, ...] = (270, 8192)  # how many pieces are learned from Shakespeare, or names of the hub
    documents: int = 0  # that are read of a data set
    length: int = 128  # of a row
    rows: int = 16_384  # at most
    most: int = 200  # how many tokens are looked at, the most frequent first
    draws: int = 2000  # of the bootstrap


def tiny() -> Measurement:
    """A few minutes of one core."""
    return Measurement()


def small() -> Measurement:
    """Five models and a tenth of a billion tokens of the hub; minutes of a GPU, or an hour of two cores."""
    source = "wikimedia/wikipedia:20231101.en:train"
    tokenizers = ("google-bert/bert-base-uncased", "openai-community/gpt2")
    return Measurement(_SMALL, 64, 256, source, tokenizers, 100_000, 512, 65_536, 2000)


def paper() -> Measurement:
    """Models of the paper's tables, the text of its own runs, rows of 512 as in its training."""
    source = "wikimedia/wikipedia:20231101.en:train"
    tokenizers = ("google-bert/bert-base-uncased", "meta-llama/Llama-3.2-1B")
    return Measurement(_PAPER, 256, 512, source, tokenizers, 1_000_000, 512, 1_000_000, 2000)


def miniature(config: Measurement) -> Measurement:
    return replace(
        config, models=config.models[:1], texts=2, tokens=16, tokenizers=config.tokenizers[:1], length=16, rows=64,
        documents=min(config.documents, 40), most=4, draws=20,
    )  # fmt: skip


def setup(config: Measurement) -> Setup:
    """A run for each model, and one for each tokenizer and way of cutting its rows."""
    counted: dict[str, tuple[int | str, Cut]] = {
        f"{_named(one)}, {cut}": (one, cut) for one in config.tokenizers for cut in CUTS
    }

    @cache
    def read(tokenizer: int | str) -> tuple[Any, list[list[int]]]:
        made = (
            texts.learned_from_training(tokenizer)
            if isinstance(tokenizer, int)
            else texts.named_tokenizer(tokenizer)
        )  # fmt: skip
        encoded = (made(text, add_special_tokens=False)["input_ids"] for text in documents(config))
        return made, [cast("list[int]", tokens) for tokens in encoded]

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        del folder
        if job.arm in config.models:
            return combined(job.arm, config, progress)
        tokenizer, cut = counted[job.arm]
        made, every = read(tokenizer)
        return counts_of(made, every, cut, config)

    return Setup(Plan(tuple(Job(arm) for arm in (*config.models, *counted))), run, {"counted": list(counted)})


def combined(name: str, config: Measurement, progress: Progress) -> dict[str, object]:
    """Proposition 2.1 on one model: means over layers, text by text, and those of each layer over texts."""
    loaded = load_model(name, dtype="float32")
    each: list[list[dict[str, float]]] = []
    for number, text in enumerate(passages(config.texts)):
        progress(number, config.texts, "texts")
        ids = Subject.of(loaded).named(text)["input_ids"][:, : config.tokens]
        each.append([measure(layer, seen) for layer, seen in record(loaded.model, ids)])
    layers = [averaged(rows) for rows in zip(*each, strict=True)]
    return {"kind": "model", "texts": [averaged(rows) for rows in each], "layers": layers}


def counts_of(tokenizer: Any, every: Sequence[Sequence[int]], cut: Cut, config: Measurement) -> dict[str, object]:
    """Proposition S1.10 on one text and cut, under both objectives."""
    rows = cut_rows(every, cut, config.length, config.rows, int(tokenizer.eos_token_id))
    vocabulary = len(tokenizer)
    found = {one: compare(rows, one, vocabulary, config.most, config.draws) for one in OBJECTIVES}
    pieces = tokenizer.convert_ids_to_tokens(found["causal"]["tokens"])
    return {"kind": "text", "cut": cut, "pieces": pieces, **found}


def passages(count: int) -> list[str]:
    """Speeches of the works that other experiments test language models on, one work after another."""
    every = [_speeches(sample_text(work)) for work in texts.TEST]
    long = [[speech for speech in each if len(speech) > 400] for each in every]
    return [long[number % len(long)][number // len(long)] for number in range(count)]


def documents(config: Measurement) -> list[str]:
    """Speeches and stanzas of Shakespeare, or documents of a data set."""
    if config.source == "shakespeare":
        return [speech for work in works() for speech in _speeches(sample_text(work))]
    return list(islice(texts.stream(config.source), config.documents))


def _speeches(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def _named(tokenizer: int | str) -> str:
    return f"{tokenizer} pieces" if isinstance(tokenizer, int) else tokenizer
