"""`Result`: every result converts to JSON, CSV and pandas, saves itself by suffix, and draws itself in a notebook."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Final, SupportsFloat, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from cattrs import ClassValidationError, Converter, transform_error
from cattrs.strategies import configure_union_passthrough
from torch import Tensor

from attnflow._core.files import write_atomically
from attnflow._core.lazy import renderer

_R = TypeVar("_R", bound="Result")  # typing.Self is unknown to the checker of types that the tests run under

_KIND: Final = "attnflow"  # the key of a JSON object that names the class of the result
_VERSION: Final = "version"
_OK: Final = "ok"  # the verdict of results that judge: written for readers, derived again when read
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Result:
    """Base class of all results: a frozen dataclass with the same conversions.

    `from_json` reads exactly what `to_json` wrote, including NaN, infinities, tensors and arrays. A subclass overrides
    `rows` to define its table; a result that judges has a property `ok`.
    """

    version: ClassVar[int] = 1  # of the layout; raised when a field changes its meaning

    def to_dict(self) -> dict[str, object]:
        """All fields as plain Python values, with the class name under "attnflow" and any verdict under "ok"."""
        verdict = {_OK: getattr(self, _OK)} if _judges(type(self)) else {}
        return {_KIND: type(self).__name__, _VERSION: self.version, **verdict, **_converter.unstructure(self)}

    def to_json(self) -> str:
        """`to_dict` as strict JSON; non-finite numbers become the strings "NaN", "Infinity" and "-Infinity"."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls: type[_R], values: Mapping[str, object]) -> _R:
        """Rebuild the result from what `to_dict` returned.

        Raises:
            ValueError: another class or version, or a missing or wrong field, which the message names.
        """
        content = cls._content(values)
        try:
            return _converter.structure(content, cls)
        except ClassValidationError as error:
            raise ValueError(f"a saved {cls.__name__} is damaged: {transform_error(error)[0]}") from error

    @classmethod
    def _content(cls, values: Mapping[str, object]) -> dict[str, object]:
        """Return a saved result's fields, after checking its kind and version."""
        kind, version = values.get(_KIND), values.get(_VERSION)
        if kind != cls.__name__:
            what = repr(kind) if isinstance(kind, str) else 'something without the key "attnflow"'
            raise ValueError(f"expected a saved {cls.__name__}, got {what}")
        if version != cls.version:
            raise ValueError(f"expected version {cls.version} of a saved {cls.__name__}, got {version!r}")
        derived = (_KIND, _VERSION, _OK) if _judges(cls) else (_KIND, _VERSION)
        return {name: value for name, value in values.items() if name not in derived}

    @classmethod
    def from_json(cls: type[_R], text: str) -> _R:
        """Rebuild the result from what `to_json` returned.

        Raises:
            ValueError: the text is not a JSON object, or as for `from_dict`.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object with a saved {cls.__name__}, got {type(values).__name__}")
        return cls.from_dict(cast(dict[str, object], values))

    def rows(self) -> Sequence[Mapping[str, object]]:
        """The result as a table: one mapping per row, all with the same keys (default: one row of its fields)."""
        values = {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}
        return [{name: value for name, value in values.items() if isinstance(value, str | int | float | None)}]

    def to_csv(self) -> str:
        """Return `rows` as CSV with a header."""
        text = io.StringIO()
        if rows := self.rows():
            writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return text.getvalue()

    def to_pandas(self) -> Any:
        """Return `rows` as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed; no extra of this package installs it.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "a table as a DataFrame needs pandas, which is not installed: pip install pandas"
            ) from error
        return pandas.DataFrame(list(self.rows()))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file, whole or not at all: `.json`, `.csv`, `.html`, `.svg`, `.pdf` or `.png`.

        Raises:
            ValueError: the suffix is another one.
            MissingExtra: the picture needs matplotlib, which is not installed.
        """
        target = Path(path)
        suffix = target.suffix.lower()
        if suffix not in (".json", ".csv", ".html", ".svg", ".png", ".pdf"):
            raise ValueError(f"the name must end in .json, .csv, .html, .svg, .png or .pdf, got {target.name!r}")
        if suffix in (".json", ".csv"):
            content = (self.to_json() if suffix == ".json" else self.to_csv()).encode()
        else:
            content = renderer().encode(self, suffix)
        with write_atomically(target) as file:
            file.write(content)
        return target

    def _repr_html_(self) -> str:
        return renderer().notebook(self)


def _judges(kind: type) -> bool:
    return isinstance(getattr(kind, _OK, None), property)


def _unstructure_float(value: SupportsFloat) -> float | str:
    number = float(value)  # of numpy, too
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _dump_array(value: Tensor | npt.NDArray[Any]) -> dict[str, object]:
    array = value.detach().cpu() if isinstance(value, Tensor) else value
    numbers: list[object] = array.reshape(-1).tolist()
    values = [_unstructure_float(number) if isinstance(number, float) else number for number in numbers]
    return {"dtype": str(array.dtype).removeprefix("torch."), "shape": list(array.shape), "values": values}


def _numbers(values: Mapping[str, Any]) -> list[Any]:
    return [_NOT_FINITE[number] if isinstance(number, str) else number for number in values["values"]]


def _load_tensor(values: Mapping[str, Any], _: object) -> Tensor:
    return torch.tensor(_numbers(values), dtype=getattr(torch, values["dtype"])).reshape(values["shape"])


def _load_array(values: Mapping[str, Any], _: object) -> npt.NDArray[Any]:
    return np.array(_numbers(values), dtype=np.dtype(values["dtype"])).reshape(values["shape"])


def _of(kind: type) -> Callable[[Any], bool]:
    def matches(annotation: Any) -> bool:
        array = getattr(annotation, "array_type", annotation)
        return isinstance(array, type) and issubclass(array, kind)

    return matches


_converter: Final = Converter(forbid_extra_keys=True)
configure_union_passthrough(int | str | bool | None, _converter)
_converter.register_unstructure_hook(float, _unstructure_float)
_converter.register_unstructure_hook(int, int)  # numpy's numbers, too
_converter.register_unstructure_hook(bool, bool)
_converter.register_structure_hook(
    float, lambda value, _: float(_NOT_FINITE[value] if isinstance(value, str) else value)
)
_converter.register_structure_hook_func(lambda hint: hint is object, lambda value, _: value)
_converter.register_unstructure_hook_func(_of(Tensor), _dump_array)
_converter.register_unstructure_hook_func(_of(np.ndarray), _dump_array)
_converter.register_structure_hook_func(_of(Tensor), _load_tensor)
_converter.register_structure_hook_func(_of(np.ndarray), _load_array)
