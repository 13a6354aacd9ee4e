"""Whether the sandbox holds on this machine: attacks that must fail, tried before a program of a model is run."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from experiments.evaluation.sandbox import Limits, NoSandbox, Outcome, run_program

LIMITS: Final = Limits(seconds=10.0, memory=192 << 20, processes=8, disk=4 << 20, output=1 << 16)
_WAIT: Final = replace(LIMITS, seconds=1.0)


@dataclass(frozen=True)
class SelfTest:
    """What came out.

    Attributes:
        tried: attacks, by name.
        held: whether all failed, and an honest program passed.
        problem: why programs must not be run here; "" if they may.
    """

    tried: tuple[str, ...]
    problem: str = ""

    @property
    def held(self) -> bool:
        """Whether programs may be run here."""
        return not self.problem


@cache
def self_test() -> SelfTest:
    """Try the sandbox, once in a process. About three seconds."""
    names = tuple(attacks("", 0))
    try:
        if not run_program("assert 1 + 1 == 2", LIMITS).passed:
            return SelfTest(names, "a program without a fault does not pass")
        for name, outcome in attempts().items():
            if outcome.passed:
                return SelfTest(names, f"the sandbox does not hold: {name}")
    except NoSandbox as error:
        return SelfTest(names, str(error))
    return SelfTest(names)


def attempts() -> Mapping[str, Outcome]:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        os.chmod(folder, 0o777)
        found = {
            name: run_program(source, _WAIT if name == "runs for ever" else LIMITS)
            for name, source in attacks(folder, server.getsockname()[1]).items()
        }
        if os.listdir(folder) != ["secret"] or secret.read_text() != "secret":
            found["writes a file of this machine"] = Outcome("passed", "", 0.0)
    return found


def attacks(folder: str, port: int) -> dict[str, str]:
    """Programs that pass if they get out: what they do, and their source.

    Args:
        folder: of this machine, which anybody may write to, with a file "secret" in it.
        port: of this machine, which is listened at.
    """
    return {
        "reads a file of this machine": f"open({folder + '/secret'!r}).read()",
        # Into a folder of its own /tmp it may write, which is no escape: whether the file is here is looked up.
        "writes a file of this machine": f"import os; os.makedirs({folder!r})\n"
        f"open({folder + '/new'!r}, 'w').write('x'); raise SystemExit(1)",
        "connects to this machine": f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        "has a network": "import socket; assert len(socket.if_nameindex()) > 1",
        "sees the environment": "import os; assert set(os.environ) - {'PWD', 'LC_CTYPE'}",
        "sees other processes": "import os; assert sum(name.isdigit() for name in os.listdir('/proc')) > 2",
        "has privileges": "import os; assert os.geteuid() == 0 or os.setuid(0) is None",
        "reaches a process of this machine": f"import os; assert {os.getpid()} > 2; os.kill({os.getpid()}, 0)",
        "starts more processes than it may": f"import os, time\nfor _ in range({2 * LIMITS.processes}):\n"
        "    if os.fork() == 0:\n        time.sleep(60)\n",
        "takes more memory than all its processes may": _MEMORY.format(
            count=LIMITS.processes // 2, size=LIMITS.memory // 3, total=LIMITS.memory
        ),
        "takes more memory in files than it may": f"import os\nfor n in range({LIMITS.memory // LIMITS.disk + 8}):\n"
        f"    assert os.write(os.memfd_create(str(n)), bytes({LIMITS.disk})) == {LIMITS.disk}\n",
        "fills its folder beyond its size": "for n in range(3):\n"
        f"    open(f'/tmp/{{n}}', 'wb').write(bytes({LIMITS.disk // 2}))",
        "prints without end": "while True: print('x' * 4096)",
        "runs for ever": "while True: pass",
        "leaves before its test": "import os; os._exit(0)",
    }


_MEMORY: Final = """
import os, select, time
read, write = os.pipe()
for _ in range({count}):
    if os.fork() == 0:
        block = bytearray({size})
        for place in range(0, len(block), 4096):
            block[place] = 1
        os.write(write, b"x")
        time.sleep(60)
taken = 0
while taken * {size} <= {total}:
    assert os.waitpid(-1, os.WNOHANG)[0] == 0, "one was killed"
    if select.select([read], [], [], 0.05)[0]:
        taken += len(os.read(read, 1))
"""
