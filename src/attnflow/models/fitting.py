"""Whether a config and weights fit each other, as far as it can be told before and after a model is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from transformers import PreTrainedModel

from attnflow.models.checkpoints.files import BadCheckpoint

_MOST_LAYERS: Final = 2048  # that are made without asking whether there are weights for them: a second or two
_LARGEST_HEADER: Final = 100_000_000  # the limit of safetensors


def check_sizes(name: str, config: Mapping[str, object], tensors: int) -> None:
    """Refuse a config of more layers than there are tensors before a module is made of each, which takes for ever.

    Raises:
        BadCheckpoint: it asks for more than there are, and more than a model has.
    """
    for word, size in _sizes(config):
        if size > max(_MOST_LAYERS, tensors):
            raise BadCheckpoint(f"{name}: {word} of its config is {size}, with {tensors} tensors in its weights")


def names_in(folder: str) -> int:
    """How many tensors the safetensors files of a folder hold; 0 where there is no such folder."""
    return sum(len(_names_of(file)) for file in Path(folder).glob("*.safetensors"))


def _sizes(config: Mapping[Any, object]) -> Iterator[tuple[str, int]]:
    """The numbers of modules that a config asks for, in configs within configs, too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _sizes(cast(Mapping[Any, object], value))
        elif isinstance(name, str) and any(word in name for word in ("layer", "depth", "expert")):
            if isinstance(value, int):
                yield name, value
            elif isinstance(value, list | tuple):
                yield f"the length of {name}", len(cast(Sequence[object], value))


def _names_of(file: Path) -> Mapping[str, object]:
    """The tensors of a safetensors file; none if it is damaged, which is said when it is read."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length <= min(_LARGEST_HEADER, file.stat().st_size) else {}
    except (ValueError, RecursionError):
        return {}
    return cast(Mapping[str, object], header) if isinstance(header, dict) else {}


def check_names(folder: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Refuse weights of another model than the config describes: what is missing has been drawn at random.

    Args:
        folder: for messages.
        model: as transformers has loaded it.
        report: what transformers says of the loading.

    Raises:
        BadCheckpoint: most of its tensors are missing, or most of those that are there belong to no part of it.
    """
    own, theirs = len(model.state_dict()), len(report["unexpected_keys"])
    missing = len(report["missing_keys"])
    if 2 * missing > own or theirs > own - missing:
        raise BadCheckpoint(
            f"{folder} holds the weights of another model than its config describes: {missing} of {own} tensors of a "
            f"{type(model).__name__} are missing, {theirs} are of no use to it"
        )


def first_line(error: Exception) -> str:
    """What an error says, without what follows in other lines."""
    return str(error).strip().split("\n")[0][:300]
