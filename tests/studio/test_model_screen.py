"""The screen of the model in a real browser: what is asked, what is drawn, where a leak starts."""

import pytest

import attnflow as af
from tests.models.saved import save_tiny_llama
from tests.studio.browser import WAIT, legible, opened, settled

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A studio of a model with a bias, an MLP of which reads the token after its own."""
    pytest.importorskip("starlette")
    pytest.importorskip("websockets")
    from tests.studio.server import serving

    folder, bias = save_tiny_llama(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("bias")
    loaded = af.load_model(folder)
    af.bias.attach(loaded, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming", layers=[0, 1]))
    af.bias.save(loaded, bias)
    with serving(model={"model": folder, "bias": str(bias), "leaks": True}) as running:
        yield running


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("phone", "dark")])
def test_every_view_is_run_drawn_and_legible(browser, server, size, scheme):
    with opened(browser, server, size, color_scheme=scheme) as page:
        page.set_default_timeout(5 * WAIT)  # the first reading takes a process that imports everything
        page.get_by_role("button", name="Model", exact=True).click()
        page.wait_for_function("() => document.querySelector('.work button:not(:disabled)')?.textContent === 'Run'")
        page.set_default_timeout(WAIT)
        about = page.locator(".panel").first.text_content()
        assert "LlamaForCausalLM" in about
        assert "4, 2 of keys" in about
        for view, is_drawn in VIEWS.items():
            page.get_by_role("tab", name=view).click()
            page.locator(".work").get_by_role("button", name="Run").click()
            page.wait_for_function("() => document.querySelector('.work button')?.textContent === 'Run again'")
            settled(page)
            page.wait_for_function("() => !document.querySelector('progress')")
            is_drawn(page)
            legible(page, size, "tab", "textbox", "tabpanel")


def audit(page):
    assert "model.layers.1.mlp, layer 1" in page.locator(".view .verdict").text_content()
    assert page.locator(".module.first").get_attribute("title") == "mlp: breaks the order"
    assert page.locator(".violations tbody tr").count() == 1
    assert page.get_by_role("tab", name="Audit").text_content() == "Audit1"
    assert "Forbidden pairs tested" in page.locator(".view .lines").text_content()


def geometry(page):
    assert page.locator(".point").count() == 2
    assert page.locator(".heat rect").count() == 2 * 8
    if page.viewport_size["width"] < 1000:
        return  # where nothing hovers
    page.locator(".heat rect").first.hover()
    assert "layer 0, head 0" in page.locator(".heat .readout").first.text_content()
    page.locator(".point circle").nth(1).hover()
    assert page.locator(".chart .readout").first.text_content().startswith("layer 1: symmetry")


def bias(page):
    assert page.locator(".numbers tbody tr").count() == 2
    page.locator(".numbers").get_by_role("button", name="1").click()
    page.get_by_text("Every query in layer 1").wait_for()
    assert page.locator(".heat rect.void").count() > 0


def trace(page):
    rows = page.locator(".numbers tbody").text_content()
    page.locator(".strip .token").first.click()
    page.wait_for_function("() => document.querySelector('.strip .token')?.ariaPressed === 'true'")
    assert page.locator(".numbers tbody").text_content() != rows
    page.get_by_label("map").select_option("active")
    page.locator(".heat figcaption", has_text="Share of active entries").wait_for()


VIEWS = {"Audit": audit, "Geometry": geometry, "Bias": bias, "Trace": trace}


def test_without_a_model_the_screen_says_how_to_have_one(page):
    page.get_by_role("button", name="Model", exact=True).click()
    page.get_by_text("attnflow studio smollm2-135m").wait_for()
