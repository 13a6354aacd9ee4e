"""The first screen in a real browser: what is designed on it, by pointer, by keys and by touch, at every size.

Masks that no screen has a pixel for every pair of are drawn as tiles of blocks, and zoomed down to the pairs.
"""

import re

import pytest

from attnflow import masks
from tests.studio.browser import (
    CONTRAST,
    SIZES,
    cell,
    choose,
    colours,
    design,
    fact,
    ink,
    join,
    layer_title,
    legible,
    look,
    mask_of,
    opened,
    settled,
    use,
    watched,
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


def write(page, name, text):
    """Type a parameter of the mask."""
    page.get_by_label(name, exact=True).fill(text)
    page.keyboard.press("Tab")
    settled(page)


def test_every_mask_of_the_catalogue_can_be_used(page):
    names = page.get_by_label("Catalogue").locator("option").evaluate_all("all => all.map((each) => each.value)")
    assert len(names) == 17
    for name in names:
        use(page, name)
        assert mask_of(page).name == name
        assert page.get_by_role("alert").count() == 0
        assert page.locator(".relation").text_content().strip()


def test_the_first_mask_of_the_readme_is_drawn_by_clicks(page):
    for name, text in (("n", "12"), ("window", "3")):
        write(page, name, text)
    choose(page, "document")
    assert page.get_by_label("lengths").input_value() == "6,6"
    join(page, "& and")
    assert mask_of(page) == masks.document([6, 6]) & masks.sliding_window(12, 3)
    assert fact(page, "Depth") == "3"


def test_choosing_a_mask_previews_it_and_changes_nothing(page):
    page.get_by_role("button", name="Next token").click()
    settled(page)
    before, undo, picture = design(page), page.get_by_role("button", name="Undo"), ink(page)
    undone = undo.is_disabled()
    for name in ("global_tokens", "butterfly", "longformer"):
        choose(page, name)
        assert design(page) == before
        assert undo.is_disabled() == undone
        assert ink(page) != picture
    write(page, "indices", "3")
    longformer = masks.longformer(16, 3, [3])
    legend = page.locator(".reading .legend").text_content()
    both, here, chosen = (WINDOW & longformer).nnz, (WINDOW & ~longformer).nnz, (longformer & ~WINDOW).nnz
    assert f"in both {both}" in legend
    assert f"only in the mask {here}" in legend
    assert f"only in longformer {chosen}" in legend
    hues = {pair: colours(page, pair)[0] for pair in ((5, 5), (9, 6), (3, 9), (2, 12))}
    assert len(set(hues.values())) == 4
    for pair, kind in (((8, 8), (5, 5)), ((15, 12), (9, 6)), ((9, 3), (3, 9)), ((0, 15), (2, 12))):
        assert colours(page, pair)[0] == hues[kind]
    page.keyboard.press("Escape")
    settled(page)
    assert design(page) == before
    assert ink(page) == picture
    assert page.get_by_label("window", exact=True).input_value() == "4"


@pytest.mark.parametrize("how", ["& and", "| or"])
def test_masks_are_joined_with_what_is_there(page, how):
    joined = {"& and": lambda a, b: a & b, "| or": lambda a, b: a | b}[how]
    assert page.get_by_role("button", name=how).is_disabled()  # with itself it would be the same
    choose(page, "global_tokens")
    join(page, how)
    expected = joined(WINDOW, masks.global_tokens(16, [0, 8]))
    assert mask_of(page) == expected
    assert page.get_by_label("Catalogue").input_value() == "global_tokens"
    choose(page, "sliding_window")  # another one of the same kind
    write(page, "window", "8")
    join(page, how)
    assert mask_of(page) == joined(expected, masks.sliding_window(16, 8))
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    settled(page)
    assert mask_of(page) == WINDOW
    assert page.get_by_label("Catalogue").input_value() == "sliding_window"


def test_and_or_not(page):
    use(page, "causal")
    join(page, "~ not")
    assert mask_of(page) == ~masks.causal(16)
    join(page, "| or")
    assert mask_of(page) == masks.full(16)
    join(page, "& and")
    assert mask_of(page) == masks.causal(16)


def test_what_is_typed_is_seen_at_once(page):
    write(page, "n", "24")
    assert mask_of(page) == masks.sliding_window(24, 4)
    choose(page, "causal")
    write(page, "n", "30")
    page.get_by_text("A preview with 30 positions").wait_for()
    assert page.get_by_role("button", name="& and").is_disabled()
    join(page, "Use")
    assert mask_of(page) == masks.causal(30)
    choose(page, "full")
    join(page, "& and")  # of a combination, no mask of the catalogue is the layer's own
    write(page, "n", "20")
    page.get_by_text("A preview with 20 positions").wait_for()
    assert mask_of(page).num_queries == 30


def test_a_mask_that_cannot_be_is_refused_where_it_is_typed(page):
    write(page, "n", "131072")
    use(page, "longformer")
    choose(page, "butterfly")  # of so many tokens it has too many positions: it begins with its example
    assert page.get_by_label("n", exact=True).input_value() == "6"
    assert page.locator("footer [role=alert]").count() == 0
    for name, text, error in (("n", "131072", "expected 1 to 131,072 positions"), ("n", "-3", "n must be")):
        write(page, name, text)
        page.locator(".choice.trouble").filter(has_text=error).wait_for()
        assert page.get_by_role("button", name="Use").is_disabled()
    write(page, "n", "5")
    join(page, "Use")
    assert mask_of(page) == masks.butterfly(5)
    for text in ("", "0", "7"):
        write(page, "n", text)
    assert mask_of(page) == masks.butterfly(7)


def test_blocks_begin_at_sizes_that_divide_the_length(page):
    for n, block in (("15", 1), ("48", 3), ("1024", 64)):
        use(page, "causal")
        write(page, "n", n)
        choose(page, "big_bird")
        assert page.locator(".choice.trouble").count() == 0
        assert page.get_by_label("block", exact=True).first.input_value() == str(block)


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
    use(page, "full")
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


def test_the_diagram_lights_what_a_held_row_has_read_under_a_mask_that_changes(page):
    page.mouse.click(*cell(page, 11, 9))
    settled(page)
    assert page.locator(".node.lit").count() == 12
    page.get_by_role("radio", name="Allow").check()
    page.mouse.click(*cell(page, 2, 9))
    settled(page)
    assert page.locator(".node").count() == 9, "2 to 9 read each other now, and are one box"
    assert page.locator(".node.lit").count() == 5


def test_the_slider_goes_to_the_depth(page):
    write(page, "n", "16384")
    page.get_by_label("Layers", exact=True).and_(page.locator("[max='5461']")).wait_for()
    assert page.locator(".slider output").text_content() == "5\u202f461 / 5\u202f461"
    page.mouse.move(*cell(page, 16000, 2000))
    page.get_by_text(re.compile("in 4\u202f6[0-9]{2} layers")).wait_for()  # 14,000 positions back, three in a layer
    page.get_by_label("Layers", exact=True).fill("4000")
    page.get_by_text("after 4\u202f000 layers 16").wait_for()


def test_the_diagram_follows_the_mask(page):
    use(page, "full")
    assert page.locator(".node").count() == 1
    page.get_by_label("n", exact=True).fill("600")
    use(page, "sliding_window")
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
    use(page, "longformer")
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


def test_a_link_of_an_earlier_run_brings_its_design_and_nothing_of_this_run(browser, tmp_path):
    from tests.studio.server import serving

    with serving() as first, opened(browser, first) as page:
        use(page, "longformer")
        made, link, port = design(page), page.url, first.port
    with (
        serving(port=port, design={"name": "full", "parameters": {"n": 3}}) as second,
        watched(browser, second.origin) as page,
    ):
        for address in (link, link.replace(first.token, "")):
            page.goto("about:blank")
            page.goto(address)
            settled(page)
            assert design(page) == made
            page.get_by_text("This link is from an earlier run").wait_for()
            page.get_by_role("button", name="Undo").click()
            settled(page)
            assert mask_of(page) == masks.causal(8)
            page.get_by_role("button", name="Prompt", exact=True).click()
            page.get_by_text("opens its design alone").wait_for()
    with serving(port=port) as third, watched(browser, third.origin, quiet=False) as page:
        page.goto(link.partition("&design")[0])
        page.get_by_text("Open the address that `attnflow studio` printed").wait_for()


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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_and_named_at_every_size_in_light_and_dark(browser, studio, size, scheme):
    with opened(browser, studio, size, color_scheme=scheme) as page:
        page.get_by_role("button", name="Own token").click()
        page.get_by_text("One position, tokens").click()
        for tab in ("Leaks", "Blocks", "Code"):
            page.get_by_role("tab", name=tab).click()
            settled(page)
            legible(page, size, "slider", "combobox", "application")
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
