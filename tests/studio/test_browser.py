"""The first screen in a real browser: everything that is designed on it, by pointer, and what follows from it."""

import json

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


def test_parameters_of_a_mask(page):
    choose(page, "prefix_lm")
    assert mask_of(page) == masks.prefix_lm(16, 6)
    page.get_by_label("prefix", exact=True).fill("3")
    settled(page)
    assert mask_of(page) == masks.prefix_lm(16, 3)
    page.get_by_label("n", exact=True).fill("20")
    settled(page)
    assert mask_of(page) == masks.prefix_lm(20, 3)
    assert page.locator(".subject").text_content() == "20 positions"
    choose(page, "sliding_window")
    page.get_by_label("causal", exact=True).uncheck()
    settled(page)
    assert mask_of(page) == masks.sliding_window(20, 4, causal=False)
    choose(page, "global_tokens")
    page.get_by_label("indices", exact=True).fill("1,5")
    page.get_by_label("indices", exact=True).press("Enter")
    settled(page)
    assert mask_of(page) == masks.global_tokens(20, [1, 5])


def test_a_value_that_the_mask_refuses_is_said_and_changes_nothing(page):
    before = ink(page)
    page.get_by_label("window", exact=True).fill("0")
    page.get_by_role("alert").filter(has_text="window must be at least 1").wait_for()
    settled(page)
    assert ink(page) == before
    assert layer_title(page).startswith("sliding_window(n=16, window=4")
    page.get_by_label("window", exact=True).fill("2")
    settled(page)
    assert page.get_by_role("alert").count() == 0
    assert mask_of(page) == masks.sliding_window(16, 2)


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


def test_one_label_a_masked_input_dead_positions_and_tokens(page):
    page.get_by_text("One position, tokens").click()
    page.get_by_label("position", exact=True).fill("3")
    page.get_by_label("token", exact=True).fill("3")
    page.get_by_role("button", name="Label on / off").click()
    settled(page)
    assert "1 leak" in page.locator("#answer").text_content()
    page.get_by_role("button", name="[MASK] there").click()
    settled(page)
    assert "No leak: proved for 1 label" in page.locator("#answer").text_content()
    assert "Dead, no label reads them: 4–15 (12)" in page.locator("#answer").text_content()
    page.get_by_label("text", exact=True).fill("the cat sat on the mat")
    page.get_by_label("text", exact=True).press("Enter")
    settled(page)
    assert design(page)["tokens"][1] == "cat"
    page.mouse.move(*cell(page, 1, 1))
    page.get_by_text("1 “cat” ← 1 “cat”: itself").wait_for()
    page.get_by_role("button", name="Label on / off").click()
    settled(page)
    assert "labels" not in design(page)


def test_the_difference_to_another_mask_and_to_a_file(page, tmp_path):
    page.get_by_label("Compare with", exact=True).select_option("causal")
    settled(page)
    missing = (masks.causal(16) & ~WINDOW).nnz
    assert f"0 more {missing} fewer" in page.locator(".compare .legend").text_content()
    same, fewer = colours(page, (9, 9), (9, 2))
    assert same != fewer
    page.get_by_label("Compare with", exact=True).select_option("")
    settled(page)
    assert "fewer" not in page.locator(".compare").text_content()
    file = tmp_path / "mask.json"
    file.write_text(masks.sliding_window(16, 3).to_json())
    page.get_by_label("Compare with a file").set_input_files(file)
    settled(page)
    assert "13 more 0 fewer" in page.locator(".compare .legend").text_content()
    assert design(page)["against"]["mask"]["parameters"]["window"] == 3


def test_files_are_read_by_the_page_and_sent_as_data(page, tmp_path):
    file = tmp_path / "mask.json"
    file.write_text(masks.tree([-1, 0, 0, 1]).to_json())
    page.get_by_label("Open").set_input_files(file)
    settled(page)
    assert mask_of(page) == masks.tree([-1, 0, 0, 1])
    for text, message in [("no JSON", "is not JSON"), ('{"name": "causall"}', "unknown"), ("[1]", "object")]:
        file.write_text(text)
        page.get_by_label("Open").set_input_files(file)
        page.get_by_role("alert").filter(has_text=message).wait_for()
    settled(page)
    assert mask_of(page) == masks.tree([-1, 0, 0, 1])


def test_cost_by_backend(page):
    page.get_by_role("tab", name="Cost").click()
    text = page.locator("#answer").text_content()
    assert "0.0 % of 1 block of 128 are skipped" in text
    assert "FlexAttention" in text
    page.get_by_label("n", exact=True).fill("1024")
    settled(page)
    page.get_by_text("of 64 blocks of 128 are skipped").wait_for()


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
    page.get_by_label("Code for", exact=True).select_option("vllm")
    page.locator("#answer .trouble", has_text="vllm cannot say").wait_for()
    assert page.locator("#answer").get_by_role("button").last.is_disabled()


def test_every_export_is_text_or_a_refusal_that_says_why(page):
    page.get_by_role("tab", name="Code").click()
    chosen = page.get_by_label("Code for", exact=True)
    names = chosen.locator("option").evaluate_all("all => all.map((each) => each.value)")
    assert {"attnflow", "flex", "flashmask", "varlen", "splash"} <= set(names)
    for name in names:
        chosen.select_option(name)
        settled(page)
        text, refusal = page.locator("#answer code"), page.locator("#answer .trouble")
        assert text.count() + refusal.count() == 1
        shown = (text if text.count() else refusal).text_content()
        assert shown.strip(), name
        if text.count() and name not in ("attnflow", "flex"):
            json.loads(shown)


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


def test_an_address_without_the_token_says_so(browser, studio):
    context = browser.new_context()
    page = context.new_page()
    page.goto(studio.origin + "/#token=wrong")
    page.get_by_role("alert").filter(has_text="lacks the studio's token").wait_for()
    context.close()


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
