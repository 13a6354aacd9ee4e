"""A report in a real browser: no text is cut."""

import pytest

from tests.report.test_page import REPORTS
from tests.studio.browser import watched

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
