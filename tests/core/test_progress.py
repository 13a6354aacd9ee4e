"""Progress: a bar on a terminal, a line now and then elsewhere, nothing for short work."""

import io

from attnflow._core.progress import Reporter


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_short_work_writes_nothing_without_a_terminal():
    stream = io.StringIO()
    with Reporter(stream) as progress:
        for done in range(5):
            progress(done, 5, "scoring")
    assert stream.getvalue() == ""


def test_long_work_writes_a_line_now_and_then():
    stream, clock = io.StringIO(), Clock()
    with Reporter(stream, seconds=10.0, clock=clock) as progress:
        for second in range(25):
            clock.now = float(second)
            progress(second, 25, "scoring")
        clock.now = 40.0
        progress.stage("writing")
    assert stream.getvalue() == "scoring 10/25\nscoring 20/25\n"


def test_a_terminal_sees_a_bar_that_is_gone_afterwards():
    stream = Terminal()
    with Reporter(stream) as progress:
        progress.stage("loading [model]")
        progress(3, 7, "scoring model.layers.0")
        progress.pause()
        progress(4, 7, "scoring model.layers.1")
    shown = stream.getvalue()
    assert "loading [model]" in shown
    assert "3/7" in shown
    assert "model.layers.1" in shown
    assert shown.endswith(("\x1b[?25h\r\x1b[1A\x1b[2K", "\x1b[2K"))
