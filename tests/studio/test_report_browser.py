"""A report in a real browser: what can be pointed at where scripts run, and the pictures where none does."""

from contextlib import ExitStack

import pytest

import attnflow as af
from attnflow import masks
from attnflow.tasks import Label, Task, Token
from tests.report.test_page import REPORTS
from tests.studio.browser import watched


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page on a task that leaks, with another mask beside it."""
    tokens = [Token(i, i) for i in range(12)]
    task = Task(tokens, [Label(i, tokens[i + 1]) for i in range(11)], masks.sliding_window(12, 4, causal=False))
    path = tmp_path_factory.mktemp("report") / "page.html"
    return af.report.page(task, masks.full(5), labels=[f"word{i}" for i in range(12)]).save(path).as_uri()


@pytest.fixture
def opened(browser, report):
    """opened(**options): the report in a page of its own."""
    with ExitStack() as pages:

        def page(**options):
            shown = pages.enter_context(watched(browser, report, **options))
            shown.goto(report)
            return shown

        yield page


def ready(page):
    page.locator(".reader[data-settled=true]").wait_for()


def test_the_way_of_a_leak_is_drawn_and_code_is_there_to_copy(opened):
    page = opened()
    ready(page)
    before = page.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    page.locator(".leaks button").first.click()
    page.locator(".node.leak").wait_for()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.locator("canvas").evaluate("canvas => canvas.toDataURL()") != before
    page.get_by_role("tab", name="Code").click()
    assert "sliding_window(n=12, window=4" in page.locator("pre").text_content()
    assert page.locator("#answer option").all_text_contents() == ["attnflow", "FlexAttention"]


def test_nothing_can_be_changed(opened):
    page = opened()
    ready(page)
    assert page.locator(".reader").get_by_role("button", name="Undo").count() == 0
    assert page.locator(".reader input:not([type=range])").count() == 0
    page.locator("canvas").focus()
    page.keyboard.press("a")
    page.keyboard.press("Enter")
    page.keyboard.press("Control+z")
    assert page.locator(".trouble, footer").filter(has_text="report").count() == 0


def test_the_still_pictures_stand_where_no_script_runs_on_paper_and_for_other_masks(opened):
    still = opened(java_script_enabled=False)
    assert still.locator("#mask svg").first.is_visible()
    assert not still.locator("#mask canvas").count()
    page = opened()
    ready(page)
    assert not page.locator("#mask [data-attnflow-still]").is_visible()
    assert page.locator("#mask-2 svg").first.is_visible()
    page.emulate_media(media="print")
    assert page.locator("#mask [data-attnflow-still] svg").is_visible()
    assert not page.locator("canvas").is_visible()


CUT = """() => { const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const inside = (text, frame, slack) => { const [a, b] = [text, frame].map((each) => each.getBoundingClientRect());
      if (a.width && (a.left < b.left - slack || a.right > b.right + slack || a.top < b.top - slack
          || a.bottom > b.bottom + slack)) found.push(text.textContent); };
    for (const text of svg.querySelectorAll("text")) inside(text, svg, 1);
    for (const box of svg.querySelectorAll(".af-node"))
      for (const text of box.querySelectorAll("text")) inside(text, box.querySelector(".af-face"), 0);
  } return found; }"""


@pytest.mark.parametrize("name", ["everything", "big_bird", "butterfly"])
def test_no_text_is_cut_and_nothing_scrolls_sideways(browser, tmp_path, name):
    address = REPORTS[name]().save(tmp_path / "page.html").as_uri()
    for width in (405, 1280):
        with watched(browser, address, width) as page:
            page.goto(address)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(CUT) == []
