"""From a click to the redrawn matrix, in a real browser: `python -m benchmarks.bench_studio`.

A click allows or forbids one pair of a sliding window. What is timed is what a reader waits for: from the browser's
time stamp of the released button until the frame with the new picture has been painted, as the page itself notes it
(User Timing). The answers that follow, such as depth and leaks, are waited for between clicks and are not in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

from benchmarks.harness import OURS, Case, Seconds, main

_LAST = """
() => {
  const [mark] = performance.getEntriesByName('attnflow redrawn').slice(-1);
  performance.clearMeasures();
  return mark?.duration ?? null;
}
"""


class _Clicks:
    """Clicks at pairs of the diagonal's neighbourhood, one for each call."""

    def __init__(self, page: object, canvas: object, shown: int) -> None:
        self._page, self._canvas, self._shown, self._count = page, canvas, shown, 0
        self.seconds: list[float] = []

    @property
    def note(self) -> str:
        ordered = sorted(self.seconds)
        p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
        return f"p95 {p95:.5f} of {len(ordered)} clicks, Chromium"

    def __call__(self) -> Seconds:
        from tests.studio.browser import cell, settled

        page, self._count = self._page, self._count + 1
        tool = "Forbid" if self._count % 2 else "Allow"
        page.get_by_role("radio", name=tool).check()
        at = (self._count * 7919) % self._shown
        page.mouse.click(*cell(page, at, max(0, at - 1)))
        page.wait_for_function("() => performance.getEntriesByName('attnflow redrawn').length > 0")
        seconds = page.evaluate(_LAST) / 1000
        settled(page)
        self.seconds.append(seconds)
        return Seconds(seconds)


def clicks(n: int) -> Callable[[], Seconds]:
    """A page that shows a sliding window of n positions, and a click at a time; the first are not timed."""
    from playwright.sync_api import sync_playwright

    from tests.studio.browser import CHROMIUM, cell, settled
    from tests.studio.server import serving

    if CHROMIUM is None:
        raise RuntimeError("needs Chromium: apt-get install chromium")
    tools = sync_playwright().start()
    browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    design = {"name": "sliding_window", "parameters": {"n": n, "window": max(4, n // 64)}}
    _HELD.append(running := serving(design))
    server = running.__enter__()
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(60_000)
    page.goto(server.address)
    settled(page)
    assert cell(page, 0, 0)
    timed = _Clicks(page, page.locator("canvas"), n)
    for _ in range(3):
        timed()
    timed.seconds.clear()
    return timed


_HELD: list[object] = []  # servers that run until the process ends


def cases(device: str, sizes: tuple[int, ...] = (256, 1024, 16_384)) -> list[Case]:
    """One size after the other."""
    if device != "cpu" or shutil.which("chromium") is None:
        return []
    here = "benchmarks.bench_studio"
    return [Case("studio, click to redrawn", OURS, n, here, "clicks", (n,), repeats=60) for n in sizes]


if __name__ == "__main__":
    main(cases, ["playwright", "starlette", "uvicorn"], time_limit=240.0)
