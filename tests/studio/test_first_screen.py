"""The first screen without a model, as a newcomer clicks: what it is for, one leak, what is saved."""

import pytest

from attnflow.report.live.design import WELCOME
from tests.studio.browser import cell, legible, opened, settled
from tests.studio.test_prompt_screen import saved

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("starlette")
    pytest.importorskip("websockets")
    from tests.studio.server import serving

    with serving(design=WELCOME) as running:
        yield running


@pytest.fixture
def first(browser, server):
    with opened(browser, server) as page:
        yield page


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("phone", "dark")])
def test_it_says_what_it_is_for_and_shows_one_leak(browser, server, size, scheme):
    with opened(browser, server, size, color_scheme=scheme) as page:
        assert page.get_by_role("navigation").get_by_role("button").all_text_contents()[0] == "Mask"
        assert "two packed documents of six tokens" in page.locator(".purpose").text_content()
        assert page.locator("#answer .verdict").text_content().startswith("1 leak")
        assert page.locator("#answer .leaks button").get_attribute("aria-pressed") == "true", "its path is drawn"
        assert page.locator(".node.leak").count() == 2
        page.get_by_text("What these words mean").click()
        assert "until everything that can arrive has arrived" in page.locator(".words-help").text_content()
        legible(page, size, "slider", "combobox", "application")


def test_a_box_of_the_diagram_is_clicked_and_holds_its_row(first):
    box = first.locator(".node", has_text="tea")
    box.click()
    settled(first)
    first.mouse.move(2, 2)
    settled(first)
    assert "10 “tea”" in first.locator("#readout").text_content()
    assert "held" in first.locator("#readout").text_content()
    box.click()
    assert "held" not in first.locator("#readout").text_content()


def test_the_cell_of_a_leak_is_clicked_and_draws_its_path(first):
    leak = first.locator("#answer .leaks button")
    leak.click()
    assert leak.get_attribute("aria-pressed") == "false"
    first.mouse.click(*cell(first, 5, 6))
    settled(first)
    assert leak.get_attribute("aria-pressed") == "true"
    assert first.locator(".node.leak").count() == 2


def test_the_picture_the_diagram_and_the_whole_are_saved(first):
    centre, diagram = first.locator(".centre"), first.locator(".hasse")
    assert saved(first, centre.get_by_role("button", name="PNG"))[1].startswith(b"\x89PNG")
    assert b"<image" in saved(first, centre.get_by_role("button", name="SVG"))[1]
    content = saved(first, diagram.get_by_role("button", name="SVG"))[1]
    assert content.startswith(b"<svg")
    assert b"tea" in content
    assert saved(first, diagram.get_by_role("button", name="PNG"))[1].startswith(b"\x89PNG")
    name, content = saved(first, first.get_by_role("button", name="Save report"))
    assert name == "attnflow-mask.html"
    assert b"A design of the studio" in content
    assert content.lower().startswith(b"<!doctype html>")


def test_one_word_too_many_is_named_in_the_singular(first):
    first.get_by_text("One position, tokens").click()
    text = first.get_by_placeholder("the cat sat on the mat")
    text.fill(" ".join("abcdefghijklm"))
    text.press("Enter")
    settled(first)
    assert first.locator("footer p").first.text_content() == "1 word does not fit."
