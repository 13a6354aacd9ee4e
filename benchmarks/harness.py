"""Runs every case in a process of its own, with a time limit, and appends the figures to results.csv.

A figure belongs to a commit: from a tree with changes nothing is appended to results.csv; `--force FILE` measures all
the same and appends to a file elsewhere.

A benchmark file says which `Case`s it has for a device and calls `main(cases)`. A case names an importable function
that prepares the inputs, checks them against a reference where there is one, and returns the callable to time; what it
prepares is not timed. All providers of one `what` and `size` run in one go, ours first; `ratio` is the provider's
median over ours. A case that takes too long or too much memory is a row too.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = "benchmarks/results.csv"
OURS = "attnflow"
READY = "ready\n"
FIELDS = ["what", "provider", "size", "metric", "p20", "p50", "p80", "peak_mb", "ratio", "note"]
FIELDS += ["device", "versions", "commit", "date"]


@dataclass(frozen=True)
class Case:
    """One timing: `function(*arguments)` in module `module` returns the callable to time."""

    what: str
    provider: str
    size: int
    module: str
    function: str
    arguments: tuple[object, ...] = ()
    repeats: int = 7
    note: str = ""


class Seconds(float):
    """What a case has timed itself, such as in a browser: taken at its word in place of the harness's clock."""


def main(cases: Callable[[str], Sequence[Case]], packages: Sequence[str], time_limit: float = 60.0) -> None:
    """Run the cases of the chosen device ("cpu" or "cuda") and append their rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="run only the cases whose name contains this")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--force", type=Path, metavar="FILE", help="append to FILE, whatever the state of the tree")
    options = parser.parse_args()
    if options.run:
        print(json.dumps(_measure(Case(**json.loads(options.run)))))
        return
    target = destination(ROOT, options.force)
    chosen = [case for case in cases(options.device) if options.only in case.what]
    if not chosen:
        print(f"nothing to measure on {options.device}")
        return
    common = _environment(packages, options.device)
    medians: dict[tuple[str, int], float] = {}
    fresh = not target.exists()
    with target.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if fresh:
            writer.writeheader()
        for case in chosen:
            row = _run(case, time_limit)
            if case.provider == OURS and "p50" in row:
                medians[case.what, case.size] = float(row["p50"])
            base = medians.get((case.what, case.size))
            ratio = f"{float(row['p50']) / base:.2f}" if base and "p50" in row else ""
            row |= {
                "what": case.what,
                "provider": case.provider,
                "size": case.size,
                "metric": "seconds",
                "ratio": ratio,
            }
            writer.writerow(common | row)
            file.flush()
            print(
                f"{case.what:34} {case.provider:28} {case.size:7} {row.get('p50', row['note']):>10} {ratio:>9}",
                flush=True,
            )


def destination(root: Path, force: Path | None = None) -> Path:
    """The file to append to: that of the project, or `force`.

    Raises:
        SystemExit: the tree is not that of a commit, or `force` is the file of the project.
    """
    results = root / RESULTS
    if force is not None:
        if force.resolve() == results.resolve():
            raise SystemExit(f"--force writes to a file elsewhere: {RESULTS} holds figures of commits only")
        return force
    changes = _changes(root)
    if changes is None:
        raise SystemExit("no git repository here, so no commit to name: measure with --force FILE, a file elsewhere")
    if changes:
        raise SystemExit(
            f"the tree has changes, so its figures would belong to no commit:\n{changes}\n"
            "commit them first, or measure with --force FILE, a file elsewhere"
        )
    return results


def _changes(root: Path) -> str | None:
    """What differs from the last commit, the file of figures aside; None without a repository."""
    return _git(root, "status", "--porcelain", "--", ".", f":!{RESULTS}")


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else None


def _run(case: Case, time_limit: float) -> dict[str, object]:
    command = [sys.executable, "-W", "ignore", str(Path(sys.argv[0])), "--run", json.dumps(asdict(case))]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert child.stdout is not None
        # The limit is on what is timed, not on building inputs. `readline` would read ahead what `communicate` wants.
        prepared = os.read(child.stdout.fileno(), len(READY)) == READY.encode()
        try:
            output, _ = child.communicate(timeout=time_limit)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return {"note": f"over {time_limit:.0f} s"}
        if child.returncode or not prepared:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["killed"])[-1]
            return {"note": "out of memory" if "MemoryError" in last or child.returncode < 0 else last[:120]}
    return json.loads(output.splitlines()[-1])


def _measure(case: Case) -> dict[str, object]:
    timed: Callable[[], object] = getattr(importlib.import_module(case.module), case.function)(*case.arguments)
    print(READY, end="", flush=True)
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    on_gpu = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    seconds: list[float] = []
    spent = 0.0
    peak = 0.0
    while len(seconds) < case.repeats and (spent < 10 or not seconds):
        start = time.perf_counter()
        result = timed()
        seconds.append(result if isinstance(result, Seconds) else time.perf_counter() - start)
        spent += seconds[-1]
        peak = peak or (sys.modules["torch"].cuda.max_memory_allocated() / 2**20 if on_gpu else _peak() - before)
        del result
    seconds.sort()
    note = str(getattr(timed, "note", case.note))  # what is known only when it was prepared, such as quality
    p20, p50, p80 = (seconds[round(q * (len(seconds) - 1))] for q in (0.2, 0.5, 0.8))
    return {"p20": f"{p20:.5f}", "p50": f"{p50:.5f}", "p80": f"{p80:.5f}", "peak_mb": f"{peak:.0f}", "note": note}


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _peak() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def _environment(packages: Sequence[str], device: str) -> dict[str, object]:
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    name = f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores"
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device: run this on a machine with a GPU, or with --device cpu")
        name = torch.cuda.get_device_name()
    return {
        "device": name,
        "versions": "; ".join([f"python {platform.python_version()}", *versions]),
        "commit": _commit(ROOT),
        "date": datetime.date.today().isoformat(),
    }


def _commit(root: Path) -> str:
    """The commit that a figure belongs to; "-dirty" if what was measured is not it, "unknown" without a repository."""
    commit = _git(root, "rev-parse", "--short", "HEAD")
    return "unknown" if commit is None else f"{commit}-dirty" if _changes(root) else commit
