"""What is refused before torch or a model is loaded: names of masks, families and formats, and layers that are not."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from attnflow.cli._output import BadUsage

_PACKAGE: Final = Path(__file__).parents[1]
_LAYERS: Final = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers"),
)
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_HEADER: Final = 1 << 16  # bytes of a GGUF file in which its sizes stand
_TEXT, _LIST = 8, 9
# Of GGUF's types; a text begins with its length.
_FORMS: Final = {**dict(enumerate("BbHhIif?Q")), 10: "Q", 11: "q", 12: "d"}
_WORDS: Final = {"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count"}  # of GGUF


@cache
def mask_names() -> Sequence[str]:
    """The masks of the catalogue, read off the source, as to import it takes torch, and a typo does not wait for it."""
    bodies = (ast.parse(path.read_text(encoding="utf-8")).body for path in (_PACKAGE / "masks").glob("*.py"))
    made = (node for body in bodies for node in body if isinstance(node, ast.FunctionDef))
    return sorted(node.name for node in made if any(map(_is_mask, node.decorator_list)))


@cache
def family_names() -> Sequence[str]:
    """The families that `mask merge` takes, read off the source."""
    listed = _assigned(_PACKAGE / "tasks" / "derivation.py", "BY_LENGTH")
    elements = next(node for node in ast.walk(listed) if isinstance(node, ast.Set)).elts
    return sorted(node.attr if isinstance(node, ast.Attribute) else cast(ast.Name, node).id for node in elements)


@cache
def format_names() -> Sequence[str]:
    """The formats that `mask export` writes, read off the source."""
    keys = cast(ast.Dict, _assigned(_PACKAGE / "masks" / "export" / "__init__.py", "FORMATS")).keys
    return [str(cast(ast.Constant, key).value) for key in keys]


def _is_mask(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "mask"


def _assigned(path: Path, name: str) -> ast.expr:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return cast(ast.expr, node.value)
    raise AssertionError(f"{path} no longer assigns {name}")


def require_place(model: str, **places: int | Sequence[int] | None) -> None:
    """Refuse a `layer` or `head` that no part of a model has, by its config, before its weights are read.

    A model may have several towers, whose layers are counted together here: the verb itself knows which it reads.
    """
    config = config_of(model) if any(place is not None for place in places.values()) else {}
    for option, given in places.items():
        layers = option.startswith("layer")
        counts = list(_counts(config, _LAYERS if layers else _HEADS))
        most = (sum if layers else max)(counts or [0]) - 1
        for place in [given] if isinstance(given, int) else given or ():
            if counts and not -most - 1 <= place <= most:
                raise BadUsage(f"{option} must be at most {most}, got {place}: {model} has {most + 1}, numbered from 0")


def _counts(config: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    yield from (value for name in names if isinstance(value := config.get(name), int))
    for part in config.values():
        if isinstance(part, dict):
            yield from _counts(cast("dict[str, Any]", part), names)


def config_of(model: str) -> Mapping[str, Any]:
    """The config of a model by its name, as plain data; empty where it is not here, or in a form of its own."""
    from attnflow.models.loading.names import resolve

    try:
        place = resolve(model)
        if isinstance(place, str):
            return _cached(place)
        if place.is_dir() and (place / "config.json").is_file():
            return json.loads((place / "config.json").read_text(encoding="utf-8"))
        files = sorted(place.glob("*.gguf")) if place.is_dir() else [place]
        return _of_gguf(files[0]) if len(files) == 1 else {}
    except (
        OSError,
        ValueError,
        ImportError,
        LookupError,
        struct.error,
    ):  # what is wrong with it is said when it is loaded
        return {}


def _cached(hub_id: str) -> Mapping[str, Any]:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return json.loads(Path(found).read_text(encoding="utf-8")) if isinstance(found, str) else {}


def _of_gguf(file: Path) -> Mapping[str, Any]:
    """The first numbers of a GGUF header; the gguf package reads all words of the vocabulary, for seconds."""
    with file.open("rb") as opened:
        content = opened.read(_HEADER)
    found: dict[str, Any] = {}
    at = 16  # after the magic, the version and the count of tensors

    def read(form: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{form}", content, at)
        at += struct.calcsize(f"<{form}")
        return value

    def value_of(kind: int) -> Any:
        nonlocal at
        if kind == _LIST:
            of, count = read("I"), read("Q")
            return [value_of(of) for _ in range(count)]
        value = read(_FORMS[kind])
        at += value if kind == _TEXT else 0
        return value

    with suppress(struct.error, KeyError):  # the end of what was read, in the words of the vocabulary
        for _ in range(read("Q") if content[:4] == b"GGUF" else 0):
            length = read("Q")
            key, at = content[at : at + length].decode(errors="replace").partition(".")[2], at + length
            value = value_of(read("I"))
            found |= {name: value for name, word in _WORDS.items() if word == key}
    return found
