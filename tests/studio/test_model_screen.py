"""The screen of the model in a real browser: what is asked, what is drawn, where a leak starts."""

import re

import pytest

import attnflow as af
from tests.models.saved import save_tiny_llama
from tests.studio.browser import WAIT, legible, opened, settled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["with a leak", "plain"])
def server(request, tmp_path_factory):
    """A studio of a model with a bias, an MLP of which reads the token after its own; and one of the plain model."""
    pytest.importorskip("starlette")
    pytest.importorskip("websockets")
    from tests.studio.server import serving

    folder, bias = save_tiny_llama(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("bias")
    subject = {"model": folder, "bias": None}
    if request.param != "plain":
        loaded = af.load_model(folder)
        af.bias.attach(loaded, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming", layers=[0, 1]))
        af.bias.save(loaded, bias)
        subject = {"model": folder, "bias": str(bias), "leaks": True}
    with serving(model=subject) as running:
        yield running, VIEWS[request.param]


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("phone", "dark")])
def test_every_view_is_run_drawn_and_legible(browser, server, size, scheme):
    running, views = server
    with opened(browser, running, size, color_scheme=scheme) as page:
        read(page)
        about = page.locator(".panel").last.text_content()
        assert "LlamaForCausalLM" in about
        assert "4 query, 2 key" in about
        page.get_by_label("Prompt", exact=True).fill("I the of and to in that his the of to I")  # words that it knows
        settled(page)
        for view, is_drawn in views.items():
            page.get_by_role("tab", name=view).click()
            run(page)
            is_drawn(page)
            legible(page, size, "tab", "textbox", "tabpanel")


def read(page):
    """Wait until the model has been read and has answered, or has said why it cannot be explained."""
    answer = page.locator(".flow, .pane > .trouble").first
    answer.wait_for(timeout=5 * WAIT)  # it takes a process that imports everything
    settled(page)


def run(page):
    """Ask the view that is open, unless it has answered by itself."""
    settled(page)
    button = page.locator(".work").get_by_role("button", name="Run")
    if button.count() and button.is_enabled():
        button.click()
    settled(page)


def audit(page):
    assert "model.layers.1.mlp, layer 1" in page.locator(".view .verdict").text_content()
    assert page.locator(".module.first").get_attribute("title") == "mlp: breaks the order"
    assert page.locator(".violations tbody tr").count() == 1
    assert page.get_by_role("tab", name="Audit").text_content() == "Audit1"
    assert "Forbidden pairs tested" in page.locator(".view .lines").text_content()


def refused(page, field, value, sentence):
    """A value is typed, and the page says in one sentence what is wrong, beside what it shows."""
    page.locator(".work").get_by_label(field).fill(value)
    run(page)
    assert sentence in page.locator(".view > .trouble").text_content()
    assert page.locator(".view > .trouble").count() == 1
    assert page.locator(".view .numbers tbody tr").count() > 0


def fills(page, kind):
    return page.locator(f".heat rect.{kind}").first.evaluate("rect => getComputedStyle(rect).fill")


def geometry(page):
    assert page.locator(".point").count() == 2
    assert page.locator(".heat rect:not(.chosen)").count() == 2 * 8
    if page.viewport_size["width"] < 1000:
        return  # where nothing hovers
    page.locator(".heat rect").first.hover()
    assert "layer 0, head 0" in page.locator(".heat .readout").first.text_content()
    page.locator(".point circle").nth(1).hover()
    assert page.locator(".chart .readout").first.text_content().startswith("layer 1: symmetry")


def bias(page):
    assert page.locator(".view .numbers tbody tr").count() == 2
    page.locator(".view .numbers").get_by_role("button", name="1").click()
    page.get_by_text("Every query in layer 1").wait_for()
    assert page.locator(".heat rect.void").count() > 0


def trace(page):
    rows = page.locator(".view .numbers tbody").text_content()
    page.locator(".strip .token").first.click()
    page.wait_for_function("() => document.querySelector('.strip .token')?.ariaPressed === 'true'")
    assert page.locator(".view .numbers tbody").text_content() != rows
    assert page.locator(".heat text.axis").all_text_contents() == ["token →", "layer →"]
    assert {fills(page, "plus"), fills(page, "minus")} in (BLUE_AND_ORANGE, BLUE_AND_ORANGE_ON_DARK)
    heads = page.locator(".fired thead th")
    assert heads.all_text_contents()[1:6] == ["layer", "number", "effect", "promotes here", "suppresses here"]
    for row in page.locator(".fired tbody tr").all():
        promoted, suppressed = (row.locator("td.words").nth(i).text_content().split() for i in (0, 1))
        assert promoted
        assert suppressed
        assert not set(promoted) & set(suppressed)
    ablated(page)
    page.get_by_label("map").select_option("active")
    page.locator(".heat figcaption", has_text="Share of active entries").wait_for()


def ablated(page):
    """What the logit loses stands beside the effect, for the strongest entries, at each token that is chosen."""
    fired, tokens = page.locator(".fired"), page.get_by_role("group", name="Token whose entries").get_by_role("button")
    page.get_by_role("switch", name="Take the 8 strongest out").click()
    for chosen in (0, 3):
        tokens.nth(chosen).click()
        settled(page)
        assert tokens.nth(chosen).get_attribute("aria-pressed") == "true"
        assert fired.locator("thead th").all_text_contents()[3:6] == ["effect", "ablated", "points lost"]
        rows = [row.locator("td.n").all_text_contents()[2:5] for row in fired.locator("tbody tr").all()]
        assert all(number(cell) is not None for row in rows[:8] for cell in row)
        assert [row[1:] for row in rows[8:]] == [["–", "–"]] * len(rows[8:])
        assert any(row[0] != row[1] for row in rows[:8]), "two questions, two answers"
        assert fired.locator("tbody tr").first.locator(".bar").count() == 2
    assert "later layers react" in page.locator(".view").text_content()
    page.get_by_role("switch", name="Take the 8 strongest out").click()
    page.get_by_text("An effect is a first-order estimate").wait_for()
    assert "ablated" not in fired.locator("thead").text_content()


def entry(page):
    """From a trace to an entry, to the one most like it, and to the next token without it."""
    view = page.locator(".view")
    page.get_by_role("tab", name="Trace").click()
    name = page.locator(".fired tbody button").first.text_content()
    page.locator(".fired tbody button").first.click()
    page.wait_for_function("() => document.querySelector('#model-entry').ariaSelected === 'true'")
    settled(page)
    layer, number_within = map(int, re.fullmatch(r"L(\d+)N(\d+)", name).groups())
    title = f"Entry {name} layer {layer} neuron {number_within} · id {48 * layer + number_within} · norm of its value"
    assert view.locator("h3").first.text_content().startswith(title)
    assert view.locator(".words tbody tr").count() == 16
    view.get_by_role("button", name="Look for it").click()
    view.locator(".passage").first.wait_for()
    assert "active at" in view.locator(".passages h3").text_content()
    assert view.get_by_role("group", name="Sonnet").count() + view.get_by_role("group", name="The text").count() > 1

    page.get_by_role("switch").click()
    page.locator(".without tbody tr").first.wait_for()
    shares = [page.locator(".without tbody td").nth(i).text_content() for i in range(3)]
    assert all(share.endswith(" %") for share in shares[:2])
    assert number(shares[2]) == pytest.approx(number(shares[1][:-2]) - number(shares[0][:-2]), abs=0.11)
    before = page.locator(".without tbody").text_content()
    view.get_by_role("group", name="Token after which").get_by_role("button").last.click()
    settled(page)
    page.locator(".without tbody tr").first.wait_for()
    assert page.locator(".without tbody").text_content() != before, "the switch stays on at another token"

    near = view.locator("figure", has_text="Nearest by key").locator("tbody button").first
    identity = near.text_content()
    near.click()
    settled(page)
    assert view.locator("h3").first.text_content().startswith(f"Entry {identity} ")
    refused(page, "entry", "999", "no entry 999: the 96 ids go from 0 to 95")
    refused(page, "entry", "one", "entry: expected an integer, got the text 'one'")
    page.locator(".work").get_by_label("entry").fill("3")
    refused(page, "layer", "1", "entry 3 belongs to layer 0, got layer=1: leave it out")
    page.locator(".work").get_by_label("layer").fill("")
    run(page)
    assert page.locator(".view > .trouble").count() == 0


def why(page):
    """A head, a query and a key by clicks, and the terms that add up to the score."""
    view, work = page.locator(".view"), page.locator(".work")
    work.get_by_label("layer").fill("1")
    run(page)
    query = view.get_by_role("group", name="Query").get_by_role("button").nth(5)
    query.press("Enter")
    settled(page)
    assert query.evaluate("(button) => button === document.activeElement")  # for the next key that is pressed
    ringed = "(button) => getComputedStyle(button).borderTopColor === getComputedStyle(button).color"
    page.wait_for_function(ringed, arg=query.element_handle())  # after the transition
    page.locator(".work").get_by_label("layer").fill("77")
    view.locator(".picks rect:not(.chosen)").nth(2 * count(view, "Key") + 3).click(force=True)
    settled(page)
    verdict = view.locator(".verdict").text_content()
    assert verdict.startswith("In layer 1 head 2, “")
    assert work.get_by_label("layer").input_value() == "1"
    assert work.get_by_label("head").input_value() == "2"
    view.get_by_role("group", name="Key").get_by_role("button").nth(1).click()
    settled(page)
    assert view.locator(".verdict").text_content() != verdict
    raw = [number(cell.text_content()) for cell in view.locator(".terms tr td:last-child").all()]
    assert sum(raw[:-1]) == pytest.approx(raw[-1], abs=0.02)
    refused(page, "head", "99", "layer 1 has heads 0 to 3, got head 99")
    refused(page, "layer", "7", "layer")


def count(view, group):
    return view.get_by_role("group", name=group).get_by_role("button").count()


def number(text):
    return float(text.replace("−", "-"))


BLUE_AND_ORANGE = {"rgb(0, 114, 178)", "rgb(200, 82, 0)"}
BLUE_AND_ORANGE_ON_DARK = {"rgb(86, 180, 233)", "rgb(240, 135, 60)"}
VIEWS = {
    "with a leak": {"Audit": audit, "Geometry": geometry, "Bias": bias},
    "plain": {"Trace": trace, "Entry": entry, "Why": why},
}


def test_without_a_model_the_screen_says_how_to_have_one(page):
    page.get_by_role("button", name="Prompt", exact=True).click()
    page.get_by_text("attnflow studio smollm2-135m").wait_for()
