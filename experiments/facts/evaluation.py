"""Facts edited in a store at run time, and asked for before and after."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch

from attnflow.knowledge.retrieval import Retrieval
from experiments.facts.corpus import UNKNOWN, Corpus
from experiments.facts.model import FactReader
from experiments.facts.training import Trained
from experiments.facts.world import GROUPS, WORDINGS, World

CONTEXT: Final = 3  # facts that are retrieved into the context
_BEST: Final = 8  # entries that are read where not all are
_BATCH: Final = 64


@dataclass(frozen=True)
class FactEvaluation:
    """What is asked. The defaults are the scale "tiny"."""

    sizes: tuple[int, ...] = (64, 256, 1024, 4096)  # facts in the store
    # facts of each kind of edit that are asked for, for each size; in several stores where one is too small
    group: int = 64
    near: float = 0.6  # fraction of keys that differ in one part from another key in the store
    timed: int = 20  # questions whose times are taken, one at a time


@dataclass(frozen=True)
class Told:
    """What a model said about a group of facts, in one way of reading."""

    size: int  # facts in the store
    way: str  # of reading, see `ways`
    phase: str  # "before" or "after" the edits
    group: str  # one of `GROUPS`
    wording: str  # "trained" or "paraphrased" questions
    said: str  # a letter for each question: "r" right, "o" the value before the edit, "u" unknown, "x" something else


@dataclass(frozen=True)
class Size:
    """What belongs to a store and not to a group of facts."""

    size: int  # facts in the store
    recall: dict[str, dict[str, float]]  # wording -> number of nearest keys -> how often the right one is among them
    # way -> median time of a question to the first word of its answer, searching included
    milliseconds: dict[str, float]


Say = Callable[[Sequence[str]], list[str]]


def ways(world: World, least: float) -> Mapping[str, Say]:
    """How questions are answered; `least` is what "near enough" means, see `least_score`.

    - `entries`: the model reads all entries of the store.
    - `best entries`: each token and block reads only the 8 best, by an exact search in the store.
    - `context`: the encoder finds the 3 nearest facts in the store, which stand before the question as text; the model
      reads entries of its own.
    - `context, 1 fact`: the nearest alone.
    - `context or unknown`: likewise, but "unknown" where the nearest is not near enough, without asking the model.
    - `oracle context`: the one fact that is asked for, in place of the nearest where it is in the store (a bound).
    - `shuffled entries`: as `entries`, after the values have been moved from entry to entry (a control).
    """
    reader = world.reader

    def best(questions: Sequence[str]) -> list[str]:
        with reading_best(reader, _BEST):
            return reader.say(questions, world.knowledge)

    def sure(questions: Sequence[str]) -> list[str]:
        said = reader.say(questions, None, world.nearest(questions, 1))
        near = (world.scores(questions) >= least).tolist()
        return [answer if enough else UNKNOWN for answer, enough in zip(said, near, strict=True)]

    def moved(questions: Sequence[str]) -> list[str]:
        return reader.say(questions, world.shuffled())

    return {
        "entries": lambda questions: reader.say(questions, world.knowledge),
        "best entries": best,
        "context": lambda questions: reader.say(questions, None, world.nearest(questions, CONTEXT)),
        "context, 1 fact": lambda questions: reader.say(questions, None, world.nearest(questions, 1)),
        "context or unknown": sure,
        "oracle context": lambda questions: reader.say(questions, None, world.oracle(questions)),
        "shuffled entries": moved,
    }


def measure(trained: Trained, seed: int, settings: FactEvaluation) -> tuple[list[Told], list[Size]]:
    """Everything for one trained model. All chance follows from the seed and the size."""
    told, sizes = list[Told](), list[Size]()
    least = least_score(trained, seed, settings.near)
    for size in settings.sizes:
        each = min(size // 4, settings.group)
        said: dict[tuple[str, str, str, str], str] = {}
        for number in range(-(-settings.group // each)):
            draw = random.Random(f"evaluation {seed} {size} {number}")
            with (
                TemporaryDirectory() as folder,
                World(trained, Path(folder) / "store", size, each, settings.near, draw) as world,
            ):
                _ask(world, least, "before", said)
                world.edit()
                _ask(world, least, "after", said)
                if number == 0:
                    sizes.append(Size(size, _recall(world), _times(world, least, settings.timed)))
        told += [Told(size, *names, letters) for names, letters in said.items()]
    return told, sizes


def least_score(trained: Trained, seed: int, near: float, count: int = 256) -> float:
    """The inner product of a question with the nearest key that best tells facts in a store from facts that are not.

    Found on subjects of training: half of the questions ask for facts among `count`, half for others.
    """
    corpus = Corpus(random.Random(f"least score {seed}"))
    facts = corpus.facts(count, near)
    held = [fact.key for fact in facts]
    questions = [corpus.question(key) for key in (*held, *corpus.keys(count, near, held))]
    with torch.no_grad():
        keys = trained.encoder.key([fact.text for fact in facts])
        scores = (trained.encoder.key(questions) @ keys.T).amax(dim=1)
    there, absent = scores[:count], scores[count:]
    right = [int((there >= score).sum() + (absent < score).sum()) for score in scores]
    return float(scores[max(range(len(right)), key=right.__getitem__)])


def _ask(world: World, least: float, phase: str, said: dict[tuple[str, str, str, str], str]) -> None:
    """All questions in all ways; letters are added to those of other stores of the size."""
    truth, old = world.truth(phase), world.truth("before")
    for way, say in ways(world, least).items():
        for wording in WORDINGS:
            questions = world.questions[wording]
            answers = [
                answer
                for start in range(0, len(questions), _BATCH)
                for answer in say(questions[start : start + _BATCH])
            ]
            letters = [_letter(*each) for each in zip(answers, truth, old, strict=True)]
            count = len(letters) // len(GROUPS)
            for place, group in enumerate(GROUPS):
                names = (way, phase, group, wording)
                said[names] = said.get(names, "") + "".join(letters[place * count : (place + 1) * count])


def _letter(answer: str, right: str, old: str) -> str:
    if answer == right:
        return "r"
    if answer == UNKNOWN:
        return "u"
    return "o" if answer == old else "x"


def _recall(world: World) -> dict[str, dict[str, float]]:
    return {wording: {str(count): world.recall(wording, count) for count in (1, CONTEXT)} for wording in WORDINGS}


def _times(world: World, least: float, count: int) -> dict[str, float]:
    """Ways take turns, so that what else the machine does meets all of them."""
    taken: dict[str, list[float]] = {}
    for question in world.questions["trained"][:count]:
        for way, say in ways(world, least).items():
            began = time.perf_counter()
            say([question])
            taken.setdefault(way, []).append(1000 * (time.perf_counter() - began))
    return {way: statistics.median(times) for way, times in taken.items()}


@contextmanager
def reading_best(reader: FactReader, count: int) -> Generator[None]:
    """The model's blocks read only the entries with the highest scores."""
    blocks = reader.model.readers()
    for block in blocks:
        block.retrieval = Retrieval(k=count, search="exact")
    try:
        yield
    finally:
        for block in blocks:
            block.retrieval = None
