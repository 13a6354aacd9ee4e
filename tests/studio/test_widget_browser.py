"""The page of the widget in a real browser: the module as notebooks load it, asked of the kernel's own widget."""

from importlib.resources import files

import pytest

import attnflow as af
from attnflow import masks
from tests.studio.browser import watched

pytest.importorskip("anywidget")
pytestmark = pytest.mark.slow  # a browser

# A notebook's document in short: rules of its own that must not reach the widget, and a model as anywidget gives one.
HOST = """<!doctype html><html><head><meta charset="utf-8"><style>
body { font: 20px serif } button { border: 9px solid red } .panel { display: none }
</style></head><body><button id="mine">theirs</button><div id="one"></div><div id="two"></div><script type="module">
const handlers = { "msg:custom": new Set(), "change:revision": new Set() };
window.hear = (name, value) => { for (const handler of handlers[name]) handler(value); };
window.revision = 0;
window.keys = [];
addEventListener("keydown", (event) => keys.push(event.key));
const model = {
  get: (name) => window[name],
  on: (name, handler) => handlers[name].add(handler),
  off: (name, handler) => handlers[name].delete(handler),
  send: (content) => window.kernel(content),
};
window.handlers = handlers;
const { default: widget } = await import("/studio.js");
window.ends = [...document.querySelectorAll("div")].map((el) => widget.render({ model, el }));
</script></body></html>"""


@pytest.fixture
def notebook(browser):
    """notebook(widget): the document of a notebook that shows a widget twice."""
    module = (files("attnflow") / "report" / "assets" / "studio.js").read_text(encoding="utf-8")
    content = {"/": ("text/html", HOST), "/studio.js": ("text/javascript", module)}
    with watched(browser, "http://notebook.test/") as page:

        def serve(route):
            kind, body = content[route.request.url.removeprefix("http://notebook.test")]
            route.fulfill(content_type=kind, body=body)

        def shown(widget):
            def kernel(said):
                replies = []
                send, widget.send = widget.send, lambda content, buffers=None: replies.append(content)
                try:
                    widget._handle_msg({"content": {"data": {"method": "custom", "content": said}}, "buffers": []})
                finally:
                    widget.send = send
                return [replies, widget.revision]

            page.expose_function("answered", kernel)
            page.add_init_script("""window.kernel = async (said) => {
              const [replies, revision] = await answered(said);
              for (const reply of replies) hear("msg:custom", reply);
              if (revision !== window.revision) { window.revision = revision; hear("change:revision"); }
            };""")
            page.route("**/*", serve)
            page.goto("http://notebook.test/")
            settled(page)
            return page

        yield shown


def settled(page):
    for place in ("#one", "#two"):
        page.locator(f"{place} .page[data-settled=true]").wait_for()
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_what_is_painted_is_read_back_and_every_view_shows_it(notebook):
    widget = af.report.widget(masks.causal(8))
    page = notebook(widget)
    one, two = page.locator("#one"), page.locator("#two")
    before = two.locator(".layer .share").text_content()
    one.get_by_role("radio", name="Allow").check()
    one.locator("canvas").focus()
    page.keyboard.press("End")  # to pair (0, 7)
    page.keyboard.press("Enter")
    two.locator(".layer .title", has_text="painted").wait_for()
    settled(page)
    assert widget.mask.dense()[0, 7]
    assert widget.mask.nnz == 37
    assert two.locator(".layer .share").text_content() != before
    page.keyboard.press("Control+z")
    one.locator(".layer .title", has_text="painted").wait_for(state="detached")
    settled(page)
    assert widget.mask == masks.causal(8)


def test_a_program_shows_another_mask(notebook):
    widget = af.report.widget(masks.causal(8))
    page = notebook(widget)
    widget.mask = masks.butterfly(4)
    page.evaluate("revision => { window.revision = revision; hear('change:revision'); }", widget.revision)
    for place in ("#one", "#two"):
        page.locator(f"{place} .layer .title", has_text="butterfly").wait_for()
    settled(page)


def test_it_says_when_no_kernel_answers_and_goes_on_when_one_does(notebook):
    page = notebook(af.report.widget(masks.causal(8)))
    page.evaluate("""async () => {
      const answer = window.kernel;
      const waiting = [];
      window.kernel = (said) => waiting.push(said);
      window.wake = () => { window.kernel = answer; waiting.map(answer); };
      const { default: widget } = await import("/studio.js");
      const el = document.createElement("div");
      el.id = "late";
      document.body.append(el);
      const on = (name, handler) => handlers[name].add(handler);
      widget.render({ model: { get: () => 0, on, off: () => {}, send: (said) => window.kernel(said) }, el });
    }""")
    page.locator("#late footer", has_text="The kernel has not answered yet").wait_for()
    page.evaluate("wake()")
    page.locator("#late .page[data-settled=true]").wait_for()
    assert "kernel" not in page.locator("#late footer").text_content()
