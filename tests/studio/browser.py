"""A page of the studio in a real browser: opened, waited for, pointed at, read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from attnflow.report.live.design import Design

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT = 150_000  # milliseconds until something must have happened; nothing here asserts a time
SIZES = {"wide": (1280, 800), "phone": (390, 844)}

_DESIGN = """
() => {
  const text = new URLSearchParams(location.hash.slice(1)).get('design');
  const bytes = Uint8Array.from(atob(text.replaceAll('-', '+').replaceAll('_', '/')), (c) => c.charCodeAt(0));
  return new TextDecoder().decode(bytes);
}
"""
_NEXT_FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
# Colours of what is drawn at points of the canvas, as [red, green, blue].
_COLOURS = """
(points) => {
  const canvas = document.querySelector('canvas');
  const ratio = canvas.width / canvas.getBoundingClientRect().width;
  const context = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
  context.drawImage(canvas, 0, 0);
  return points.map(([x, y]) => [...context.getImageData(x * ratio, y * ratio, 1, 1).data].slice(0, 3));
}
"""
# Every text whose contrast to what lies under it is below 4.5, with the ratio (WCAG 2.1, 1.4.3).
CONTRAST = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const parse = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = parse(colour).map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const shown = [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && !e.closest(':disabled')
    && !e.closest('svg, .sr') && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  return shown.map((e) => {
    let back = e;
    while (back && parse(getComputedStyle(back).backgroundColor)[3] < 255) back = back.parentElement;
    const [a, b] = [light(getComputedStyle(e).color), light(getComputedStyle(back ?? document.body).backgroundColor)];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.textContent.trim().slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5);
}
"""
# Where the focus is not seen on all four sides: it has no ring, something cuts it, or the footer covers it.
RINGS = """
() => {
  const wanted = 'a[href], button:enabled, input:enabled, select:enabled, textarea:enabled, summary, [tabindex="0"]';
  const footer = document.querySelector('footer'), found = [];
  const edges = (box, by) => [box.left - by, box.top - by, -box.right - by, -box.bottom - by];
  for (const element of document.querySelectorAll(wanted)) {
    if (!element.checkVisibility()) continue;
    element.focus({focusVisible: true});
    const shown = element.closest('label.file, .segments label')?.querySelector('span') ?? element;
    const style = getComputedStyle(shown);
    const name = element.ariaLabel || shown.textContent.slice(0, 30) || element.outerHTML;
    const width = parseFloat(style.outlineWidth), reach = width + parseFloat(style.outlineOffset);
    if (style.outlineStyle === 'none' || width < 2) { found.push(`no ring: ${name}`); continue; }
    const ring = edges(shown.getBoundingClientRect(), reach);
    const cuts = [[0, 0, -innerWidth, -Infinity]];
    for (let up = shown.parentElement; up; up = up.parentElement) {
      const { overflowX, overflowY, maskImage } = getComputedStyle(up);
      if (overflowX === 'visible' && overflowY === 'visible' || up === document.body) continue;
      if (maskImage !== 'none') found.push(`faded: ${name}`);
      const box = up.getBoundingClientRect(), [left, top] = [box.left + up.clientLeft, box.top + up.clientTop];
      cuts.push([left, top, -left - up.clientWidth, -top - up.clientHeight]);
    }
    const tall = (cut) => ring[1] + ring[3] < cut[1] + cut[3]; // taller than what shows it, it is scrolled through
    const isCut = (cut) => cut.some((edge, i) => ring[i] < edge - 0.5 && !(i % 2 && tall(cut)));
    if (cuts.some(isCut)) found.push(`cut: ${name}`);
    const [low, high] = [shown.getBoundingClientRect(), footer.getBoundingClientRect()];
    if (!footer.contains(element) && low.height < 200 && low.bottom > high.top + 0.5) found.push(`covered: ${name}`);
  }
  document.activeElement.blur();
  scrollTo(0, 0);
  return found;
}
"""
# What scrolls, and on which sides it fades: {name: [[left, right, up, down] that hide something, those that fade]}.
FADES = """
() => {
  const found = {};
  for (const element of document.querySelectorAll('body *')) {
    const { overflowX, overflowY } = getComputedStyle(element);
    const [wide, high] = [element.scrollWidth - element.clientWidth, element.scrollHeight - element.clientHeight];
    const scrolls = overflowX === 'auto' && wide > 30 || overflowY === 'auto' && high > 30;
    if (!scrolls || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const [left, top] = [element.scrollLeft, element.scrollTop];
    const hides = [left > 1, left < wide - 1, top > 1, top < high - 1];
    const fades = ['left', 'right', 'up', 'down'].map((side) => parseFloat(style.getPropertyValue(`--${side}`)) > 0);
    found[element.ariaLabel || element.id || element.className] = [hides, fades, style.maskImage !== 'none'];
  }
  return found;
}
"""
CONTROLS = {"button", "link", "checkbox", "radio", "slider", "spinbutton", "textbox", "combobox", "tab", "application",
            "region", "img", "image", "meter", "radiogroup", "tabpanel", "tablist"}  # fmt: skip


@contextmanager
def watched(browser, origin, width=1280, height=800, quiet=True, **options) -> Iterator:
    """A page in a window of its own, which must ask for nothing elsewhere; if it is to be `quiet`, nor complain."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(WAIT)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    own = (origin, "data:", "blob:")
    page.on("request", lambda request: None if request.url.startswith(own) else complaints.append(request.url))
    try:
        yield page
        assert not (quiet and complaints), complaints
    finally:
        context.close()


@contextmanager
def opened(browser, server, size="wide", **options) -> Iterator:
    """A page of the studio that shows what the server begins with."""
    width, height = SIZES[size]
    with watched(browser, server.origin, width, height, **options) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.goto(server.address)
        settled(page)
        yield page


def settled(page) -> None:
    """Wait until every question has its answer, and the answers are drawn."""
    page.evaluate(_NEXT_FRAMES)  # what was done before has been noticed
    page.locator(".page[data-settled=true]").wait_for()
    page.evaluate(_NEXT_FRAMES)


def design(page):
    """The design that the page's address holds, as plain data."""
    page.wait_for_function("() => document.querySelector('.page').dataset.linked === 'true'")
    return json.loads(page.evaluate(_DESIGN))


def mask_of(page, layer=0):
    """The mask of a layer, from the page's address."""
    return Design.from_dict(design(page)).layers[layer].mask


def layer_title(page, number=0) -> str:
    return page.locator(".layer .title").nth(number).text_content()


def fact(page, name) -> str:
    """A number of the order."""
    return page.locator(".facts div", has_text=name).locator("b").first.text_content()


def place(page, query, key) -> tuple[float, float]:
    """Where the middle of a pair lies on the canvas, as the page says where its matrix lies."""
    left, top, cell, first_query, first_key = json.loads(page.locator("canvas").get_attribute("data-place"))
    return left + (key - first_key + 0.5) * cell, top + (query - first_query + 0.5) * cell


def cell(page, query, key) -> tuple[float, float]:
    """Where the middle of a pair lies on the screen."""
    box = page.locator("canvas").bounding_box()
    x, y = place(page, query, key)
    return box["x"] + x, box["y"] + y


def colours(page, *pairs) -> list[tuple[int, int, int]]:
    """The colours in which pairs are drawn."""
    return [tuple(colour) for colour in page.evaluate(_COLOURS, [place(page, *pair) for pair in pairs])]


def ink(page) -> str:
    """The matrix as a picture."""
    return page.evaluate("document.querySelector('canvas').toDataURL()")


def choose(page, name) -> None:
    """A mask of the catalogue, looked at and not used yet."""
    page.get_by_label("Catalogue").select_option(name)
    settled(page)


def join(page, how) -> None:
    """Take the mask that is chosen: "Use", "& and" or "| or"."""
    page.get_by_role("button", name=how, exact=True).click()
    settled(page)


def use(page, name) -> None:
    """A mask of the catalogue in place of what there is."""
    choose(page, name)
    join(page, "Use")


def look(page) -> None:
    """Take the pointer off the matrix and the brush out of the hand."""
    page.get_by_role("radio", name="Look").check()
    page.mouse.move(2, 2)


def nameless(page, *expected):
    """Controls and pictures that assistive technology would find without a name, from the computed tree."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "").strip()) for node in nodes
             if not node["ignored"] and node.get("role")]  # fmt: skip
    assert set(expected) <= {role for role, _ in roles}
    return [role for role, name in roles if role in CONTROLS and not name]


def legible(page, size, *expected) -> None:
    """Everything has a name and contrast, and lies within the window."""
    assert nameless(page, *expected) == []
    page.wait_for_timeout(200)  # colours fade over
    assert not (pale := page.evaluate(CONTRAST)), pale
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    assert not (unseen := page.evaluate(RINGS)), unseen
    if size == "wide":
        assert page.evaluate("document.documentElement.scrollHeight") <= SIZES[size][1]
