"""What is refused before torch or a model is loaded: names of masks, families and formats, and layers that are not."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from attnflow.cli._output import BadUsage
from attnflow.models.loading.stored_config import stored_config

_PACKAGE: Final = Path(__file__).parents[1]
# (keys that count layers or heads, the sets of them that tell all): what has others is left to the verb.
_LAYERS: Final = (
    re.compile(r"(num_|n_)?(hidden_)?layers?|num_blocks|depths?|\w*(en|de)coder\w*_layers"),
    [{"num_hidden_layers"}, {"n_layer"}, {"n_layers"}, {"depth"}, {"num_layers", "num_decoder_layers"}]
    + [{f"{of}encoder_layers", f"{of}decoder_layers"} for of in ("", "num_")],
)
_HEADS: Final = (
    re.compile(r"(num_|n_)?(query_)?heads?|(?!.*(key|kv))\w*att\w*_heads?\w*"),
    [{"num_attention_heads"}, {"n_head"}, {"n_heads"}, {"num_heads"}, {"attention_heads"}]
    + [{f"{of}encoder_attention_heads", f"{of}decoder_attention_heads"} for of in ("", "num_")],
)


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
    config = stored_config(model) if any(place is not None for place in places.values()) else {}
    for option, given in places.items():
        layers = option.startswith("layer")
        counts = _counts(config, *(_LAYERS if layers else _HEADS))
        most = (sum if layers else max)(counts or [0]) - 1
        for place in [given] if isinstance(given, int) else given or ():
            if counts and not -most - 1 <= place <= most:
                raise BadUsage(f"{option} must be at most {most}, got {place}: {model} has {most + 1}, numbered from 0")


def _counts(config: Mapping[str, Any], form: re.Pattern[str], known: Sequence[set[str]]) -> list[int]:
    """The numbers that a config and its parts state; none where one leaves them to a default, or to a list."""
    parts = [cast("dict[str, Any]", part) for key, part in config.items() if _is_config(key, part)]
    below = [_counts(part, form, known) for part in parts]
    stated = set(filter(form.fullmatch, config))
    holds = len(parts) > 1 and not stated  # nothing but other models
    stated -= {"num_hidden_layers", "num_attention_heads"} if len(stated) > 1 else set()  # copies
    own = [config[key] for key in stated]
    whole = all(below) and (holds or (stated in known and all(type(count) is int and count > 0 for count in own)))
    return [*own, *itertools.chain(*below)] if whole else []


def _is_config(key: str, part: Any) -> bool:
    named = key in ("text_config", "vision_config", "audio_config")
    return isinstance(part, dict) and (named or bool(cast("dict[str, Any]", part).get("model_type")))
