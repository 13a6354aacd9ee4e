"""The screen of a prompt in a real browser, in the order in which a newcomer clicks."""

import csv
import io
import re

import pytest

from tests.models.saved import save_tiny, save_tiny_llama
from tests.studio.browser import SIZES, WAIT, legible, opened, settled

pytestmark = pytest.mark.slow

TEXT = "I the of and to in that his"  # words that the tiny model knows


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("starlette")
    pytest.importorskip("websockets")
    from tests.studio.server import serving

    with serving(model={"model": save_tiny_llama(tmp_path_factory.mktemp("tiny")), "bias": None}) as running:
        yield running


@pytest.fixture
def prompt(browser, server):
    with opened(browser, server) as page:
        answered(page)
        yield page


def answered(page):
    page.locator("svg.flow").first.wait_for(timeout=5 * WAIT)  # the first reading takes a process that imports all
    settled(page)


def write(page, text=TEXT):
    page.get_by_label("Prompt", exact=True).fill(text)
    settled(page)


def shown(page):
    """What is looked at: the prompt, the line, the view."""
    tab = page.get_by_role("tab", selected=True).text_content()
    return page.get_by_label("Prompt", exact=True).input_value(), page.locator(".looked h3").text_content(), tab


def amount(text):
    return float(text.replace("−", "-"))


def saved(page, button):
    with page.expect_download() as download:
        button.click()
    return download.value.suggested_filename, download.value.path().read_bytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_model_opens_with_a_prompt_that_is_answered_drawn_and_legible(browser, server, size, scheme):
    with opened(browser, server, size, color_scheme=scheme) as page:
        answered(page)
        assert page.get_by_role("navigation").get_by_role("button").all_text_contents()[0] == "Prompt"
        assert page.locator(".answer h2").text_content().startswith("Why does it say")
        assert page.locator(".card h3").count() == 5
        assert page.get_by_role("button", name="Explain", exact=True).count() == 0, "it is answered without being asked"
        legible(page, size, "textbox", "tab")


def test_typing_is_answered_when_the_hand_rests_and_the_line_asks_why(prompt):
    write(prompt)
    assert "8 tokens" in prompt.locator(".card", has_text="Who may send?").text_content()
    button = prompt.locator(".lines-table tbody button").nth(3)
    name = button.text_content()
    button.click()
    settled(prompt)
    assert prompt.locator(".looked h3").text_content().startswith(f"{name}:")
    assert f"Head {name} gives" in prompt.locator(".card", has_text="How strongly?").text_content()
    assert "directionality" in prompt.locator(".card", has_text="In which geometry?").text_content()
    rows = [amount(cell.text_content()) for cell in prompt.locator(".written tr td.n").all()]
    assert sum(rows[:-1]) == pytest.approx(rows[-1], abs=0.02), "the terms sum to the difference of the two scores"
    before = prompt.locator(".written tfoot").text_content()
    other = prompt.get_by_label("The other key")
    choices = other.locator("option").evaluate_all("all => all.map((one) => one.value)")
    other.select_option(next(value for value in choices if value != other.input_value()))
    settled(prompt)
    assert prompt.locator(".written tfoot").text_content() != before
    line = re.match(r"L(\d+)H(\d+)", name).groups()
    work = prompt.locator(".work")
    assert (work.get_by_label("layer").input_value(), work.get_by_label("head").input_value()) == line
    assert f"layer {line[0]} head {line[1]}" in prompt.locator(".view .verdict").text_content()


def test_a_line_is_taken_out_and_an_entry_with_it_and_both_are_put_back(prompt):
    write(prompt)
    prompt.get_by_role("button", name="Take it out").click()
    settled(prompt)
    assert prompt.locator(".looked .amounts dd").nth(2).text_content() != "–"
    assert "it loses" in prompt.locator(".removal").text_content()
    entry = prompt.locator(".entries-table tbody button").first
    entry.click()
    settled(prompt)
    assert "promotes" in prompt.locator(".card", has_text="From which store?").text_content()
    prompt.get_by_role("button", name="Take it out").click()
    settled(prompt)
    assert entry.text_content() in prompt.locator(".removal").text_content()
    assert ", " in prompt.locator(".removal").text_content()
    prompt.get_by_role("button", name="Put it back").click()
    settled(prompt)
    assert ", " not in prompt.locator(".removal").text_content()


def test_another_token_is_explained_and_compared_with_a_typed_one(prompt):
    write(prompt)
    second = prompt.locator(".likely button").nth(1)
    word = second.text_content().split()[0]
    second.click()
    settled(prompt)
    assert f"“{word}”" in prompt.locator(".answer h2").text_content()
    prompt.get_by_label("compared with").fill("the" if word != "the" else "of")
    settled(prompt)
    assert "above “" in prompt.locator(".answer h2").text_content()
    prompt.get_by_label("compared with").fill("no such token")
    settled(prompt)
    assert "expected one token" in prompt.locator(".pane > .trouble").text_content()
    prompt.get_by_label("compared with").fill("")
    settled(prompt)
    assert prompt.locator(".pane > .trouble").count() == 0
    prompt.locator(".token-cell").nth(4).click()
    settled(prompt)
    assert "after “to”" in prompt.locator(".answer h2").text_content()


def test_a_second_prompt_stands_beside_the_first_and_the_cards_follow_the_one_in_use(prompt):
    write(prompt)
    prompt.get_by_role("button", name="Compare with a second prompt").click()
    settled(prompt)
    prompt.get_by_label("Prompt 2").fill("to in that his to in that")
    settled(prompt)
    assert prompt.locator("svg.flow").count() == 2
    boxes = [box.bounding_box() for box in prompt.locator("svg.flow").all()]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert "7 tokens" in prompt.locator(".card", has_text="Who may send?").text_content()
    first, second = prompt.locator(".pane").all()
    heads = {line.get_attribute("data-line").split()[0] for line in second.locator(".line").all()}
    edge, head = next(
        (line, head)
        for line in first.locator(".line").all()
        if (head := line.get_attribute("data-line").split()[0]) in heads
    )
    edge.dispatch_event("pointerenter")
    lit = [line.get_attribute("data-line") for line in second.locator(".line.lit").all()]
    assert {name.split()[0] for name in lit} == {head}, "pointing at a line shows that head in the other picture"
    assert second.locator(".readout").text_content().startswith(f"{head}: ")
    first.locator(".token-cell").nth(4).hover()
    assert [cell.text_content() for cell in second.locator(".token-cell.marked > text").all()] == ["to"]
    assert second.locator(".line.lit").count()
    assert all("4" in line.get_attribute("data-line").split()[1:] for line in second.locator(".line.lit").all())
    prompt.mouse.move(2, 2)
    assert prompt.locator(".pane .lit").count() == 0
    prompt.get_by_label("Prompt 1").focus()
    settled(prompt)
    assert "8 tokens" in prompt.locator(".card", has_text="Who may send?").text_content()
    prompt.get_by_role("button", name="Close").click()
    assert prompt.locator("svg.flow").count() == 1


def test_after_a_change_of_head_the_old_key_is_not_sent_along(prompt):
    """The key that the new head looks at is explained; with no head typed, that of the telling one."""
    write(prompt)
    prompt.get_by_role("tab", name="Why").click()
    settled(prompt)
    work, keys = prompt.locator(".work"), prompt.locator(".view").get_by_role("group", name="Key")
    prompt.locator(".view").get_by_role("group", name="Key").get_by_role("button").nth(2).click()
    settled(prompt)
    now = int(work.get_by_label("head").input_value())
    for head in (number for number in range(4) if number != now):
        work.get_by_label("head").fill(str(head))
        work.get_by_role("button", name="Run").click()
        settled(prompt)
        shares = [
            float(re.search(r"([\d.]+) %", key.get_attribute("title"))[1]) for key in keys.get_by_role("button").all()
        ]
        pressed = [key.get_attribute("aria-pressed") for key in keys.get_by_role("button").all()]
        assert shares[pressed.index("true")] == max(shares)
    work.get_by_label("head").fill("")
    work.get_by_role("button", name="Run").click()
    settled(prompt)
    assert work.get_by_label("head").get_attribute("placeholder") == "the telling one"
    assert re.search(r"In layer \d head \d", prompt.locator(".view .verdict").text_content())


def test_a_reload_a_second_tab_and_back_lose_nothing(prompt, server):
    write(prompt)
    prompt.locator(".lines-table tbody button").nth(2).click()
    settled(prompt)
    prompt.get_by_role("tab", name="Trace").click()
    settled(prompt)
    prompt.wait_for_function("() => document.querySelector('.page').dataset.linked === 'true'")
    before = shown(prompt)
    prompt.reload()
    answered(prompt)
    assert shown(prompt) == before
    second = prompt.context.new_page()
    second.goto(prompt.url)
    answered(second)
    assert shown(second) == before
    second.close()
    prompt.get_by_role("button", name="Mask", exact=True).click()
    settled(prompt)
    prompt.get_by_role("radio", name="Look").wait_for()
    prompt.wait_for_function("() => document.querySelector('.page').dataset.linked === 'true'")
    prompt.go_back()
    answered(prompt)
    assert shown(prompt) == before


def test_figures_and_tables_are_saved(prompt):
    write(prompt)
    figure = prompt.locator(".flow-figure")
    name, content = saved(prompt, figure.get_by_role("button", name="SVG"))
    assert name.startswith("attnflow-flow")
    assert name.endswith(".svg")
    assert content.startswith(b"<svg")
    assert b"stroke-width" in content
    assert saved(prompt, figure.get_by_role("button", name="PNG"))[1].startswith(b"\x89PNG")
    name, content = saved(prompt, figure.get_by_role("button", name="CSV"))
    rows = list(csv.reader(io.StringIO(content.decode())))
    assert rows[0][:4] == ["what", "half", "layer", "head"]
    assert len({len(row) for row in rows}) == 1
    table = prompt.get_by_role("region", name="Lines")
    rows = list(csv.reader(io.StringIO(saved(prompt, table.get_by_role("button", name="CSV"))[1].decode())))
    assert rows[0] == ["head", "from → to", "carried", "effect"]
    assert all(amount(row[2]) for row in rows[1:])


def test_a_cell_of_a_head_is_clicked_and_pointing_links_the_panels(prompt):
    write(prompt)
    cells = prompt.locator(".weights rect:not(.chosen)")
    cells.nth(9).hover()
    assert "head" in cells.nth(9).locator("title").text_content()
    title = cells.nth(9).locator("title").text_content()
    assert f"H{title.split(',')[0].removeprefix('head ')}:" in prompt.locator(".flow-figure .readout").text_content()
    cells.nth(9).click()
    settled(prompt)
    assert f"H{title.split(',')[0].removeprefix('head ')}:" in prompt.locator(".looked h3").text_content()
    prompt.get_by_role("tab", name="Geometry").click()
    settled(prompt)
    prompt.locator(".picks rect:not(.chosen)").nth(1).click()
    settled(prompt)
    assert prompt.locator(".looked h3").text_content().startswith("L0H1:")


def test_the_whole_is_saved_as_a_report(prompt):
    write(prompt)
    name, content = saved(prompt, prompt.get_by_role("button", name="Save report"))
    assert name == "attnflow-prompt.html"
    assert content.lower().startswith(b"<!doctype html>")


def test_an_answer_that_takes_long_is_asked_for(browser, tmp_path):
    from tests.studio.server import serving

    model = {"model": save_tiny_llama(tmp_path), "bias": None, "slow": True}
    with serving(model=model) as server, opened(browser, server) as page:
        answered(page)
        explain = page.get_by_role("button", name="Explain", exact=True)
        assert explain.count() == 0, "the first answer comes unasked"
        write(page)
        assert "The prompt has changed since" in page.locator(".answer").text_content()
        explain.click()
        settled(page)
        assert "8 tokens" in page.locator(".card", has_text="Who may send?").text_content()
        assert "changed since" not in page.locator(".answer").text_content()
        assert explain.count() == 0


def test_an_encoder_decoder_shows_both_halves_and_goes_on_from_what_it_said(browser, tmp_path):
    from tests.studio.server import serving

    model = {"model": save_tiny(tmp_path, "T5", decoder_start_token_id=0), "bias": None}
    with serving(model=model) as server, opened(browser, server) as page:
        answered(page)
        write(page)
        cells = page.locator(".token-cell title")
        assert cells.filter(has_text="of the encoder").count() == 8
        assert cells.count() == 9
        page.get_by_label("the answer so far").fill("the of")
        settled(page)
        assert cells.count() == 11
        assert "after “of”" in page.locator(".answer h2").text_content()
        page.locator(".token-cell").nth(3).hover()
        assert page.locator(".token-cell.marked").count() == 1, "token 3 of the encoder, and not of the decoder"
        legible(page, "wide", "textbox", "tab")


def test_a_model_without_logits_says_so_and_nothing_waits(browser, tmp_path):
    from tests.studio.server import serving

    with serving(model={"model": save_tiny(tmp_path, "Bert"), "bias": None}) as server, opened(browser, server) as page:
        page.get_by_role("alert").filter(has_text="returns no logits").wait_for()
        assert "being explained" not in page.locator(".pane").text_content()


def test_an_answer_is_at_its_token_where_later_ones_are_read(browser, tmp_path):
    from transformers import BertForMaskedLM

    from tests.studio.server import serving

    folder = save_tiny(tmp_path, "Bert")
    BertForMaskedLM.from_pretrained(folder).save_pretrained(folder)
    with serving(model={"model": folder, "bias": None}) as server, opened(browser, server) as page:
        answered(page)
        write(page)
        assert "after “his”" in page.locator(".answer h2").text_content()
        page.locator(".token-cell").nth(2).click()
        settled(page)
        assert page.locator(".answer h2").text_content().split("”?")[1].startswith(" at “of”, logit ")
        assert page.locator(".entries-table tbody tr td").first.text_content() == "of (2)", "no tokens are promoted"
