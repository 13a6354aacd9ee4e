"""What an experiment is to the runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from attnflow._core.progress import Progress
from experiments.runner.jobs import Job, Plan
from experiments.runner.verdict import TAGS, Decision, Tag, Verdict

Config = TypeVar("Config")

ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Setup:
    """A study that is ready to run: what is loaded once, in front of all jobs."""

    plan: Plan  # the jobs
    # given a job, a folder of its own for checkpoints, and progress; returns what its file shall hold. Called again
    # after it was killed, in any process, it must return the same.
    run: Callable[[Job, Path, Progress], Mapping[str, object]]
    # what belongs to the settings beside the config, such as the sizes of the arms
    about: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class Judgement:
    """What the results say of one claim of a paper."""

    claim: str  # its number, as `docs/claims.md` has it
    verdict: Verdict  # by the one rule
    sentence: str  # what came out, with figures
    tags: tuple[Tag, ...] = ()
    evidence: str = ""  # in place of the scale, where the results are about models that others trained

    @classmethod
    def of(cls, claim: str, decision: Decision, sentence: str, *tags: Tag, evidence: str = "") -> Judgement:
        order: tuple[Tag, ...] = tuple(tag for tag in TAGS if tag in (*tags, *decision.tags))
        return cls(claim, decision.verdict, sentence, order, evidence)


def no_claim(results: Path) -> Sequence[Judgement]:
    """What an experiment says of the papers' claims that answers a question of our own."""
    del results
    return ()


@dataclass(frozen=True)
class Experiment(Generic[Config]):
    """One experiment; its folder is `experiments/NAME`, and `recipe.py` there holds it as `EXPERIMENT`."""

    name: str  # of the folder
    question: str  # in one sentence
    # scale -> a function that returns the config, a frozen dataclass; its field `seeds`, if there is one, is a tuple
    # that `--seeds` may change
    recipes: Mapping[str, Callable[[], Config]]
    setup: Callable[[Config], Setup]  # from a config
    # given the folder of a study, with its `study.json` and `runs/`, and the folder for results: writes these and
    # returns a table in text
    summarise: Callable[[Path, Path], str]
    miniature: Callable[[Config], Config]  # the same config at a size of seconds, for dry runs
    # from a folder of results to what is said of the papers' claims; or `no_claim`
    judge: Callable[[Path], Sequence[Judgement]]
    packages: tuple[str, ...] = ("torch", "attnflow")  # whose versions belong to the results

    @property
    def folder(self) -> Path:
        return ROOT / self.name

    def results(self, scale: str) -> Path:
        """Folder of the results at a scale; those at "tiny" are the ones that README shows."""
        return self.folder / "results" if scale == "tiny" else self.folder / "results" / scale


def names() -> list[str]:
    return sorted(path.parent.name for path in ROOT.glob("*/recipe.py"))


def find(name: str) -> Experiment[Any]:
    if name not in names():
        raise ValueError(f"no experiment {name!r}; there are {', '.join(names())}")
    return import_module(f"experiments.{name}.recipe").EXPERIMENT
