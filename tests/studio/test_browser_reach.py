"""The first screen for everyone: by keys alone, in light and dark, on a wide screen and a phone, and without motion."""

import pytest

from attnflow import masks
from tests.studio.browser import CONTRAST, SIZES, cell, ink, mask_of, nameless, opened, settled

pytestmark = pytest.mark.slow

PLACES = """
() => [...document.querySelectorAll(
    'header, header *, main > *, .centre > *, canvas, .reading > *, .hasse, .order, .answers, .tabs, footer')]
  .map((e) => { const b = e.getBoundingClientRect(); return [e.className || e.tagName, b.x, b.y, b.width, b.height]; })
"""


def tab_to(page, here):
    """Walk by the Tab key until an element of the page has the focus."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.matches({here!r})"):
            return
    pytest.fail(f"{here} is not reached by Tab")


def test_everything_by_keys_alone(page):
    tab_to(page, "canvas")
    page.keyboard.press("a")
    assert page.locator("input[value=allow]").is_checked()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    settled(page)
    assert mask_of(page) == masks.sliding_window(16, 4) | masks.from_edges([(1, 3)], 16)
    for key in ("f", "Home", " "):
        page.keyboard.press(key)
    settled(page)
    assert not mask_of(page).allows(1, 0)
    page.keyboard.press("Control+z")
    settled(page)
    assert mask_of(page).allows(1, 0)
    page.keyboard.press("v")
    page.keyboard.press("End")
    page.get_by_text("1 ← 15").wait_for()
    page.keyboard.press("+")
    page.locator(".page[data-span='8']").wait_for()
    page.keyboard.press("0")
    page.locator(".page[data-span='16']").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Point at a row").wait_for()


def test_the_focus_is_seen_wherever_it_goes(page):
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        here = page.evaluate(
            "() => { const e = document.activeElement; const span = e.closest('label.file, .segments label');"
            " const style = getComputedStyle(span?.querySelector('span') ?? e); return [e.outerHTML.slice(0, 60),"
            " style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0, e.tagName] }"
        )
        if here[2] == "BODY":
            break
        assert here[1], here[0]
        seen.add(here[0])
    assert len(seen) > 20


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_and_named_at_every_size_in_light_and_dark(browser, studio, size, scheme):
    with opened(browser, studio, size, color_scheme=scheme) as page:
        page.get_by_role("button", name="Own token").click()
        page.get_by_label("Compare with", exact=True).select_option("causal")
        page.get_by_text("One position, tokens").click()
        for tab in ("Leaks", "Cost", "Code"):
            page.get_by_role("tab", name=tab).click()
            settled(page)
            assert nameless(page, "slider", "combobox", "application") == []
            assert page.evaluate(CONTRAST) == []
            assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        if size == "wide":
            assert page.evaluate("document.documentElement.scrollHeight") <= SIZES[size][1]
        assert page.locator("canvas").bounding_box()["width"] > 300
        before = ink(page)
        page.get_by_role("button", name="Theme").click()
        settled(page)
        assert ink(page) != before
        page.wait_for_timeout(200)  # colours fade over
        assert page.evaluate(CONTRAST) == []


def test_on_a_phone_a_finger_paints_and_else_scrolls(browser, studio):
    with opened(browser, studio, "phone", has_touch=True, is_mobile=True) as page:
        assert page.evaluate("getComputedStyle(document.querySelector('canvas')).touchAction") == "pan-y"
        page.get_by_role("radio", name="Allow").check()
        page.locator("canvas").scroll_into_view_if_needed()
        page.touchscreen.tap(*cell(page, 2, 9))
        settled(page)
        assert mask_of(page).allows(2, 9)
        assert page.evaluate("getComputedStyle(document.querySelector('canvas')).touchAction") == "none"
