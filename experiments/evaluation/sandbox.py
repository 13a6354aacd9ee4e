"""Programs that a model has written run here or not at all: under bubblewrap, without network or files, bounded."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Literal

from experiments.evaluation.memory_group import memory_group

Verdict = Literal["passed", "failed", "timed out", "too much output"]

TOOLS: Final = ("bwrap", "setpriv", "prlimit")
_MEGABYTE: Final = 1 << 20
# The shell enters the group of the memory before it becomes bwrap: no process of the sandbox was ever outside.
_ENTER: Final = 'echo $$ > "$1" && shift && exec "$@"'
_PROGRAM: Final = "/program.py"
_PYTHON: Final = "/python"
_FIRST_USER: Final = (
    3_000_000_000  # users that own nothing; each run has one of its own, as processes are counted by user
)
_USERS: Final = count()
_STARTED: Final = b"+"
_ANSWER: Final = 64  # bytes that are read of an answer at most
_SHOWN: Final = 2000  # bytes of what it printed
_START: Final = 60.0  # seconds until the program begins
# Reads what it must answer before the program runs, and answers after it: a program that leaves early has not passed.
_DRIVER: Final = f"""
import os, sys
answer, end = os.read(0, 64), int(sys.argv.pop())
os.write(end, {_STARTED!r})
with open({_PROGRAM!r}, encoding="utf-8", errors="surrogatepass") as file:
    source = file.read()
exec(compile(source, "program.py", "exec"), {{"__name__": "__main__"}})
sys.stdout.flush()
os.write(end, answer)
os._exit(0)
"""


class NoSandbox(RuntimeError):
    """Programs cannot be run safely here; the message says why. Nothing was run."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # on the clock, from its first line on; about as much CPU for each process
    memory: int = 512 * _MEGABYTE  # bytes of all processes together, files in memory included
    processes: int = 16  # at a time, threads included
    disk: int = 16 * _MEGABYTE  # bytes of its only folder, which lies in memory
    output: int = 64 * 1024  # bytes on stdout and stderr together
    files: int = 64  # open at a time


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict  # "passed" if it ran to its end; else what ended it
    output: str  # the last of what it printed
    seconds: float  # on the clock

    @property
    def passed(self) -> bool:
        """Whether it ran to its end, without an exception and within its limits."""
        return self.verdict == "passed"


def missing() -> list[str]:
    """Programs that the sandbox needs and this machine lacks."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def run_program(source: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program in a sandbox of its own that leaves nothing behind.

    It sees the Python interpreter, system libraries, and one small empty folder, /tmp; it has no network, no
    environment, no privileges, no other processes to see, and a user of its own. What it cannot be kept from is to
    forge the *test* that is part of its own process (objects that equal everything, say): that is the benchmark's
    limit, and harms nobody but its score.

    Args:
        source: of the program; it passes if it runs to its end without an exception.
        limits: beyond which it is killed.
    """
    absent = missing()
    if absent:
        raise NoSandbox(f"{', '.join(absent)} not installed: on Debian, apt-get install bubblewrap util-linux")
    try:
        with memory_group(limits.memory) as group:
            return _run(group, source.encode("utf-8", "surrogatepass"), limits)
    except OSError as error:
        raise NoSandbox(f"the sandbox does not start: {error}") from error


def _run(group: Path, program: bytes, limits: Limits) -> Outcome:
    expected = secrets.token_hex(16).encode()
    with ExitStack() as stack:
        code = os.memfd_create("program")
        stack.callback(os.close, code)
        with open(code, "wb", closefd=False) as file:
            file.write(program)
        os.lseek(code, 0, os.SEEK_SET)
        question_read, question_write = os.pipe()
        answer_read, answer_write = os.pipe()
        stack.callback(os.close, answer_read)
        os.write(question_write, expected)
        os.close(question_write)
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _ENTER, "sh", str(group), *_command(limits, code, answer_write)],
                stdin=question_read,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(code, answer_write),
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(question_read)
            os.close(answer_write)
        stack.callback(_end, process)
        verdict, said, printed, seconds = _watch(process, answer_read, limits)
    text = printed.decode("utf-8", "replace")
    if not said.startswith(_STARTED):
        raise NoSandbox(f"the sandbox does not start: {text.strip() or 'it says nothing'}")
    return Outcome("passed" if said == _STARTED + expected else verdict, text, seconds)


def _command(limits: Limits, code: int, answer: int) -> list[str]:
    """bwrap, with Python in it, and the limits of each process in between."""
    python = Path(sys.base_prefix)  # not that of a virtual environment, which holds packages
    place = python if python.is_relative_to("/usr") else Path(_PYTHON)
    system = [] if place == python else ["--ro-bind", str(python), _PYTHON]
    for name in ("/lib", "/lib32", "/lib64", "/bin"):
        if Path(name).is_symlink():
            system += ["--symlink", os.readlink(name), name]
        elif Path(name).is_dir():
            system += ["--ro-bind", name, name]
    user: list[str]
    if os.geteuid() == 0:  # a user of its own: root is not held by a limit of processes
        number = str(_FIRST_USER + (os.getpid() % 1_000_000) * 1000 + next(_USERS) % 1000)
        user = [f"--reuid={number}", f"--regid={number}", "--clear-groups", "--bounding-set=-all"]
        apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    else:
        user, apart = [], ["--unshare-all"]
    seconds = int(limits.seconds) + 1
    return [
        "bwrap", *apart, "--new-session", "--die-with-parent", "--clearenv", "--hostname", "sandbox",
        "--ro-bind", "/usr", "/usr", *system, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
        "--perms", "1777", "--size", str(limits.disk), "--tmpfs", "/tmp",
        "--perms", "0444", "--ro-bind-data", str(code), _PROGRAM, "--remount-ro", "/", "--chdir", "/tmp",
        "--", "setpriv", *user, "--inh-caps=-all", "--no-new-privs",
        "prlimit", f"--as={limits.memory}", f"--cpu={seconds}", f"--nproc={limits.processes}",
        f"--fsize={limits.disk}", f"--nofile={limits.files}", "--core=0", "--memlock=0", "--msgqueue=0",
        str(place / "bin" / "python3"), "-I", "-S", "-B", "-c", _DRIVER, str(answer),
    ]  # fmt: skip


def _watch(process: subprocess.Popen[bytes], answer: int, limits: Limits) -> tuple[Verdict, bytes, bytes, float]:
    """(what ended the program unless it passed, what it answered, the last of what it printed, its seconds)."""
    assert process.stdout is not None
    said, printed, amount = b"", b"", 0
    began, limit = time.monotonic(), _START
    verdict: Verdict = "failed"
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(answer, selectors.EVENT_READ)
        while selector.get_map():
            left = began + limit - time.monotonic()
            if left <= 0:
                verdict = "timed out"
                break
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fd == answer:
                    if not said:  # a busy machine may take its time before the program begins
                        began, limit = time.monotonic(), limits.seconds
                    said = (said + chunk)[:_ANSWER]
                else:
                    printed, amount = (printed + chunk)[-_SHOWN:], amount + len(chunk)
            if amount > limits.output:
                verdict, said = "too much output", said[: len(_STARTED)]
                break
    return verdict, said, printed, time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill bwrap; with it dies the first process of its namespace, and with that one all others."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
