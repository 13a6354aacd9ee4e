"""The first screen in a real browser: everything that is designed on it, by pointer, and what follows from it."""

import pytest

from attnflow import masks
from tests.studio.browser import (
    cell,
    choose,
    colours,
    design,
    fact,
    ink,
    layer_title,
    look,
    mask_of,
    opened,
    settled,
)

pytestmark = pytest.mark.slow

WINDOW = masks.sliding_window(16, 4)


def test_it_shows_the_mask_it_was_opened_with(page):
    assert layer_title(page).startswith("sliding_window(n=16")
    assert (fact(page, "Depth"), fact(page, "Classes"), fact(page, "Covers")) == ("5", "16", "15")
    assert page.locator(".node").count() == 16
    assert page.title().startswith("sliding_window")
    pairs = [(q, k) for q in range(16) for k in range(16)]
    allowed, forbidden = colours(page, (5, 5), (5, 6))
    assert colours(page, *pairs) == [allowed if WINDOW.allows(*pair) else forbidden for pair in pairs]


def test_every_mask_of_the_catalogue_can_be_chosen(page):
    names = page.get_by_label("Catalogue").locator("option").evaluate_all("all => all.map((each) => each.value)")
    assert len(names) == 17
    for name in names:
        choose(page, name)
        assert mask_of(page).name == name
        assert page.get_by_role("alert").count() == 0
        assert page.locator(".relation").text_content().strip()


def test_and_or_not(page):
    choose(page, "causal")
    page.get_by_role("button", name="~ not").click()
    settled(page)
    assert mask_of(page) == ~masks.causal(16)
    page.get_by_role("button", name="| or").click()
    settled(page)
    assert mask_of(page) == masks.full(16)
    page.get_by_role("button", name="& and").click()
    settled(page)
    assert mask_of(page) == masks.causal(16)


def test_painting_pairs_and_blocks_and_undoing(page):
    page.get_by_role("radio", name="Allow").check()
    page.mouse.click(*cell(page, 2, 9))
    settled(page)
    expected = WINDOW | masks.from_edges([(2, 9)], 16)
    assert mask_of(page) == expected
    page.get_by_role("radio", name="Forbid").check()
    page.get_by_label("block", exact=True).fill("4")
    page.mouse.move(*cell(page, 5, 5))
    page.mouse.down()
    page.mouse.move(*cell(page, 6, 9), steps=4)
    page.mouse.up()
    settled(page)
    rectangle = masks.from_edges([(q, k) for q in range(4, 8) for k in range(4, 12)], 16)
    assert mask_of(page) == expected & ~rectangle
    page.get_by_role("button", name="Undo").click()
    settled(page)
    assert mask_of(page) == expected
    page.keyboard.press("Control+z")
    settled(page)
    assert mask_of(page) == WINDOW
    assert page.get_by_role("button", name="Undo").is_disabled()
    page.keyboard.press("Control+Shift+z")
    settled(page)
    assert mask_of(page) == expected
    page.get_by_role("button", name="Redo").click()
    settled(page)
    assert mask_of(page) == expected & ~rectangle


def test_a_stack_of_layers(page):
    page.get_by_role("button", name="Add a layer").click()
    settled(page)
    page.locator(".layer").nth(1).click()
    choose(page, "full")
    assert (mask_of(page, 0), mask_of(page, 1)) == (WINDOW, masks.full(16))
    assert "of 2 layers" in page.locator(".facts").text_content()
    page.get_by_role("button", name="Remove layer 1").click()
    settled(page)
    assert mask_of(page) == masks.full(16)
    assert "one mask for all" in page.locator(".aside").first.text_content()


def test_the_slider_lights_the_receptive_field_of_the_row_under_the_pointer(page):
    page.mouse.move(*cell(page, 11, 9))
    page.get_by_text("11 ← 9: in one layer").wait_for()
    page.get_by_text("after 5 layers 11 has read 12 of 16").wait_for()
    settled(page)
    everything = ink(page)
    page.get_by_label("Layers", exact=True).fill("1")
    page.get_by_text("after 1 layer 11 has read 4 of 16").wait_for()
    settled(page)
    assert page.locator(".node.lit").count() == 4
    assert ink(page) != everything
    page.mouse.move(*cell(page, 11, 2))
    page.get_by_text("11 ← 2: in 3 layers").wait_for()
    page.mouse.move(*cell(page, 3, 12))
    page.get_by_text("3 ← 12: never").wait_for()
    page.mouse.click(*cell(page, 3, 12))
    page.mouse.move(2, 2)
    page.get_by_text("held").wait_for()
    assert "3 ← 12: never" in page.locator("#readout").text_content()


def test_the_diagram_follows_the_mask(page):
    choose(page, "full")
    assert page.locator(".node").count() == 1
    page.get_by_label("n", exact=True).fill("600")
    choose(page, "sliding_window")
    assert "Summarised" in page.locator("figcaption").text_content()
    assert 0 < page.locator(".node").count() <= 60


def test_labels_their_leaks_and_the_witness_in_both_views(page):
    page.get_by_text("No labels yet").wait_for()
    page.get_by_role("button", name="Next token").click()
    settled(page)
    page.get_by_text("No leak: proved for 15 labels").wait_for()
    page.get_by_role("radio", name="Allow").check()
    page.mouse.click(*cell(page, 2, 9))
    look(page)
    settled(page)
    assert page.locator(".count").text_content() == page.locator(".verdict").text_content().split()[0]
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("button", name="None").click()
    page.get_by_text("One position, tokens").click()
    page.get_by_label("position", exact=True).fill("9")
    page.get_by_label("token", exact=True).fill("1")
    page.get_by_role("button", name="Label on / off").click()
    settled(page)
    first = page.locator("#answer .leaks button").first
    before = ink(page)
    first.click()
    settled(page)
    assert first.get_attribute("aria-pressed") == "true"
    assert "layer 1: 1 → 3, layer 2: 3 → 6, layer 3: 6 → 9" in first.text_content()
    assert page.locator(".node.leak").count() == 4
    assert ink(page) != before
    first.click()
    settled(page)
    assert ink(page) == before


def test_code_to_copy(page):
    page.get_by_role("tab", name="Code").click()
    page.get_by_text("import attnflow as af").wait_for()
    copy = page.locator("#answer").get_by_role("button", name="Copy")
    copy.click()
    page.get_by_text("Copied").wait_for()
    names: dict[str, object] = {}
    exec(page.evaluate("navigator.clipboard.readText()"), names)
    assert names["mask"] == WINDOW
    page.get_by_label("Code for", exact=True).select_option("flex")
    page.get_by_text("attend(query, key, value").wait_for()


def test_the_address_holds_the_design(page, studio):
    choose(page, "longformer")
    page.get_by_role("button", name="Next token").click()
    settled(page)
    expected = design(page)
    page.reload()
    settled(page)
    assert design(page) == expected
    assert studio.token in page.url
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_a_studio_that_has_ended_says_how_to_start_it(browser):
    from tests.studio.server import serving

    with serving() as short, opened(browser, short, quiet=False) as page:
        short.process.terminate()
        page.get_by_role("alert").filter(has_text="Start it again with `attnflow studio`").wait_for()


def test_the_policy_of_the_page_holds_in_the_browser(browser, studio):
    """A script that got into the page could neither run as text nor send anything away."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(studio.address)
    refused = page.evaluate(
        "new Promise((resolve) => {"
        "document.addEventListener('securitypolicyviolation', (e) => resolve(e.violatedDirective));"
        "const s = document.createElement('script'); s.textContent = 'window.injected = 1'; document.body.append(s); })"
    )
    assert refused.startswith("script-src")
    assert page.evaluate("window.injected") is None
    assert page.evaluate("fetch('https://example.com').then(() => 'sent', () => 'refused')") == "refused"
    context.close()
