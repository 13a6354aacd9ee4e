"""A model with other answers, saved: what `attnflow knowledge edit` writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

from attnflow._core.files import write_folder
from attnflow._core.progress import Progress
from attnflow.knowledge.facts import EditReport
from attnflow.knowledge.hf.convert import from_ffn, to_ffn
from attnflow.knowledge.hf.edit import Facts, edit
from attnflow.models.loaded import Loaded


def save_edited(
    loaded: Loaded,
    facts: Facts,
    folder: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    untouched: Sequence[str] = (),
    progress: Progress | None = None,
) -> EditReport:
    """Edit a model and write it, with its tokenizer, as an ordinary transformers model; the one given stays as it is.

    In float32, whatever the model is in: the changes are too small for half precision. The folder is replaced in one
    step.

    Raises:
        ValueError: as `edit`. Nothing is written.
        FileNotFoundError: the folder around it does not exist.

    Cost: as `edit`, and two copies of the model.
    """
    converted = from_ffn(loaded).float()
    with edit(
        *(converted, facts), layers=layers, untouched=untouched, tokenizer=loaded.tokenizer, progress=progress
    ) as handle:
        plain, tokenizer = cast(Any, to_ffn(converted)), cast(Any, loaded.tokenizer)
        with write_folder(folder) as part:
            plain.save_pretrained(part)
            tokenizer.save_pretrained(part)
        return handle.report
