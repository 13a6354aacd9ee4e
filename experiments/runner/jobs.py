"""Which runs a study consists of: arms, seeds, and learning rates; some seeds choose one rate for each arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final, cast

Record = Mapping[str, Any]  # what a finished job has written, as JSON holds it
Read = Callable[["Job"], Record]
WIDENED: Final = 3  # how often a range of rates grows to each side
DIVERGED: Final = "diverged"  # in a record: why there is nothing else in it

_NOTHING: Final[Callable[[Read], tuple["Job", ...]]] = lambda _: ()  # noqa: E731


@dataclass(frozen=True)
class Job:
    """One run of a study: its result is one file, its checkpoints lie in one folder.

    >>> Job("key", 1e-3, 0).name, Job("answers alone", seed=2).name, Job("updates").name
    ('key-0.001-0', 'answers-alone-2', 'updates')
    """

    arm: str  # what is run; of a study without arms, which part of it
    rate: float | None = None  # peak learning rate, if several are tried
    seed: int | None = None  # of initialisation and of all that is drawn, if there are several

    @property
    def name(self) -> str:
        rate = "" if self.rate is None else f"-{self.rate:g}"
        seed = "" if self.seed is None else f"-{self.seed}"
        return f"{self.arm.replace(' ', '-').replace('/', '-')}{rate}{seed}"


@dataclass(frozen=True)
class Plan:
    """All runs of a study, in their order."""

    first: tuple[Job, ...]  # those that depend on no other
    # those that follow from what has been run. It is asked again until nothing is left to run; reading a run that is
    # not there raises FileNotFoundError.
    then: Callable[[Read], Sequence[Job]] = _NOTHING
    count: int = 0  # of all, as far as it is known

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", max(self.count, len(self.first)))

    def only(self, arms: Sequence[str]) -> Plan:
        """The runs of some arms, and those that belong to none (without a seed)."""
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


def swept(
    arms: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    loss: Callable[[Record], float],
    choosing: int,
    widen: bool = True,
) -> Plan:
    """Every arm with every learning rate on the first seeds, then with its best rate on the others.

    A best rate at the end of the range widens the range for that arm, by the factor between the last two rates, at most
    `WIDENED` times to each side.

    Args:
        arms: by name.
        rates: increasing; the same for all arms.
        seeds: of the study.
        loss: of a finished run, on data for choosing that are not those of the results.
        choosing: how many of the seeds choose, by the mean of their losses; all of them: every arm at every rate.
        widen: whether to widen; studies of November 2026 and before did not.
    """

    def next_of(arm: str, read: Read) -> list[Job]:
        tried = tried_rates(arm, rates, seeds[:choosing], read)
        best = best_rate(arm, tried, seeds[:choosing], read, loss)
        wider = _wider(best, tried, rates) if widen else None
        if wider is None:
            return [Job(arm, best, seed) for seed in seeds[choosing:]]
        return [Job(arm, wider, seed) for seed in seeds[:choosing]]

    def then(read: Read) -> list[Job]:
        found: list[Job] = []
        for arm in arms:
            with suppress(FileNotFoundError):  # an arm that was not to be run: see `Plan.only`
                found += next_of(arm, read)
        return sorted(found, key=lambda job: seeds.index(cast(int, job.seed)))

    first = tuple(Job(arm, rate, seed) for seed in seeds[:choosing] for arm in arms for rate in rates)
    return Plan(first, then, len(first) + len(arms) * (len(seeds) - choosing))


def choosing_loss(run: Record) -> float:
    """Of a run that measures as it trains: the last loss on rows that are not those of the results."""
    return run["measured"][-1]["choosing"]


def tried_rates(arm: str, rates: Sequence[float], choosing: Sequence[int], read: Read) -> list[float]:
    """The rates of a study, and further ones that were added for this arm and that all choosing seeds have run."""
    tried = list(rates)
    if len(tried) < 2:
        return tried
    for step in (_below, _above):
        while (rate := step(tried, rates)) is not None:
            try:
                for seed in choosing:
                    read(Job(arm, rate, seed))
            except (FileNotFoundError, KeyError):
                break
            tried = sorted([*tried, rate])
    return tried


def best_rate(
    arm: str, rates: Sequence[float], choosing: Sequence[int], read: Read, loss: Callable[[Record], float]
) -> float:
    """The learning rate with the lowest mean loss for choosing; one that diverged with any of the seeds has none."""
    losses: dict[float, float] = {}
    said = ""
    for rate in rates:
        runs = [read(Job(arm, rate, seed)) for seed in choosing]
        said = next((run[DIVERGED] for run in runs if DIVERGED in run), "")
        if not said:
            losses[rate] = fmean(loss(run) for run in runs)
    if not losses:
        raise ValueError(f"{arm} diverged with every learning rate: {said}; try lower ones")
    return min(losses, key=losses.__getitem__)


def rate_of(arm: str, rates: Sequence[float], seeds: Sequence[int], read: Read) -> float:
    """The rate with the lowest loss for choosing, in the mean of all seeds."""
    return best_rate(arm, tried_rates(arm, rates, seeds, read), seeds, read, choosing_loss)


@dataclass(frozen=True)
class Chosen:
    """A `swept` arm at the learning rate that its choosing seeds gave it."""

    rate: float  # the best one
    tried: tuple[float, ...]  # all that were tried
    at_end: bool  # whether it is the lowest or the highest that was tried, so that a better one may lie beyond
    runs: Mapping[int, Record]  # finished runs with the best rate, by seed


def chosen(
    arm: str,
    rates: Sequence[float],
    seeds: Sequence[int],
    runs: Mapping[Job, Record],
    loss: Callable[[Record], float],
    choosing: int,
) -> Chosen | None:
    """What `swept` has found for an arm; None while a rate of the study has not been tried."""
    if any(Job(arm, rate, seed) not in runs for rate in rates for seed in seeds[:choosing]):
        return None
    tried = tried_rates(arm, rates, seeds[:choosing], runs.__getitem__)
    best = best_rate(arm, tried, seeds[:choosing], runs.__getitem__, loss)
    of_best = {seed: runs.get(Job(arm, best, seed)) for seed in seeds}
    whole = {seed: run for seed, run in of_best.items() if run and DIVERGED not in run}
    return Chosen(best, tuple(tried), len(tried) > 1 and best in (tried[0], tried[-1]), whole)


def rates_of(config: Mapping[str, Any], runs: Sequence[Record]) -> dict[str, Any]:
    """What was tried for each arm: the loss for choosing of each seed at each rate, and the rate that was taken."""
    trained = {Job(**run["job"]): run for run in runs if "measured" in run or DIVERGED in run}
    seeds = config["seeds"]
    table: dict[str, Any] = {}
    for arm in config["arms"]:
        losses: dict[str, list[float]] = {}
        for job, run in sorted(trained.items(), key=lambda one: (one[0].rate or 0, one[0].seed or 0)):
            if job.arm == arm:
                losses.setdefault(f"{job.rate:g}", []).append(float("inf") if DIVERGED in run else choosing_loss(run))
        best = chosen(arm, config["rates"], seeds, trained, choosing_loss, len(seeds))
        table[arm] = {"taken": best.rate if best else None, "at_end": best.at_end if best else None, "losses": losses}
    return table


def _wider(best: float, tried: Sequence[float], rates: Sequence[float]) -> float | None:
    """The next rate, if the best one lies at an end; None if it lies within, or if enough rates were added."""
    if len(tried) < 2:
        return None
    return _below(tried, rates) if best == tried[0] else _above(tried, rates) if best == tried[-1] else None


def _below(tried: Sequence[float], rates: Sequence[float]) -> float | None:
    if sum(rate < rates[0] for rate in tried) >= WIDENED:
        return None
    return float(f"{tried[0] ** 2 / tried[1]:.2g}")


def _above(tried: Sequence[float], rates: Sequence[float]) -> float | None:
    if sum(rate > rates[-1] for rate in tried) >= WIDENED:
        return None
    return float(f"{tried[-1] ** 2 / tried[-2]:.2g}")
