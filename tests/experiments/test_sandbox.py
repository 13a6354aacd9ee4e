"""Programs of models run in the sandbox or not at all, and do not get out of it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from experiments.evaluation import memory_group, sandbox, self_test
from experiments.evaluation.sandbox import Limits, NoSandbox, run_program
from experiments.evaluation.self_test import attacks, attempts

SMALL = Limits(seconds=20.0, memory=192 << 20, processes=8, disk=4 << 20)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def working() -> None:
    """Skips where no program can be run, as on a machine without bubblewrap; where one can, the sandbox must hold."""
    try:
        run_program("pass")
    except NoSandbox as error:
        pytest.skip(f"no sandbox: {error}")


@pytest.fixture(scope="module", name="outcomes")
def _outcomes() -> dict[str, sandbox.Outcome]:
    return dict(attempts())


@pytest.mark.parametrize("name", attacks("", 0))
def test_an_attack_of_the_self_test_fails(name, outcomes):
    assert not outcomes[name].passed, outcomes[name]


def test_the_limit_that_stops_a_program_is_said(outcomes):
    assert outcomes["runs for ever"].verdict == "timed out"
    assert outcomes["prints without end"].verdict == "too much output"
    assert "No space left" in outcomes["fills its folder beyond its size"].output
    assert "one was killed" in outcomes["takes more memory than all its processes may"].output
    assert "Resource temporarily unavailable" in outcomes["starts more processes than it may"].output


LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
MORE = {
    "traces its parent": LIBC + "assert libc.ptrace(16, 1, 0, 0) == 0",
    "kills everything": "import os; os.kill(-1, 9)\nassert os.getppid() != 1",
    "kills its parent": "import os, time; os.kill(os.getppid(), 9); time.sleep(0.2)\nassert os.getppid() != 1",
    "becomes root": LIBC + "assert libc.setresuid(0, 0, 0) == 0",
    "raises its limits": "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096))",
    "mounts": LIBC + "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "writes beside its folder": "open('/usr/new', 'w')",
    "writes to the root": "import os; os.mkdir('/new')",
    "writes a device": "open('/dev/new', 'w')",
    "writes shared memory": "open('/dev/shm/new', 'w')",
    "writes its own program": "open('/program.py', 'w')",
    "writes a setting of the kernel": "open('/proc/sys/kernel/hostname', 'w').write('x')",
    "leaves its memory group": "open('/sys/fs/cgroup/memory/cgroup.procs', 'w').write('0')",
    "reads accounts": "open('/etc/passwd')",
    "reads memory of another": "open('/proc/1/mem', 'rb').read(1)",
    "reads the environment of another": "open('/proc/1/environ', 'rb').read()",
    "resolves a name": "import socket; socket.getaddrinfo('pypi.org', 443)",
    "sends a packet": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))",
    "opens a raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "imports what is installed": "import torch",
    "imports this project": "import attnflow",
    "ends without an error": "raise SystemExit(0)",
    "answers by itself": "import os\nfor n in range(3, 4096):\n    try: os.write(n, b'+' * 32)\n"
    "    except OSError: pass\nos._exit(0)",
    "dies of a signal": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "makes its file too large": "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()",
    "opens too many files": "files = [open('/program.py') for _ in range(200)]",
    "waits for input": "assert input()",
    "sleeps": "import time; time.sleep(60)",
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "prints from children": "import os\nos.fork(); os.fork()\nwhile True: os.write(2, b'x' * 4096)",
}


@pytest.mark.parametrize("name", MORE)
def test_a_further_attack_fails(name):
    quick = name in ("sleeps", "forks without end")
    outcome = run_program(MORE[name], Limits(seconds=1.0, processes=8) if quick else SMALL)
    assert not outcome.passed, outcome
    assert not quick or outcome.verdict == "timed out"


def test_namespaces_of_its_own_lead_nowhere(tmp_path):
    """A user may make namespaces, with privileges in them alone: the machine's files are not in any."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    source = f"{LIBC}assert libc.unshare(0x10000000 | 0x00020000) == 0\nlibc.umount2(b'/tmp', 2)\nopen({str(secret)!r})"
    assert not run_program(source, SMALL).passed


def test_nothing_is_left(outcomes):
    def groups() -> list[Path]:
        return [path for folder in ("memory", "") for path in (memory_group.CONTROL / folder).glob("attnflow-*")]

    own = [path for path in groups() if path.name.startswith(f"attnflow-{os.getpid()}-")]
    run_program(
        "import os, time\nos.fork(); os.setsid() if os.getpid() > 2 else None; time.sleep(60)", Limits(seconds=0.5)
    )
    assert [path for path in groups() if path.name.startswith(f"attnflow-{os.getpid()}-")] == own == []


def test_a_sandbox_dies_with_its_owner(tmp_path):
    """kill -9 of the process that runs a program ends the program, too."""
    program = f"import time; time.sleep(6{os.getpid()})"
    code = f"from experiments.evaluation.sandbox import *\nrun_program({program!r}, Limits(seconds=60))"
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": "src:."})

    def running() -> bool:
        needle = f"sleep(6{os.getpid()})".encode()
        return any(
            path.parent.name != str(owner.pid) and needle in _read(path)
            for path in Path("/proc").glob("[0-9]*/cmdline")
        ) or any(f"attnflow-{owner.pid}-" in _read(path).decode() for path in Path("/proc").glob("[0-9]*/cgroup"))

    end = time.monotonic() + 30
    while not running():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    while running():
        assert time.monotonic() < end
        time.sleep(0.05)
    for folder in ("memory", ""):
        for group in (memory_group.CONTROL / folder).glob(f"attnflow-{owner.pid}-*"):
            memory_group._empty(group)  # busy for a moment after its last process is gone


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_odd_text_is_read_as_it_is():
    assert run_program("x = '''" + "y" * 300_000 + "'''").passed
    assert run_program("print('\u00e4\u4e2d\U0001f600')").output == "\u00e4\u4e2d\U0001f600\n"
    assert run_program("x = '\ud800'").verdict == run_program("x = '\0'").verdict == "failed"


def test_a_program_may_do_what_solutions_do():
    source = "import hashlib, math, re, typing, threading, tempfile, json\nopen('/tmp/x', 'w').write('y')\nprint('ok')"
    outcome = run_program(source)
    assert outcome.passed
    assert outcome.output == "ok\n"


def as_nobody(ask: Callable[[], str]) -> str:
    """What a function says in a process without rights."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            self_test.self_test.cache_clear()
            os.write(write, ask().encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, encoding="utf-8") as file:
        return file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hand a control group to another user")
@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="no Python that every user may run")
def test_it_holds_for_an_ordinary_user_with_a_control_group(monkeypatch):
    """Namespaces of users in place of root's rights; the group was handed over, as a manager of services does."""
    if not (memory_group.CONTROL / "memory").is_dir():
        pytest.skip("control groups of version 2: a group cannot be handed over from within this one")
    control = memory_group.CONTROL / "memory" / f"attnflow-handed-{os.getpid()}"
    (control / "memory").mkdir(parents=True)
    os.chown(control / "memory", 65534, 65534)
    try:
        monkeypatch.setattr(sandbox, "memory_group", partial(memory_group.memory_group, control=control))
        monkeypatch.setattr(sys, "base_prefix", "/usr")
        assert as_nobody(lambda: self_test.self_test().problem or "it holds") == "it holds"
        assert as_nobody(lambda: run_program("import os; print(os.getuid())").output) == "65534\n"
    finally:
        (control / "memory").rmdir()
        control.rmdir()


@pytest.fixture
def tried():
    """The self-test, which remembers nothing from before and leaves nothing behind."""
    self_test.self_test.cache_clear()
    yield self_test.self_test
    self_test.self_test.cache_clear()


def test_without_bubblewrap_nothing_is_run(monkeypatch, tmp_path):
    for tool in sandbox.TOOLS[1:]:
        os.symlink(str(shutil.which(tool)), tmp_path / tool)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSandbox, match=r"bwrap not installed: on Debian, apt-get install bubblewrap"):
        run_program("raise AssertionError('it ran')")


def test_without_control_groups_nothing_is_run(tmp_path):
    with (
        pytest.raises(memory_group.NoGroup, match="no control group for memory"),
        memory_group.memory_group(1, tmp_path / "none"),
    ):
        raise AssertionError("not reached")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_without_rights_nothing_is_run():
    """The real thing: the same code in a process whose user may make no control group."""
    problem = as_nobody(lambda: self_test.self_test().problem)
    assert problem.startswith("the sandbox does not start: no control group for memory")


def test_a_bubblewrap_that_fails_is_said(monkeypatch, tmp_path, tried):
    """As where a kernel forbids namespaces."""
    fake, command = tmp_path / "bwrap", sandbox._command
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sandbox, "_command", lambda *args: [str(fake), *command(*args)[1:]])
    assert not tried().held
    assert tried().problem == "the sandbox does not start: bwrap: No permissions to create new namespace"


def test_a_protection_that_is_taken_away_is_missed(monkeypatch, tried):
    command = sandbox._command
    monkeypatch.setattr(sandbox, "_command", lambda *args: [word for word in command(*args) if word != "--unshare-net"])
    assert tried().problem in (
        "the sandbox does not hold: connects to this machine",
        "the sandbox does not hold: has a network",
    )
