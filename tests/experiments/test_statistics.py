"""Intervals and tests of the experiments against scipy."""

import math

import numpy as np
import pytest
import scipy.stats

from experiments.runner.statistics import (
    Interval,
    detectable,
    interval,
    permutation_test,
    proportion,
    ratios,
    speed_up,
    student,
    welch,
)

VALUES = [0.31, 0.45, 0.12, 0.38, 0.51]
OTHERS = [0.22, 0.18, 0.35, 0.05, 0.15]


def test_the_interval_of_a_difference_is_welchs() -> None:
    mine = welch(VALUES, OTHERS[:4])
    theirs = scipy.stats.ttest_ind(VALUES, OTHERS[:4], equal_var=False).confidence_interval(0.95)
    assert mine.mean == pytest.approx(np.mean(VALUES) - np.mean(OTHERS[:4]))
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high))
    with pytest.raises(ValueError, match="at least 2 values of each sample, got 5 and 1"):
        welch(VALUES, OTHERS[:1])
    with pytest.raises(ValueError, match="two constants"):
        welch([1.0, 1.0], [2.0, 2.0])


def test_an_interval_of_three_seeds_covers_what_it_says() -> None:
    """A bootstrap of three values covers their mean in three of four samples; Student's t in 95 of 100."""
    samples = np.random.default_rng(3).normal(size=(4000, 3))
    found = [student(list(sample)) for sample in samples]
    covered = np.mean([one.low <= 0 <= one.high for one in found])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.05 * 0.95 / len(samples))


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


def test_intervals_are_over_seeds_or_over_the_items_of_one() -> None:
    table = np.random.default_rng(2).normal(size=(4, 30))
    assert interval(table) == student(table.mean(axis=1).tolist())
    assert interval(table[:1]) == student(table[0].tolist())


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
