"""Functions that a file or a command calls by name, with parameters read from their signatures."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, TypeVar

from attnflow._core.plain import as_integer, as_list, as_object, close_to, expect, only_keys

_T = TypeVar("_T")
LARGEST_NAMED: Final = 1 << 22  # beyond it the machine would run out of memory before anything is shown
_TYPED: Final = {  # what a person should have typed
    "bool": "true or false",
    "int": "an integer",
    "ints": "integers separated by commas, such as {}=0,2,5",
}


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: Literal["int", "bool", "ints", "text"]  # "ints": a list of integers
    required: bool
    default: object
    choices: tuple[str, ...] = ()  # the allowed texts, if they are few

    def bounded(self, value: int) -> int:
        if value > LARGEST_NAMED:
            limit = f"{LARGEST_NAMED:,}"
            raise ValueError(f"{self.name} is at most {limit} by name, got {value}: for more, call it in Python")
        return value

    def read(self, text: str) -> object:
        items = text.strip().removeprefix("[").removesuffix("]").split(",")
        try:
            if self.kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if self.kind == "ints":
                return [int(item) for item in items if item.strip() or len(items) > 1]
            value = int(text) if self.kind == "int" else text
        except (KeyError, ValueError):
            wanted = _TYPED[self.kind].format(self.name)
            raise ValueError(f"{self.name} must be {wanted}, got {self.name}={text}") from None
        if self.choices and text not in self.choices:
            raise ValueError(f"{self.name} must be one of {', '.join(self.choices)}, got {self.name}={text}")
        return self.bounded(value) if isinstance(value, int) else value

    def check(self, value: object, where: str) -> object:
        if value is None and not self.required and self.default is None:
            return None
        if self.kind == "int":
            return self.bounded(as_integer(value, where))
        if self.kind == "ints":
            return [as_integer(item, where) for item in as_list(value, where)]
        return expect(value, where, *((bool, "true or false") if self.kind == "bool" else (str, "text")))


@dataclass(frozen=True)
class Named(Generic[_T]):
    name: str
    function: Callable[..., _T]
    parameters: tuple[Parameter, ...]
    summary: str
    leading: tuple[str, ...] = ()  # names of first arguments that the caller supplies, for the signature
    example: Mapping[str, str] = field(default_factory=dict)  # what a person types for the parameters

    @property
    def signature(self) -> str:
        """`name(parameter, parameter=default)`."""
        own = [p.name if p.required else f"{p.name}={json.dumps(p.default)}" for p in self.parameters]
        return f"{self.name}({', '.join([*self.leading, *own])})"

    def read(self, settings: Mapping[str, str]) -> dict[str, object]:
        """Parse typed settings such as {"window": "4"}; `ValueError` for an unknown name or bad text."""
        parameters = {parameter.name: parameter for parameter in self.parameters}
        for name in settings:
            if name not in parameters:
                raise ValueError(f"{self.signature} has no parameter {name!r}{close_to(name, parameters)}")
        return {name: parameters[name].read(text) for name, text in settings.items()}

    def require(self, values: Mapping[str, object]) -> None:
        """Refuse values that lack a parameter without a default."""
        missing = [p.name for p in self.parameters if p.required and p.name not in values]
        if missing:
            raise ValueError(f"{self.signature} needs {' and '.join(missing)}")

    def check(self, values: object, where: str) -> dict[str, object]:
        """Check parameters from JSON; `ValueError` names the place of a missing or wrong one."""
        mapping = as_object(values, f"{where}.parameters")
        required, optional = ([p.name for p in self.parameters if p.required is kind] for kind in (True, False))
        only_keys(mapping, f"{where}: {self.signature}", required, optional)
        return {p.name: p.check(mapping[p.name], f"{where}: {p.name}") for p in self.parameters if p.name in mapping}


def named(
    function: Callable[..., _T], leading: Sequence[str] = (), example: Mapping[str, str] | None = None
) -> Named[_T]:
    """Describe a function by its signature, without the `leading` parameters."""
    hints = typing.get_type_hints(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name not in leading]
    summary = (inspect.getdoc(function) or "").split("\n", 1)[0].rstrip(".")
    described = tuple(_parameter(p, hints[p.name]) for p in parameters)
    return Named(function.__name__, function, described, summary, tuple(leading), dict(example or {}))


def find(name: str, entries: Mapping[str, _T], what: str) -> _T:
    """Return `entries[name]`; `ValueError` suggests the closest names for an unknown one."""
    if name not in entries:
        hint = close_to(name, entries) or f"; known: {', '.join(sorted(entries))}"
        raise ValueError(f"unknown {what} {name!r}{hint}")
    return entries[name]


def _parameter(parameter: inspect.Parameter, hint: object) -> Parameter:
    required = parameter.default is inspect.Parameter.empty
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = [option for option in (typing.get_args(hint) if union else (hint,)) if option is not type(None)]
    kind: Literal["int", "bool", "ints", "text"] = "text"
    if bool in options:
        kind = "bool"
    elif int in options:
        kind = "int"
    elif any(typing.get_origin(option) not in (None, Literal) for option in options):
        kind = "ints"
    choices = tuple(str(c) for h in options if typing.get_origin(h) is Literal for c in typing.get_args(h))
    return Parameter(parameter.name, kind, required, None if required else parameter.default, choices)
