"""`fit_reader`: teach a frozen model to read stores of one encoder, in one call that can be killed and called again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnflow._core.checks import integer
from attnflow._core.files import write_atomically
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.knowledge.reading.attach import attach
from attnflow.knowledge.store import Store
from attnflow.models.passes.evaluation import evaluating, seed_all
from attnflow.models.subject import Loaded, Subject
from experiments.reader.fitting import Run, Settings
from experiments.reader.halves import Halves
from experiments.reader.records import Record


@dataclass(frozen=True)
class Fitted(Result):
    """What came out of teaching a model to read a store; its table is the curve of held-out questions."""

    folder: str  # where the reader, the settings and the checkpoint lie
    num_parameters: int  # of the reader
    # of each measurement the step and, for stores of 64 and 1,024 entries, how often the right entry had the most
    # weight (entry), the first word of the answer was right (word), anything was read (read), and nothing was where the
    # entry was not there (refused); and what the loss of text that the model itself wrote rises by when the store is
    # read, in nats a token (drift)
    curve: tuple[dict[str, float], ...]
    settings: dict[str, Any]  # of the run, by which it is recognised when it goes on
    enough: float  # weight on entries, the mean over readers and heads, above which the store has the answer
    near: float  # inner product of a question with the key of the nearest entry above which it has

    def rows(self) -> Sequence[Mapping[str, object]]:
        return self.curve

    def __str__(self) -> str:
        last = ", ".join(f"{name} {value:.2f}" for name, value in self.curve[-1].items() if name != "step")
        return f"{self.folder}: {self.num_parameters:,} parameters; held-out questions: {last}"


def fit_reader(
    model: Loaded,
    store: Store,
    folder: str | os.PathLike[str],
    data: Sequence[Record],
    *,
    layers: Sequence[int] | None = None,
    facts: int = 12_000,
    reading_steps: int = 3000,
    steps: int = 300,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fitted:
    """Teach a frozen model to read a store: the reader is tied to the encoder, not to the entries.

    Templates make questions from `data` and from made-up facts. The values of these facts are words of the model's
    vocabulary, and so are most subjects. A tenth of the facts, and some wordings, are held out. First the readers learn
    *where* to read: the right entry is scored against all others and against none. A fifth of the questions lack the
    right one, so its neighbours are near misses. At the tokens of text that the model writes, they learn to read
    nothing. Their inputs are the states of the model's first layers, computed once. Values start as the linear map from
    embeddings of the vocabulary's words to the words, and the gate starts where answers are likeliest. Then the readers
    learn to *answer* from stores of 64 to 1,024 entries: the loss of the answer's tokens through the frozen model, with
    the losses of reading beside it. Last, held-out questions, with their entries among 1,024 and without, choose the
    thresholds that separate questions with an answer from others. One is the weight of the readers. The other, used by
    `ask` to refuse, is the similarity of the nearest entry, with other facts of the same subjects among those 1,024.
    Killed and called again, it goes on where it was.

    Args:
        model: what `af.load_model` gave: a causal language model with its tokenizer; it is as it was afterwards.
        store: of texts, embedded by `Halves`.
        folder: for the reader (`attach(model, store, reader=folder / "reader")`), the curve and the checkpoint.
        data: facts to practise on.
        layers: that get readers; by default as `attach` chooses.
        facts: made-up ones.
        reading_steps: of the first part.
        steps: of the second.
        seed: of everything random.
        progress: called as progress(done, total, what).

    Returns:
        What came out: the curve, and held-out accuracies.

    Cost: of the first part the embeddings of all facts and of 20,000 words, and the first layers for each question;
        of the second `steps` forward and backward passes of 16 questions. The guide says how well SmolLM2-135M answers
        after a small run.
    """
    module, tokenizer = Subject.of(model).model, Subject.of(model).tokenizer
    head: Any = getattr(module, "get_output_embeddings", lambda: None)()
    if tokenizer is None or head is None:
        raise ValueError(
            "fit_reader needs a causal language model with its tokenizer: pass what af.load_model returned"
        )
    for name, number in (("facts", facts), ("reading_steps", reading_steps), ("steps", steps)):
        integer(name, number, 1)
    place = Path(folder)
    encoder = Halves.of(store)
    settings = Settings(facts, reading_steps, steps, seed, "records", encoder.version)
    place.mkdir(parents=True, exist_ok=True)
    _check(place, settings)
    with evaluating(module):
        seed_all(seed)  # what readers start from; random generators are put back afterwards
        handle = attach(model, store, layers=layers)
        before = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        try:
            run = Run(module, tokenizer, handle, encoder, list(data), settings, place, progress)
            for parameter in module.parameters():
                parameter.requires_grad_(False)
            for reader in run.readers:
                reader.requires_grad_(True)
            run.fit()
            handle.save(place / "reader")
        finally:
            handle.remove()
            for parameter, wanted in before:
                parameter.requires_grad_(wanted)
    result = Fitted(str(place), run.count, tuple(run.curve), asdict(settings), run.enough, run.near)
    result.save(place / "fitted.json")
    return result


def _check(place: Path, settings: Settings) -> None:
    """Refuse a folder with another run, and say in a new one which it is."""
    path, content = place / "settings.json", asdict(settings)
    if path.is_file():
        held = json.loads(path.read_text())
        changed = [
            f"{name} {held.get(name)!r}, now {value!r}" for name, value in content.items() if held.get(name) != value
        ]
        if changed:
            raise ValueError(f"{place} holds a run with other settings ({'; '.join(changed)}): choose another folder")
        return
    with write_atomically(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
