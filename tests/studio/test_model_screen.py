"""The screen of the model in a real browser: what is asked, how far it is, how it is stopped, what is drawn."""

import pytest

from tests.models.saved import save_tiny_llama
from tests.studio.browser import WAIT, opened, settled

pytestmark = pytest.mark.slow


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
