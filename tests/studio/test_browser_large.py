"""Masks that no screen has a pixel for every pair of: tiles by block, zoomed down to the pairs."""

import pytest

from attnflow import masks
from tests.studio.browser import cell, colours, fact, ink, mask_of, settled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("n", [16_384, 131_072])
def test_a_long_mask_is_drawn_from_tiles_zoomed_and_painted(page, n):
    page.get_by_label("n", exact=True).fill(str(n))
    settled(page)
    page.get_by_label("window", exact=True).fill(str(n // 4))
    settled(page)
    assert page.locator(".subject").text_content().replace("\u202f", "") == f"{n} positions"
    assert fact(page, "Classes").replace("\u202f", "") == str(n)
    inside, before, behind = colours(page, (n // 2, 3 * n // 8), (n // 2, n // 8), (n // 2, 3 * n // 4))
    assert inside != before == behind
    whole = ink(page)
    page.get_by_role("radio", name="Forbid").check()
    page.get_by_label("block", exact=True).fill(str(n // 8))
    page.mouse.click(*cell(page, n // 2 + 5, 3 * n // 8 + 5))
    settled(page)
    start = n // 8
    rows, keys = slice(4 * start, 5 * start), slice(3 * start, 4 * start)
    painted = mask_of(page)
    assert painted[rows, keys].nnz == 0
    assert painted.nnz == masks.sliding_window(n, n // 4).nnz - masks.sliding_window(n, n // 4)[rows, keys].nnz
    page.keyboard.press("Escape")
    page.mouse.move(2, 2)
    settled(page)
    assert colours(page, (9 * n // 16, 7 * n // 16)) == [behind]
    assert ink(page) != whole
    page.get_by_role("button", name="Undo").click()
    settled(page)
    page.get_by_role("radio", name="Look").check()
    page.mouse.move(*cell(page, n // 2, n // 2))
    page.locator("canvas").focus()
    while int(page.locator(".page").get_attribute("data-span")) > 8:
        page.keyboard.press("+")
    settled(page)
    here = page.locator("#readout").text_content()
    assert "itself" in here or "in one layer" in here or "never" in here
    page.get_by_role("button", name="Whole").click()
    page.locator(f".page[data-span='{n}']").wait_for()
    settled(page)
