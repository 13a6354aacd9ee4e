"""Every recipe at every scale runs in miniature, every tiny study is summarised; every folder is complete."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from attnflow.models.subject import Loaded
from experiments.claims.claim import Measured
from experiments.claims.page import claims
from experiments.explain_agreement import study as agreement
from experiments.knowledge_ablation.facts import Fact
from experiments.runner.command import dry_run
from experiments.runner.experiment import find, names
from experiments.runner.text import Split, stream, stream_rows, word_pieces
from tests.experiments.miniature import language_model, rows, run_miniature
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

RECIPES = [(name, scale) for name in names() for scale in find(name).recipes]
SECTIONS = ("Prediction", "What came out")


class Words:
    """A word is a token: its length."""

    def __call__(self, text: str, return_tensors: str | None = None, **_: object) -> dict[str, Any]:
        ids = [len(word) for word in text.split()][:16]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}


QUESTIONS = {
    "openai/gsm8k": {"question": "How many?", "answer": "1 + 1 = 2\n#### 2"},
    "tasksource/QuALITY": {"article": "A story.", "question": "Who?", "options": ["a", "b", "c", "d"], "gold_label": 4},
}
SUMS = [{"question": f"{n} + 1?", "solution": f"{n} + 1 = {n + 1}", "answer": f"{n + 1}"} for n in range(1, 4)]
PROGRAMS = [
    {"task_id": f"{n}", "prompt": "def f(x):\n", "canonical_solution": f"    return x + {n}\n"} for n in range(3)
]
NAMES: list[tuple[str, str | None, str]] = []


def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Iterator[dict[str, str]]:
    """In place of the hub: documents of many lengths, as they come."""
    assert streaming, "the published scales do not download whole data sets"
    NAMES.append((name, config, split))
    draw = random.Random(0)
    while True:
        yield {"text": " ".join(draw.choice(("alpha", "beta", "gamma", "delta")) for _ in range(draw.randint(0, 60)))}


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> Any:
    return word_pieces(["alpha beta gamma delta"], 270)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokenizer: Any) -> None:
    """In place of pretrained models, of texts of packages, and of the hub."""

    def loaded(*_: object, **__: object) -> Loaded:
        model = tiny("Llama", torch.float32)
        model.resize_token_embeddings(len(tokenizer))
        return Loaded(model, tokenizer)

    def split(*_: object) -> Split:
        return Split(rows(8, 0), rows(2, 1), rows(3, 2))

    def always(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def facts(relation: str) -> Callable[..., Any]:
        return always([Fact(relation, subject, "alpha", "beta") for subject in ("Norway", "Sweden", "Denmark")])

    long = ["alpha beta gamma delta " * 20, "delta gamma " * 30] * 20
    for place, value in {
        "datasets.load_dataset": load_dataset,
        "experiments.runner.text.DATA": tmp_path / "data",
        "experiments.runner.text.named_tokenizer": always(tokenizer),
        "experiments.runner.text.learned_from_training": always(tokenizer),
        "experiments.runner.text.split_text": split,
        "experiments.bias_comparison.data.load_model": loaded,
        "experiments.bias_comparison.starts.load_model": loaded,
        "experiments.bias_comparison.data.named_tokenizer": always(tokenizer),
        "experiments.bias_comparison.data.learned_from_training": always(tokenizer),
        "experiments.bias_comparison.data.split_works": split,
        "experiments.bias_comparison.data.works": list,
        "experiments.editing.study.load_model": loaded,
        "experiments.editing.study.sample_text": always("to be or not to be. that is the question. " * 9),
        "experiments.editing.study.known_facts": facts("continent"),
        "experiments.editing.lasting.load_model": loaded,
        "experiments.editing.lasting.sample_text": always("to be or not to be. that is the question. " * 9),
        "experiments.editing.lasting.known_facts": facts("continent"),
        "experiments.daa_evaluation.likelihood.load_model": lambda *_, **__: Loaded(language_model(), tokenizer),
        "experiments.daa_evaluation.likelihood._items": lambda: {"gsm8k": SUMS, "humaneval": PROGRAMS},
        "experiments.daa_evaluation.likelihood.shown": always("Q: How many?\nA: The answer is 2.\n\n"),
        "experiments.daa_evaluation.practice.reasoned_answers": always(long),
        "experiments.daa_evaluation.practice.functions": always(long),
        "experiments.daa_evaluation.study.load_model": lambda *_, **__: Loaded(language_model(), tokenizer),
        "experiments.daa_evaluation.study.DATA": tmp_path / "data",
        "experiments.daa_evaluation.study.split_text": split,
        "experiments.evaluation.sources.held_out": always(["to be or not to be", "that is the question"]),
        "experiments.evaluation.sources._lines": always([{"prompt": "?", "expected": "2", "upstream_answer": "2"}] * 3),
        "experiments.evaluation.sources.rows": lambda source: [QUESTIONS[source.partition(":")[0]]] * 3,
        "experiments.knowledge_ablation.ablate.load_model": lambda *_, **__: Loaded(loaded().model, Words()),
        "experiments.knowledge_ablation.ablate.known_facts": facts("capital"),
        "experiments.knowledge_ablation.ablate.token_of": lambda _, word: len(word),
        "experiments.knowledge_ablation.ablate.sample_text": always("to be or not to be that is the question"),
        "experiments.reader.bench.load_model": lambda *_, **__: Loaded(language_model(), tokenizer),
        "experiments.reader.bench.known_facts": always([]),
        "experiments.reader.practice.words_of": always(["alpha", "beta", "gamma", "delta"]),
        "experiments.reader.words._STEPS": 2,
        "experiments.explain_agreement.study.load_model": loaded,
        "experiments.explain_agreement.study.asked": always([agreement.Prompt("alpha beta gamma", 5, 7)] * 2),
        "experiments.length.study.load_model": loaded,
        "experiments.length.study.split_text": split,
        "experiments.geometry_corpus.study.load_model": loaded,
        "experiments.geometry_corpus.study.passages": lambda count: long[:count],
        "experiments.geometry_corpus.study.documents": always(long),
        "experiments.geometry_checkpoints.checkpoints.Checkpoint.is_here": True,
        "experiments.geometry_checkpoints.checkpoints.Checkpoint.opened": lambda *_: nullcontext(loaded().model),
    }.items():
        monkeypatch.setattr(place, value)


@pytest.mark.parametrize(("name", "scale"), RECIPES)
def test_a_recipe_runs_in_miniature(name: str, scale: str) -> None:
    experiment = find(name)
    config, arms = experiment.recipes[scale](), []
    if name == "bias_comparison":  # of whose parts each has arms, tasks and data of its own
        arms = [f"{part.name} {part.arms[0]}" for part in experiment.miniature(config).parts]
    assert dry_run(experiment, config, arms).endswith("ran; nothing was kept")


def test_published_data_are_streamed_by_name(tmp_path: Path, tokenizer: Any) -> None:
    NAMES.clear()
    experiment = find("geometry_init")
    experiment.setup(experiment.miniature(experiment.recipes["paper"]()))
    assert NAMES == [("wikimedia/wikipedia", "20231101.en", "train")] * 2
    settings = (tokenizer, 16, 40, tmp_path)
    whole = stream_rows("name", *settings)
    assert (len(whole), len(NAMES)) == (40, 3)
    assert torch.equal(stream_rows("name", *settings)[[3, 5]]["input_ids"], whole[[3, 5]]["input_ids"])
    assert len(NAMES) == 3, "read from the file"
    documents = list(islice(stream("name"), whole.documents))
    flat = [i for text in documents for i in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]
    assert whole.tokens.flatten().tolist() == flat[: 40 * 16]
    later = stream_rows("name", *settings, skip=whole.documents)
    following = next(islice(stream("name"), whole.documents, None))
    assert tokenizer.decode(later[0]["input_ids"]).startswith(following[:20])


def test_a_short_data_set_has_the_rows_it_has(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few = lambda *_, **__: [{"text": "alpha beta"}] * 9  # noqa: E731
    monkeypatch.setattr("datasets.load_dataset", few)
    size = len(tokenizer("alpha beta")["input_ids"]) + 1
    assert len(stream_rows("name", tokenizer, 4, 100, tmp_path)) == 9 * size // 4
    with pytest.raises(ValueError, match="less than one row of 999 tokens"):
        stream_rows("name", tokenizer, 999, 2, tmp_path)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: [{"content": "alpha"}])
    with pytest.raises(ValueError, match='rows without text under "text"; they have content'):
        stream_rows("other", tokenizer, 4, 2, tmp_path)


FEWER = {  # arms, where a miniature has more than a test needs
    "bias_comparison": lambda config: replace(config, parts=judged_parts()),
    "geometry_init": lambda config: replace(config, masked=("default", "scaled"), causal=("default", "scaled")),
}
ARMS = {
    "text": ("plain", "dense", "key", "lowrank", "guidance"),
    "recall": ("plain", "key", "guidance"),
    "few": ("plain 16", "dense 16", "guidance 16", "plain 64", "dense 64", "guidance 64"),
    "tuned": ("lora", "guidance"),
    "sums": ("plain", "alibi", "guidance"),
    "knobs": ("width 64", "width 16", "width 128", "every layer", "every fourth", "by head", "He init"),
    "changes": ("same text", "new text"),
}


def judged_parts() -> tuple[Any, ...]:
    """Parts of all scales that two cores run, with the arms that verdicts need."""
    one = find("bias_comparison")
    parts = [part for scale in ("tiny", "text", "recall", "few") for part in one.miniature(one.recipes[scale]()).parts]
    return tuple(replace(part, arms=ARMS[part.name]) for part in parts if part.name in ARMS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), [*((name, "tiny") for name in names()), ("editing", "lasting")])
def test_a_study_in_miniature_is_summarised_and_judged(name: str, scale: str, tmp_path: Path) -> None:
    experiment = find(name)
    config = FEWER.get(name, lambda config: config)(experiment.miniature(experiment.recipes[scale]()))
    assert run_miniature(experiment, tmp_path, config)
    results = tmp_path / "results"
    assert json.loads((results / "results.json").read_text())
    assert len((results / "results.csv").read_text().splitlines()) > 1
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in results.glob("*.png"))
    own = {one.number for one in claims() if isinstance(one.by, Measured) and one.by.experiment == name}
    assert {one.claim for one in experiment.judge(results)} <= own


@pytest.mark.parametrize("name", names())
def test_a_folder_is_complete(name: str) -> None:
    experiment = find(name)
    assert experiment.name == name
    assert "tiny" in experiment.recipes
    text = (experiment.folder / "README.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    for section in SECTIONS:
        assert any(heading.startswith(section) for heading in headings), section
    assert f"python -m experiments {name}" in text
    if (experiment.results("tiny") / "results.json").is_file():
        assert "**Verdict" in text
        for path in re.findall(r"\]\((results/[^)]*)\)", text):
            assert (experiment.folder / path).is_file(), path
