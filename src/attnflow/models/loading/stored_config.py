"""The config of a model by its name, as plain data, before torch or weights are loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attnflow.models.loading.names import resolve

_HEADER: Final = 1 << 16  # bytes of a GGUF file in which its sizes stand
_TEXT, _LIST = 8, 9
# Of GGUF's types; a text begins with its length.
_FORMS: Final = {**dict(enumerate("BbHhIif?Q")), 10: "Q", 11: "q", 12: "d"}
_WORDS: Final = {"num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count"}  # of GGUF


def stored_config(model: str) -> Mapping[str, Any]:
    """Read the config of a model by its name; empty where it is not here, or in a form of its own."""
    try:
        place = resolve(model)
        if isinstance(place, str):
            return _cached(place)
        if place.is_dir() and (place / "config.json").is_file():
            return _read(place / "config.json")
        files = sorted(place.glob("*.gguf")) if place.is_dir() else [place]
        return _of_gguf(files[0]) if len(files) == 1 else {}
    except (OSError, ValueError, ImportError, LookupError, RecursionError, struct.error):  # loading it says why
        return {}


def _cached(hub_id: str) -> Mapping[str, Any]:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, "config.json")
    return _read(Path(found)) if isinstance(found, str) else {}


def _read(file: Path) -> Mapping[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


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
