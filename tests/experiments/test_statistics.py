"""Intervals and tests of the experiments against scipy."""

import math

import numpy as np
import pytest
import scipy.stats

from experiments.runner.statistics import (
    Interval,
    detectable,
    difference,
    fraction,
    interval,
    over_seeds,
    permutation_test,
    proportion,
    ratios,
    speed_up,
    student,
)

VALUES = [0.31, 0.45, 0.12, 0.38, 0.51]
OTHERS = [0.22, 0.18, 0.35, 0.05, 0.15]


def test_bootstrap_intervals_are_scipys() -> None:
    mine = over_seeds(VALUES, draws=20_000)
    theirs = scipy.stats.bootstrap((VALUES,), np.mean, n_resamples=20_000, method="percentile", rng=1)
    low, high = theirs.confidence_interval
    # Two such bootstraps differ by what quantiles of 20,000 draws vary by: within 5 of their standard errors.
    band = 5 * quantile_error(theirs.bootstrap_distribution)
    assert mine.mean == pytest.approx(np.mean(VALUES))
    assert mine.low == pytest.approx(low, abs=band)
    assert mine.high == pytest.approx(high, abs=band)


def test_the_interval_of_a_difference_is_scipys() -> None:
    mine = difference(VALUES, OTHERS, draws=20_000)
    theirs = scipy.stats.bootstrap(
        (VALUES, OTHERS), lambda a, b, axis: a.mean(axis) - b.mean(axis), n_resamples=20_000, method="percentile", rng=1
    )
    band = 5 * quantile_error(theirs.bootstrap_distribution)
    assert mine.mean == pytest.approx(np.mean(VALUES) - np.mean(OTHERS))
    assert (mine.low, mine.high) == pytest.approx(tuple(theirs.confidence_interval), abs=band)


def test_what_is_detectable_is_scipys_power_of_a_t_test() -> None:
    for values, power in ((VALUES, 0.8), (VALUES[:3], 0.5)):
        freedom = len(values) - 1
        shift = detectable(values, power) * len(values) ** 0.5 / np.std(values, ddof=1)
        edge = scipy.stats.t.ppf(0.975, freedom)
        found = scipy.stats.nct.sf(edge, freedom, shift) + scipy.stats.nct.cdf(-edge, freedom, shift)
        assert found == pytest.approx(power, abs=1e-3)
    assert detectable([1.0, 2.0]) > 0
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        detectable([1.0])


def quantile_error(draws: np.ndarray) -> float:
    """Standard error of the 2.5 % quantile of such draws: sqrt(p (1 - p) / n) / density."""
    low, high = np.quantile(draws, [0.02, 0.03])
    density = 0.01 / (high - low)
    return math.sqrt(0.025 * 0.975 / len(draws)) / density


def test_a_bootstrap_over_one_row_is_one_over_seeds() -> None:
    assert over_seeds(VALUES, 500) == interval(np.array(VALUES)[:, None], 500)


@pytest.mark.parametrize("one", [VALUES, VALUES[:3], [0.2, 0.2, 0.2]])
def test_permutations_are_scipys(one: list[float]) -> None:
    theirs = scipy.stats.permutation_test(
        (one, OTHERS), lambda a, b, axis: a.mean(axis) - b.mean(axis), n_resamples=np.inf, alternative="two-sided"
    )
    # scipy doubles the smaller tail; here both tails are counted by |difference|. They agree for equal sizes.
    found = permutation_test(one, OTHERS)
    if len(one) == len(OTHERS):
        assert found == pytest.approx(theirs.pvalue)
    assert 0 < found <= 1
    assert permutation_test(OTHERS, OTHERS) == 1.0


def test_too_many_permutations_are_refused() -> None:
    with pytest.raises(ValueError, match="too many"):
        permutation_test([0.0] * 15, [1.0] * 15)


def test_speed_up_is_the_share_of_steps_saved() -> None:
    steps = list(range(0, 101, 10))
    control = [10 - 0.05 * step for step in steps]  # ends at 5
    assert speed_up(steps, control, control, window=1) == 0.0
    assert speed_up(steps, [10 - 0.1 * step for step in steps], control, window=1) == pytest.approx(0.5)
    assert speed_up(steps, [10 - 0.04 * step for step in steps], control, window=1) == 0.0, "it never gets there"
    assert speed_up(steps, [1.0] * 11, control, window=1) == 1.0, "it is there from the start"
    with pytest.raises(ValueError, match="one value for each"):
        speed_up(steps, control[:-1], control)


@pytest.mark.parametrize(("right", "items"), [(0, 25), (1, 25), (12, 25), (25, 25), (3, 164)])
def test_wilsons_interval_is_that_of_scipy(right, items):
    found, expected = proportion(right, items), scipy.stats.binomtest(right, items).proportion_ci(method="wilson")
    assert found.numbers == pytest.approx([right / items, expected.low, expected.high])


def test_wilsons_interval_holds_its_mean():
    for items in (1, 20, 25, 164):
        for right in range(items + 1):
            found = proportion(right, items)
            assert 0.0 <= found.low <= found.mean <= found.high <= 1.0


def test_wilsons_interval_needs_items():
    for right, items in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="successes of at least one item"):
            proportion(right, items)


def test_intervals_and_fractions() -> None:
    gains = np.full((3, 8), 0.5) + np.linspace(-0.1, 0.1, 8)
    found = interval(gains, draws=500)
    assert found.mean == pytest.approx(0.5)
    assert 0.4 < found.low < 0.5 < found.high < 0.6
    kept = fraction(gains * 0.25, gains, draws=500)
    assert kept is not None
    assert (kept.mean, kept.low, kept.high) == pytest.approx((0.25, 0.25, 0.25)), "numerator and denominator are paired"
    assert fraction(gains, gains - 0.5, draws=500) is None, "no fraction of nothing"


def test_ratios_are_those_of_a_plain_bootstrap() -> None:
    generator = np.random.default_rng(5)
    part, whole = generator.integers(1, 9, (30, 2)).astype(float), generator.integers(1, 9, (30, 2)).astype(float)
    found = ratios(part, whole, 2000)
    assert found[:, 0] == pytest.approx(part.sum(0) / whole.sum(0))
    expected = scipy.stats.bootstrap(
        (part[:, 0], whole[:, 0]), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        method="percentile", n_resamples=4000, rng=1,
    ).confidence_interval  # fmt: skip
    assert found[0, 1:] == pytest.approx([expected.low, expected.high], rel=0.03)
    assert ratios(part, 0 * whole, 10)[0, 0] == np.inf


def test_interval_is_students():
    values = [0.1, 0.4, 0.35, -0.2]
    found = student(values)
    low, high = scipy.stats.t.interval(0.95, 3, loc=sum(values) / 4, scale=scipy.stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((sum(values) / 4, low, high))
    assert f"{found:.3f}" == f"{found.mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    assert student([0.5]) == Interval(0.5, -math.inf, math.inf)
