"""The screen of families in a real browser: what is picked, what is stepped through, what leaks when it is let."""

import pytest

from attnflow.tasks.derivation import named_families
from tests.studio.browser import SIZES, legible, opened, settled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opened_once(browser, studio):
    with opened(browser, studio) as page:
        yield page


@pytest.fixture
def families(opened_once):
    """The screen with the butterfly on eight words, whatever a test before has done to it."""
    page = shown(opened_once)
    page.mouse.move(2, 2)
    write(page, "the cat sat on the mat and slept")
    choose(page, "causal_lm")
    choose(page, "butterfly")
    page.get_by_role("slider", name="Node of the proof").fill("14")
    return page


def shown(page):
    """The page once it shows a family."""
    page.get_by_role("button", name="Families").click()
    page.locator(".score").wait_for()
    settled(page)
    return page


def choose(page, name):
    page.get_by_role("combobox", name="family").select_option(name)
    settled(page)


def write(page, text):
    page.get_by_role("textbox", name="Text").fill(text)
    page.wait_for_timeout(200)  # what is typed is asked when the hand rests
    settled(page)


def verdict(page):
    return page.locator(".proof .verdict").text_content()


def row(page, number):
    """The words of a subtask, and which of them are marked."""
    cells = page.locator(".score tbody").nth(1).locator("tr").nth(number).locator(".cell")
    return cells.evaluate_all("all => all.map((each) => [each.firstChild.textContent, each.className.split(' ')[2]])")


def test_a_family_is_shown_with_its_subtasks_and_its_merged_task(families):
    assert families.locator(".score tbody").nth(1).locator("tr").count() == 8
    assert families.locator(".merged .cell").count() == 22
    assert "proved for 8 labels" in verdict(families)
    assert "22 positions in 22 nodes: the least possible" in families.locator(".lines").first.text_content()
    assert families.locator(".node").count() == 22


def test_every_family_of_the_library(families):
    names = families.get_by_role("combobox", name="family").locator("option").all_text_contents()
    assert len(names) == len(named_families())
    for name in names:
        choose(families, name.replace(" ", "_"))
        assert verdict(families).startswith("No leak")
        assert families.get_by_role("alert").filter(has_text="expected").count() == 0


def test_the_proof_is_stepped_through_and_marks_the_same_node_in_every_subtask(families):
    choose(families, "causal_lm")
    write(families, "one two three four")
    assert row(families, 0) == [["one", "now"]]
    families.get_by_role("button", name="Node after").click()
    assert row(families, 0) == [["one", ""]]
    assert row(families, 1) == [["one", "read"], ["two", "now"]]
    assert row(families, 2) == [["one", "read"], ["two", "now"], ["three", ""]]
    proof = families.locator(".proof")
    assert "task 1 · 1, task 2 · 1" in proof.text_content()
    assert "Must predict token 2 “three”. It does not flow in" in proof.text_content()
    assert proof.get_by_role("img").get_attribute("aria-label") == "Tokens that flow in: one, two"
    assert families.get_by_role("button", name="Node after").is_enabled()
    families.get_by_role("slider", name="Node of the proof").press("End")
    assert families.get_by_role("button", name="Node after").is_disabled()


def test_a_pair_that_is_added_leaks_and_shows_its_way(families):
    families.get_by_role("spinbutton", name="position").fill("2")
    families.get_by_role("spinbutton", name="reads").fill("9")
    families.get_by_role("button", name="Let it").click()
    settled(families)
    assert verdict(families).startswith("5 leaks")
    assert "Layer 1: 9 -> 2, layer 2: 2 -> 17" in families.locator(".conclusion").text_content()
    assert families.locator(".merged .cell.leak").count() == 3
    families.get_by_role("button", name="Forbid 2 to read 9 again").click()
    settled(families)
    assert verdict(families).startswith("No leak")
    assert families.locator(".cell.leak").count() == 0


def test_the_merged_task_is_opened_as_a_mask_and_the_family_is_still_there(families):
    families.get_by_role("button", name="Open as a mask").click()
    families.locator(".layer").first.wait_for()
    settled(families)
    assert families.locator(".subject").text_content() == "22 positions"
    assert families.locator("#labels-title").text_content().endswith("8")
    families.get_by_role("button", name="Families").click()
    assert verdict(families).startswith("No leak")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_is_legible_and_everything_has_a_name(browser, studio, size, scheme):
    with opened(browser, studio, size, color_scheme=scheme) as page:
        shown(page)
        legible(page, size, "slider", "combobox", "textbox", "region")
        hidden = "box => [box.scrollWidth - box.clientWidth, box.scrollHeight - box.clientHeight]"
        assert page.locator(".fitted").evaluate(hidden) == [0, 0], "the whole Hasse diagram is seen"
