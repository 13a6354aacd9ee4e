"""Which runs a study consists of: arms, seeds, and learning rates that are chosen by the first seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Record = Mapping[str, Any]  # what a finished job has written, as JSON holds it
Read = Callable[["Job"], Record]
DIVERGED: Final = "diverged"  # in a record: why there is nothing else in it

_NOTHING: Final[Callable[[Read], tuple["Job", ...]]] = lambda _: ()  # noqa: E731


@dataclass(frozen=True)
class Job:
    """One run of a study: its result is one file, its checkpoints lie in one folder.

    Attributes:
        arm: what is run; of a study without arms, which part of it.
        rate: peak learning rate, if several are tried.
        seed: of initialisation and of all that is drawn, if there are several.

    >>> Job("key", 1e-3, 0).name, Job("answers alone", seed=2).name, Job("updates").name
    ('key-0.001-0', 'answers-alone-2', 'updates')
    """

    arm: str
    rate: float | None = None
    seed: int | None = None

    @property
    def name(self) -> str:
        """Of its file."""
        rate = "" if self.rate is None else f"-{self.rate:g}"
        seed = "" if self.seed is None else f"-{self.seed}"
        return f"{self.arm.replace(' ', '-').replace('/', '-')}{rate}{seed}"


@dataclass(frozen=True)
class Plan:
    """All runs of a study, in the order in which they are run.

    Attributes:
        first: those that depend on no other.
        then: those that follow from the results of the first.
        count: of all.
    """

    first: tuple[Job, ...]
    then: Callable[[Read], Sequence[Job]] = _NOTHING
    count: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", max(self.count, len(self.first)))

    def only(self, arms: Sequence[str]) -> Plan:
        """The runs of some arms, and those that belong to none (without a seed).

        Raises:
            ValueError: an arm that the study does not have.
        """
        every = dict.fromkeys(job.arm for job in self.first if job.seed is not None)
        unknown = [arm for arm in arms if arm not in every]
        if unknown:
            raise ValueError(f"arms must be of {', '.join(every)}; got {', '.join(unknown)}")
        first = tuple(job for job in self.first if job.arm in arms or job.seed is None)
        share = len(first) + round((self.count - len(self.first)) * len(arms) / max(1, len(every)))
        return Plan(first, lambda read: [job for job in self.then(read) if job.arm in arms], share)


def repeated(arms: Sequence[str], seeds: Sequence[int]) -> Plan:
    """Every arm with every seed; seeds in turn, so that a study that is cut short has all arms."""
    return Plan(tuple(Job(arm, seed=seed) for seed in seeds for arm in arms))


def swept(arms: Sequence[str], rates: Sequence[float], seeds: Sequence[int], loss: Callable[[Record], float]) -> Plan:
    """Every arm with every learning rate on the first seed, then with its best rate on the others.

    Args:
        arms: by name.
        rates: the same for all arms.
        seeds: the first one chooses.
        loss: of a finished run, on data for choosing that are not those of the results.
    """

    def then(read: Read) -> list[Job]:
        best = {arm: best_rate(arm, rates, seeds[0], read, loss) for arm in arms}
        return [Job(arm, best[arm], seed) for seed in seeds[1:] for arm in arms]

    first = tuple(Job(arm, rate, seeds[0]) for arm in arms for rate in rates)
    return Plan(first, then, len(first) + len(arms) * (len(seeds) - 1))


def choosing_loss(run: Record) -> float:
    """Of a run that measures as it trains: the last loss on rows that are not those of the results."""
    return run["measured"][-1]["choosing"]


def best_rate(arm: str, rates: Sequence[float], seed: int, read: Read, loss: Callable[[Record], float]) -> float:
    """The learning rate with the lowest loss for choosing; one that diverged has none.

    Raises:
        ValueError: all of them did.
    """
    runs = {rate: read(Job(arm, rate, seed)) for rate in rates}
    losses = {rate: loss(run) for rate, run in runs.items() if DIVERGED not in run}
    if not losses:
        raise ValueError(f"{arm} diverged with every learning rate: {runs[rates[0]][DIVERGED]}; try lower ones")
    return min(losses, key=losses.__getitem__)


def chosen(
    arm: str, rates: Sequence[float], seeds: Sequence[int], runs: Mapping[Job, Record], loss: Callable[[Record], float]
) -> tuple[float, dict[int, Record]] | None:
    """(best rate, finished runs with it by seed) of a `swept` arm; None while a rate has not been tried.

    Raises:
        ValueError: it diverged with every rate.
    """
    if any(Job(arm, rate, seeds[0]) not in runs for rate in rates):
        return None
    best = best_rate(arm, rates, seeds[0], runs.__getitem__, loss)
    tried = {seed: runs.get(Job(arm, best, seed)) for seed in seeds}
    return best, {seed: run for seed, run in tried.items() if run and DIVERGED not in run}
