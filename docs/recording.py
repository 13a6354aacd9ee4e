"""Records the studio in a real browser, for docs/guides/studio.md; `make docs` runs it.

    python docs/recording.py          # where the recording is missing
    python docs/recording.py --all    # again

Without Chromium the committed recording stays.
"""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

PATH = Path(__file__).parent / "guides" / "studio.webp"
SIZE = {"width": 1240, "height": 760}
SCALE = 0.72
SETTLED = ".page[data-settled=true]"

Shot = Callable[[int], None]


@contextmanager
def served() -> Iterator[str]:
    """The address of a studio that shows a sliding window."""
    command = [sys.executable, "-m", "attnflow", "studio", "sliding_window", "--n", "20", "--set", "window=4"]
    process = subprocess.Popen([*command, "--no-open", "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = ""
    while not said.rstrip().endswith("}"):
        said += process.stdout.readline()
    try:
        yield json.loads(said)["address"]
    finally:
        process.terminate()
        process.wait(30)


def play(page: Any, shot: Shot) -> None:
    """What the recording shows: `shot(milliseconds)` takes a frame that stands so long."""
    canvas = page.locator("canvas")

    def walk(*keys: str) -> None:
        canvas.focus()
        for key in keys:
            page.keyboard.press(key)
        page.locator(SETTLED).wait_for()

    shot(1200)
    walk("PageDown", *["ArrowUp"] * 4)
    slider = page.get_by_role("slider")
    slider.focus()
    slider.press("Home")
    for _ in range(5):
        slider.press("ArrowRight")
        shot(450)
    page.get_by_role("radio", name="Allow").check()
    walk("Home", *["ArrowUp"] * 12, *["ArrowRight"] * 9)
    shot(500)
    walk("Enter")
    shot(1000)
    page.get_by_role("button", name="Next token").click()
    page.locator(".leaks button").first.wait_for()
    page.locator(SETTLED).wait_for()
    shot(1100)
    page.locator(".leaks button").first.click()
    shot(1600)
    page.keyboard.press("Control+z")
    page.keyboard.press("Control+z")
    page.locator(".layer .title", has_text="painted").wait_for(state="detached")
    page.get_by_role("tab", name="Code").click()
    page.locator("#answer pre").wait_for()
    page.locator(SETTLED).wait_for()
    shot(1600)


def record(chromium: str) -> None:
    """Play it, and write the frames as one picture that moves."""
    from playwright.sync_api import sync_playwright

    frames: list[Image.Image] = []
    times: list[int] = []
    with served() as address, sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(viewport=SIZE, reduced_motion="reduce").new_page()
        page.goto(address)
        page.locator(SETTLED).wait_for()

        def shot(milliseconds: int) -> None:
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            frame = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            frames.append(
                frame.resize((round(frame.width * SCALE), round(frame.height * SCALE)), Image.Resampling.LANCZOS)
            )
            times.append(milliseconds)

        play(page, shot)
        browser.close()
    first, *rest = frames
    first.save(
        PATH, save_all=True, append_images=rest, duration=times, loop=0, quality=82, method=6, minimize_size=True
    )
    print(f"{PATH.name}: {len(frames)} frames, {PATH.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """Record it where it is missing, or again."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if PATH.exists() and "--all" not in sys.argv:
        return
    if chromium is None:
        raise SystemExit("recording the studio needs Chromium: apt-get install chromium")
    record(chromium)


if __name__ == "__main__":
    main()
