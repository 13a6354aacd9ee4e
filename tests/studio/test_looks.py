"""What pictures look like, measured: one colour for one thing, axes with names, edges that tell that more is hidden."""

import re

import pytest

from attnflow.report import charts
from tests.studio.browser import FADES, SIZES, cell, choose, colours, opened, place, settled

pytestmark = pytest.mark.slow


def swatches(page):
    """What the legend of the matrix says of each colour."""
    said = """all => all.map((each) => {
      const text = each.nextSibling.data + each.nextSibling.nextSibling.data;
      return [getComputedStyle(each).backgroundColor, text];
    })"""
    rows = page.locator(".reading .legend .swatch").evaluate_all(said)
    return {text.strip(): tuple(map(int, re.findall(r"[0-9]+", colour))) for colour, text in rows}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_colour_of_the_legend_means_one_thing_and_is_the_one_that_is_drawn(browser, studio, scheme):
    with opened(browser, studio, color_scheme=scheme) as page:
        page.mouse.click(*cell(page, 9, 9))
        page.mouse.move(2, 2)
        settled(page)
        shown = swatches(page)
        assert list(shown) == ["allowed", "read after 5 layers"]
        assert colours(page, (15, 13), (9, 9)) == list(shown.values())
        page.get_by_role("button", name="Own token").click()
        settled(page)
        page.locator("#answer .leaks button").first.click()
        settled(page)
        shown |= swatches(page)
        page.keyboard.press("Escape")
        choose(page, "global_tokens")
        shown |= swatches(page)
        assert len(shown) == 6
        both, here, chosen = (next(hue for text, hue in shown.items() if text.startswith(word))
                              for word in ("in both", "only in the mask", "only in global tokens"))  # fmt: skip
        assert colours(page, (8, 8), (15, 13), (15, 0)) == [both, here, chosen]
        assert both == shown["allowed"]
        assert len(set(shown.values())) == 5
        signs = page.evaluate(
            "['--for', '--against'].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name))"
        )
        assert not set(signs) & {"#{:02x}{:02x}{:02x}".format(*hue) for hue in shown.values()}
        if scheme == "light":
            assert signs == [charts.POSITIVE, charts.NEGATIVE], "as in all figures"


# Where each text of a canvas is written: {text: [left, top, right, bottom]} on the canvas.
_WRITTEN = """
() => {
  const write = CanvasRenderingContext2D.prototype.fillText;
  window.written = {};
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const size = this.measureText(text), at = this.getTransform(), ratio = devicePixelRatio;
    const corners = [[-size.actualBoundingBoxLeft, -size.actualBoundingBoxAscent],
      [size.actualBoundingBoxRight, size.actualBoundingBoxDescent]];
    const placed = corners.map(([right, down]) => at.transformPoint(new DOMPoint(x + right, y + down)));
    const sides = ['x', 'y'].map((name) => placed.map((corner) => corner[name] / ratio).sort((a, b) => a - b));
    (window.written[text] ??= []).push([sides[0][0], sides[1][0], sides[0][1], sides[1][1]]);
    write.call(this, text, x, y);
  };
}
"""


@pytest.mark.parametrize("size", SIZES)
def test_the_axes_of_the_matrix_are_named_where_they_begin(browser, studio, size):
    with opened(browser, studio, size) as page:
        page.evaluate(_WRITTEN)
        page.get_by_role("button", name="Theme").click()  # which draws it again
        page.wait_for_function("() => '15' in window.written")
        written, side = page.evaluate("window.written"), page.locator("canvas").bounding_box()["width"]
        left, top, *_ = place(page, 0, 0)
        [key], [query] = written["key →"], written["← query"]
        assert key[1] >= 0
        assert key[3] < top
        assert key[0] == pytest.approx(left, abs=20)
        assert query[0] >= 0
        assert query[2] < left
        assert query[1] == pytest.approx(top, abs=20)
        boxes = [box for text in written for box in written[text]]
        assert len(boxes) > 20
        assert all(box[0] >= 0 and box[1] >= 0 and max(box[2:]) <= side for box in boxes)
        for name in (key, query):
            assert not [
                box
                for box in boxes
                if box is not name and all(name[i] < box[i + 2] and box[i] < name[i + 2] for i in (0, 1))
            ]


def test_axes_take_room_for_tokens_only_where_they_are_written(browser, studio):
    with opened(browser, studio, "phone") as page:
        page.get_by_text("One position, tokens").click()
        page.get_by_label("text", exact=True).fill("the cat sat on the mat")
        page.keyboard.press("Tab")
        settled(page)
        assert place(page, 0, 0)[1] > 80, "cells of 16 positions are wide enough for words"
        page.get_by_label("n", exact=True).fill("32")
        page.keyboard.press("Tab")
        settled(page)
        assert place(page, 0, 0)[1] < 60


def test_what_scrolls_fades_where_it_hides_something(browser, studio):
    with opened(browser, studio, "phone") as page:
        page.get_by_role("button", name="Own token").click()
        page.get_by_role("button", name="Families", exact=True).click()
        page.locator(".score .cell").first.wait_for()
        settled(page)
        seen = page.evaluate(FADES)
        hides, fades, _ = seen["Subtasks and the merged task"]
        assert hides[1], "the table is wider than a phone"
        page.locator(".score").evaluate("table => table.scrollLeft = 1e6")
        settled(page)  # timelines of scrolling move with the next frame
        after = page.evaluate(FADES)
        assert not after["Subtasks and the merged task"][0][1]
        page.get_by_role("button", name="Mask", exact=True).click()
        settled(page)
        answers = page.evaluate(FADES)
        page.locator("#answer").evaluate("answer => answer.scrollTop = 1e6")
        settled(page)
        for here in (seen, after, answers, page.evaluate(FADES)):
            for name, (hides, fades, is_masked) in here.items():
                if name == "Subtasks and the merged task":
                    hides[0] = hides[2] = False  # its heads stay
                assert (name, fades, is_masked) == (name, hides, True)
        page.locator("#answer .leaks button").first.evaluate("button => button.focus({focusVisible: true})")
        assert page.locator("#answer").evaluate("answer => getComputedStyle(answer).maskImage") == "none"
