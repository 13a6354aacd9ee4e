"""The catalogue of masks as the command line sees it: names, parameters, and masks made from typed text."""

from __future__ import annotations

import difflib
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar, cast

from attnflow.cli._output import BadUsage

if TYPE_CHECKING:
    from attnflow.masks import Mask

_T = TypeVar("_T")

DEFAULT_N: Final = 16
LARGEST: Final = 1 << 22

# What to type for masks whose parameters have no natural default; shown in messages, and each is tested.
EXAMPLES: Final[Mapping[str, str]] = {
    "attention_sink": "--set sinks=2 --set window=4",
    "big_bird": "--n 32 --set block=2",
    "block_causal": "--set block=4",
    "block_diffusion": "--set num_blocks=4 --set block=2",
    "block_two_stream": "--set num_blocks=4 --set block=2",
    "butterfly": "--n 6",
    "causal": "--n 8",
    "dilated_window": "--set window=3 --set dilation=2",
    "document": "--set lengths=5,3,4",
    "full": "--n 8",
    "global_tokens": "--set indices=0,8",
    "longformer": "--set window=3 --set indices=0",
    "multi_token_prediction": "--n 6 --set horizon=3",
    "prefix_lm": "--set prefix=6",
    "sliding_window": "--set window=4",
    "tree": "--set parents=-1,0,0,1,1,2",
    "xlnet_two_stream": "--set permutation=2,0,3,1",
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a catalogue mask or task family.

    Attributes:
        kind: "int", "bool", "ints" (a list of integers) or "text".
        choices: the allowed texts, if they are few.
    """

    name: str
    kind: Literal["int", "bool", "ints", "text"]
    required: bool
    default: object
    choices: tuple[str, ...] = ()

    def bounded(self, value: int) -> int:
        """`value`, unless it is so large that the machine would run out of memory before anything is shown."""
        if value > LARGEST:
            raise BadUsage(f"{self.name} is at most {LARGEST:,} on the command line, got {value}")
        return value

    def read(self, text: str) -> object:
        """The value that `text` stands for."""
        given = f"{self.name}={text}"
        if self.kind == "bool":
            if text.lower() not in ("true", "false"):
                raise BadUsage(f"{self.name} must be true or false, got {given}")
            return text.lower() == "true"
        if self.kind == "int":
            return self.bounded(_integer(text, f"{self.name} must be an integer, got {given}"))
        if self.kind == "ints":
            items = text.strip().removeprefix("[").removesuffix("]").split(",")
            message = f"{self.name} must be integers with commas between them, such as {self.name}=0,2,5, got {given}"
            return [_integer(item, message) for item in items if item.strip() or len(items) > 1]
        if self.choices and text not in self.choices:
            raise BadUsage(f"{self.name} must be one of {', '.join(self.choices)}, got {given}")
        return text


@dataclass(frozen=True)
class Entry:
    """A mask of the catalogue: its function, its parameters, its relation in one line."""

    name: str
    function: Callable[..., Mask]
    parameters: tuple[Parameter, ...]
    relation: str

    @property
    def signature(self) -> str:
        """`name(parameter, parameter=default)`."""
        return f"{self.name}({', '.join(_declare(p) for p in self.parameters)})"


def entries() -> dict[str, Entry]:
    """The catalogue by name, read from the functions of `attnflow.masks` themselves."""
    from attnflow import masks

    names = [n for n in masks.__all__ if not n.startswith("from_") and not inspect.isclass(getattr(masks, n))]
    return {name: _entry(name, getattr(masks, name)) for name in sorted(names)}


def _entry(name: str, function: Callable[..., Mask]) -> Entry:
    relation = (inspect.getdoc(function) or "").split("\n", 1)[0].rstrip(".")
    return Entry(name, function, parameters_of(function), relation)


def parameters_of(function: Callable[..., object], skip: Sequence[str] = ()) -> tuple[Parameter, ...]:
    """The parameters of `function` that the command line can set, from its signature."""
    hints = typing.get_type_hints(function)
    found = [p for p in inspect.signature(function).parameters.values() if p.name not in skip]
    return tuple(_parameter(p, hints[p.name]) for p in found)


def _parameter(parameter: inspect.Parameter, hint: object) -> Parameter:
    required = parameter.default is inspect.Parameter.empty
    default: object = None if required else parameter.default
    options = [h for h in _alternatives(hint) if h is not type(None)]
    kind: Literal["int", "bool", "ints", "text"] = "text"
    if bool in options:
        kind = "bool"
    elif int in options:
        kind = "int"
    elif any(typing.get_origin(h) not in (None, Literal) for h in options):
        kind = "ints"
    choices = tuple(str(c) for h in options if typing.get_origin(h) is Literal for c in typing.get_args(h))
    return Parameter(parameter.name, kind, required, default, choices)


def _alternatives(hint: object) -> tuple[object, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _declare(parameter: Parameter) -> str:
    return parameter.name if parameter.required else f"{parameter.name}={json.dumps(parameter.default)}"


def settings_from(texts: Iterable[str]) -> dict[str, str]:
    """`["window=4", "causal=false"]` as a dict; every name once."""
    settings: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        name = name.strip()
        if not sign or not name:
            raise BadUsage(f"--set takes NAME=VALUE, such as --set window=4, got {text!r}")
        if name in settings:
            raise BadUsage(f"--set {name}=... is given twice")
        settings[name] = value.strip()
    return settings


def make_mask(name: str, n: int | None, settings: Mapping[str, str]) -> Mask:
    """The catalogue mask `name`; `n` fills the parameter of that name (by default 16).

    Raises:
        BadUsage: an unknown name or parameter, a value of the wrong type, a missing parameter, or values that the
            mask's own checks refuse.
    """
    entry = find(name, entries(), "mask", "`attnflow mask list` shows all")
    known = {p.name: p for p in entry.parameters}
    if n is not None:
        if "n" not in known:
            raise BadUsage(f"{entry.signature} has no parameter n; {_example(name)}")
        if "n" in settings:
            raise BadUsage("n is given twice, by --n and by --set n=...")
    values = read_settings(entry.signature, known, settings)
    if "n" in known and "n" not in values:
        values["n"] = DEFAULT_N if n is None else known["n"].bounded(n)
    missing = [p.name for p in entry.parameters if p.required and p.name not in values]
    if missing:
        raise BadUsage(f"{entry.signature} needs {' and '.join(missing)}; {_example(name)}")
    return call(entry.function, values)


def read_settings(signature: str, known: Mapping[str, Parameter], settings: Mapping[str, str]) -> dict[str, object]:
    """The typed values of `--set` texts for a function with the parameters `known`."""
    for name in settings:
        if name not in known:
            raise BadUsage(f"{signature} has no parameter {name!r}{close_to(name, known)}")
    return {name: known[name].read(text) for name, text in settings.items()}


def call(function: Callable[..., _T], values: Mapping[str, object]) -> _T:
    """`function(**values)`, with its refusals as bad usage."""
    try:
        return function(**values)
    except (ValueError, TypeError) as error:
        raise BadUsage(str(error)) from error


def find(name: str, known: Mapping[str, _T], what: str, hint: str) -> _T:
    """`known[name]`, or a message with the closest names."""
    if name not in known:
        raise BadUsage(f"unknown {what} {name!r}{close_to(name, known)} ({hint})")
    return known[name]


def close_to(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean ...?", or nothing."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=2, cutoff=0.5)
    return f": did you mean {' or '.join(near)}?" if near else ""


def _example(name: str) -> str:
    return f"for example: attnflow mask show {name} {EXAMPLES[name]}"


def _integer(text: str, message: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BadUsage(message) from None


def require_object(value: object, where: str) -> dict[str, object]:
    """`value` if it is a JSON object."""
    if not isinstance(value, dict):
        raise BadUsage(f"{where} must be a JSON object, got {type(value).__name__}")
    return cast(dict[str, object], value)
