"""The screen of the model in a real browser: what is asked, how far it is, how it is stopped, what is drawn."""

import pytest

from tests.models.saved import save_tiny_llama
from tests.studio.browser import SIZES, WAIT, legible, opened, settled

pytestmark = pytest.mark.slow

VIEWS = ["Audit", "Geometry", "Bias", "Trace"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def biased(folder, tmp_path_factory):
    """The folder of a bias of that model."""
    import attnflow as af

    loaded, target = af.load_model(folder), tmp_path_factory.mktemp("bias")
    af.bias.attach(loaded, af.bias.GuidanceConfig(hidden_dim=8, init="kaiming", layers=[0, 1]))
    af.bias.save(loaded, target)
    return str(target)


@pytest.fixture(scope="module")
def server(folder, biased):
    pytest.importorskip("starlette")
    pytest.importorskip("websockets")
    from tests.studio.server import serving

    with serving(model={"model": folder, "bias": biased}, sessions=8) as running:
        yield running


@pytest.fixture(scope="module")
def page(browser, server):
    with opened(browser, server) as shown:
        yield read(shown)


def read(page):
    """The page once the model has been read, which takes a process that imports everything."""
    page.set_default_timeout(5 * WAIT)
    page.get_by_role("button", name="Model", exact=True).click()
    page.wait_for_function("() => document.querySelector('.work button:not(:disabled)')?.textContent.startsWith('Run')")
    settled(page)
    page.set_default_timeout(WAIT)
    return page


def run(page, view):
    page.get_by_role("tab", name=view).click()
    page.locator(".work").get_by_role("button", name="Run").click()
    page.wait_for_function("() => document.querySelector('.work button')?.textContent === 'Run again'")
    settled(page)
    page.wait_for_function("() => !document.querySelector('progress')")


def test_the_model_is_told_in_numbers(page):
    about = page.locator(".panel").first.text_content()
    assert "LlamaForCausalLM" in about
    assert "4, 2 of keys" in about


def test_an_audit_that_is_clean(page):
    run(page, "Audit")
    assert page.locator(".view .verdict").text_content() == "Clean: no output moved against the order"
    assert page.locator(".module.breaks").count() == 1, "that of the legend"
    assert "forbidden pairs" in page.locator(".view .lines").text_content()


def test_the_geometry_has_a_plane_and_a_map_of_heads(page):
    run(page, "Geometry")
    assert page.locator(".point").count() == 2
    assert page.locator(".heat rect").count() == 2 * 8
    page.locator(".heat rect").first.hover()
    assert "layer 0, head 0" in page.locator(".heat .readout").first.text_content()
    page.locator(".point circle").nth(1).hover()
    assert page.locator(".chart .readout").first.text_content().startswith("layer 1: symmetry")


def test_a_bias_by_layer_and_then_every_query_of_one(page):
    run(page, "Bias")
    assert page.locator(".numbers tbody tr").count() == 2
    page.locator(".numbers").get_by_role("button", name="1").click()
    page.get_by_text("Every query in layer 1").wait_for()
    assert page.locator(".heat rect.void").count() > 0


def test_a_trace_and_the_entries_of_another_token(page):
    run(page, "Trace")
    rows = page.locator(".numbers tbody").text_content()
    page.locator(".strip .token").first.click()
    page.wait_for_function("() => document.querySelector('.strip .token')?.ariaPressed === 'true'")
    assert page.locator(".numbers tbody").text_content() != rows
    page.get_by_label("map").select_option("active")
    page.locator(".heat figcaption", has_text="Share of active entries").wait_for()


def test_a_leak_is_marked_on_the_map_with_its_layer_and_module(browser, folder):
    from tests.studio.server import serving

    with serving(model={"model": folder, "bias": None, "leaks": True}) as leaky, opened(browser, leaky) as page:
        run(read(page), "Audit")
        assert "model.layers.1.mlp, layer 1" in page.locator(".view .verdict").text_content()
        first = page.locator(".module.first")
        assert first.count() == 1
        assert first.get_attribute("title") == "mlp: breaks the order"
        assert page.locator(".violations tbody tr").count() == 1
        assert page.get_by_role("tab", name="Audit").text_content() == "Audit1"


def test_without_a_model_the_screen_says_how_to_have_one(browser, studio):
    with opened(browser, studio) as bare:
        bare.get_by_role("button", name="Model", exact=True).click()
        bare.get_by_text("attnflow studio smollm2-135m").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_is_legible_and_everything_has_a_name(browser, server, size, scheme):
    with opened(browser, server, size, color_scheme=scheme) as page:
        read(page)
        for view in VIEWS:
            run(page, view)
            legible(page, size, "tab", "textbox", "tabpanel")
