"""The jobs of the study: a fit of each seed, the model with its reader, and its rivals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, cast

from torch import nn

from attnflow._core.progress import Progress
from attnflow.knowledge import attach
from attnflow.knowledge.reading.attach import Attached
from attnflow.knowledge.reading.store_reader import StoreReader
from attnflow.knowledge.store import Store
from experiments.reader.asking import While, said, scored
from experiments.reader.bench import OWN, Bench
from experiments.reader.edits import edited
from experiments.reader.fit import fit_reader
from experiments.reader.lora import tuned
from experiments.reader.named import reading
from experiments.reader.questions import FRAMES, PROMPT, least_mistakes, unframed
from experiments.reader.records import SEPARATOR
from experiments.reader.settings import Reading
from experiments.reader.world import Embedded, public_facts, sentence
from experiments.runner.experiment import Setup
from experiments.runner.jobs import Job, repeated
from experiments.runner.study import locked

FIT: Final = "fit"
JOBS: Final = (FIT, "reader", "ask", "context", "lora", "edits")
CONTEXTS: Final = (1, 5)  # facts that are put before a question
_WORKED: Final = ((OWN[0], FRAMES[0]), (OWN[3], FRAMES[5]))  # facts of the examples, and how they are asked for


def setup(config: Reading) -> Setup:
    """For each seed a fit, what reads by it, and the rivals; whoever needs the fit waits for it, or makes it."""
    benches: dict[int, Bench] = {}

    def run(job: Job, folder: Path, progress: Progress) -> Mapping[str, object]:
        seed = cast(int, job.seed)
        if seed not in benches:
            benches.clear()  # one model in memory
            benches[seed] = Bench(config, seed)
        benches[seed].begin()
        bench, place = benches[seed], folder.parent / Job(FIT, seed=seed).name / "reader"
        if job.arm == FIT:
            return {"fitted": _fit(bench, place, progress)}
        if job.arm in ("reader", "ask"):
            fitted = _fit(bench, place, progress)
            if job.arm == "reader":
                return _read(bench, place, progress)
            return _ask(bench, place, fitted, progress)
        if job.arm == "context":
            return _context(bench, progress)
        return {"ways": tuned(bench, folder, progress) if job.arm == "lora" else edited(bench, progress)}

    return Setup(repeated(JOBS, config.seeds), run, {"public_facts": len(public_facts())})


def _fit(bench: Bench, place: Path, progress: Progress) -> Mapping[str, Any]:
    """Fit, go on with it, or take the fit that is there; several processes may ask for it."""
    config, finished = bench.config, place / "fitted.json"
    place.mkdir(parents=True, exist_ok=True)
    with locked(place / "lock", True):
        if not finished.is_file():
            with Embedded(bench.encoder).store(OWN) as store:
                fit_reader(
                    *(bench.loaded, store, place, OWN), facts=config.facts, reading_steps=config.reading_steps,
                    steps=config.steps, seed=bench.seed, progress=progress,
                )  # fmt: skip
    return json.loads(finished.read_text(encoding="utf-8"))


def _read(bench: Bench, place: Path, progress: Progress) -> dict[str, object]:
    """The model with its reader, the threshold chosen on what the fit held out."""
    config, ways = bench.config, list[dict[str, object]]()
    present, absent, records = bench.choosing()
    with bench.embedded.store(records) as store, attach(bench.loaded, store, reader=place / "reader") as handle:
        readers = cast("list[StoreReader]", handle.readers)
        asked = [[PROMPT.format(text) for text in texts] for texts in (present, absent)]
        cut = least_mistakes(*(said(bench.model, bench.tokenizer, some, 1, readers).read for some in asked))
    count = bench.size_of_reader()
    for done, size in enumerate(config.sizes):
        progress(done, len(config.sizes), f"{size} facts")
        with bench.edited_store(size) as (store, asked), attach(bench.loaded, store, reader=place / "reader") as handle:
            readers = cast("list[StoreReader]", handle.readers)
            answers = said(bench.model, bench.tokenizer, [one.prompt for one in asked], config.tokens, readers)
            entry = [one.entry == best for one, best in zip(asked, answers.entries, strict=True)]
            rows = scored(bench.tokenizer, asked, answers, entry, [weight <= cut for weight in answers.read])
            held = 4 * (count + len(store) * store.dim)
            ways.append(bench.way("reader", size, rows, asked, lambda _, held=held: held))
    return {"threshold": cut, "ways": ways}


def _ask(bench: Bench, place: Path, fitted: Mapping[str, Any], progress: Progress) -> dict[str, object]:
    """The same reader, but the encoder searches the store: the model reads the nearest entry and no other."""
    config, ways, near = bench.config, list[dict[str, object]](), fitted["near"]
    count = bench.size_of_reader()
    for done, size in enumerate(config.sizes):
        progress(done, len(config.sizes), f"{size} facts")
        with bench.edited_store(size) as (store, asked), attach(bench.loaded, store, reader=place / "reader") as handle:
            search = store.search(bench.embedded.queries([one.text for one in asked]), 1)
            best, scores = search.ids[:, 0].tolist(), search.scores[:, 0].tolist()
            during, otherwise = (_nearest_read(bench, store, handle, cut) for cut in (-math.inf, near))
            answers = said(bench.model, bench.tokenizer, [one.prompt for one in asked], config.tokens, [], during)
            entry = [one.entry == other for one, other in zip(asked, best, strict=True)]
            rows = scored(bench.tokenizer, asked, answers, entry, [score <= near for score in scores])
            held = 4 * (count + len(store) * store.dim)
            ways.append(
                bench.way("ask", size, rows, asked, lambda _, held=held: held, during=during, otherwise=otherwise)
            )
    return {"threshold": near, "ways": ways}


def _nearest_read(bench: Bench, store: Store, handle: Attached, cut: float) -> While:
    """Make the model read the entries that are nearest to prompts, but only those that are nearer than `cut`."""

    def during(prompts: Sequence[str]) -> AbstractContextManager[None]:
        search = store.search(bench.embedded.queries([unframed(one) for one in prompts]), 1)
        if float(search.scores.min()) <= cut:  # of one prompt: others are not refused here
            return _silent(handle)
        return reading(handle, search.ids[:, 0].tolist())

    return during


@contextmanager
def _silent(handle: Attached) -> Generator[None]:
    """Switch the readers off for a while: where the store does not have the answer, no reader is asked."""
    gates = [cast(StoreReader, reader).gate for reader in handle.readers]
    before = [gate.detach().clone() for gate in gates]
    try:
        for gate in gates:
            gate.data.zero_()
        yield
    finally:
        for gate, value in zip(gates, before, strict=True):
            gate.data.copy_(value)


def _context(bench: Bench, progress: Progress) -> dict[str, object]:
    """The unchanged model, without a store, and with the nearest facts before the question."""
    config, ways = bench.config, list[dict[str, object]]()
    present, absent, records = bench.choosing()
    with bench.embedded.store(records) as store:
        cut = least_mistakes(
            *(store.search(bench.embedded.queries(some), 1).scores[:, 0].tolist() for some in (present, absent))
        )
    each = _bytes_of_token(bench.model)
    for done, size in enumerate(config.sizes):
        progress(done, len(config.sizes), f"{size} facts")
        with bench.edited_store(size) as (store, asked):
            search = store.search(bench.embedded.queries([one.text for one in asked]), max(CONTEXTS))
            refused = [score <= cut for score in search.scores[:, 0].tolist()]
            if not done:
                prompts = [worked(0) + one.prompt for one in asked]
                plain = said(bench.model, bench.tokenizer, prompts, config.tokens, [])
                rows = scored(bench.tokenizer, asked, plain, None, [False] * len(asked))
                ways.append(bench.way("alone", 0, rows, asked, lambda _: 0))
            for count in CONTEXTS:
                near = [[one for one in row if one >= 0] for row in search.ids[:, :count].tolist()]
                prompts = [
                    worked(count) + _before(store, some) + one.prompt for some, one in zip(near, asked, strict=True)
                ]
                answers = said(bench.model, bench.tokenizer, prompts, config.tokens, [])
                entry = [one.entry in some for one, some in zip(asked, near, strict=True)]
                rows = scored(bench.tokenizer, asked, answers, entry, refused)
                held, nearest = 4 * len(store) * store.dim, _nearest(bench.embedded, store, count)
                ways.append(
                    bench.way(
                        *(f"context, {count} fact{'s' * (count > 1)}", size, rows, asked),
                        lambda n, held=held: held + n * each,
                        before=nearest,
                        worked=worked(count),
                    )
                )
    return {"threshold": cut, "ways": ways}


def worked(count: int) -> str:
    """Two questions with their answers, each below facts as they stand before a question.

    The model is not trained here to answer in a word: without examples it says "The colour of coal is black.". All
    facts of the examples stand in one order, so that the right one is once the first and once the last.
    """
    parts = list[str]()
    for record, frame in _WORKED:
        key, _, value = record.text.partition(SEPARATOR)
        facts = [] if not count else [record] if count == 1 else OWN
        parts += [f"{sentence(one.text)}\n" for one in facts]
        parts.append(f"{PROMPT.format(frame.format(key=key))} {value}\n\n")
    return "".join(parts)


def _nearest(embedded: Embedded, store: Store, count: int) -> Callable[[str], str]:
    """A text to the facts nearest to it, as they stand before it."""

    def before(text: str) -> str:
        return _before(
            store, [one for one in store.search(embedded.queries([text]), count).ids[0].tolist() if one >= 0]
        )

    return before


def _before(store: Store, ids: Sequence[int]) -> str:
    return "".join(f"{sentence(str(entry.text))}\n" for entry in reversed(store.get(ids)))


def _bytes_of_token(model: nn.Module) -> int:
    """Of the keys and values of one token of a context, in all layers, in float32."""
    config: Any = cast(Any, model).config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 4 * config.num_hidden_layers * heads * width
