"""Models in GGUF files: unpacked once, into a cache folder of this user, whole or not at all."""

from __future__ import annotations

import copy
import hashlib
import io
import logging
import os
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core.errors import MissingExtra
from attnflow._core.files import write_folder
from attnflow.models.checkpoints import BadCheckpoint, open_weights
from attnflow.models.checkpoints.files import check_sizes, first_line

_LOG: Final = logging.getLogger("attnflow.models")
_Entry = TypeVar("_Entry", PreTrainedModel, PreTrainedTokenizerBase)


def load_gguf(
    file: Path, dtype: torch.dtype, tokenizer: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a GGUF file's model and, on request, its tokenizer, unpacked once into the cache.

    Transformers treats a GGUF model as quantised and refuses to save or train it. We copy the weights to a fresh model
    in float32, with identical logits, cached under the file's hash and the version of transformers.
    """

    def unpacked(folder: Path) -> PreTrainedModel:
        return cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    model = _cached(f"{gguf_key(file)}-model", unpacked, lambda: _unpack(file))
    model.config._name_or_path = model.name_or_path = str(file.parent)
    model.config.dtype = dtype
    nn.Module.to(model, dtype)
    return model, gguf_tokenizer(file) if tokenizer else None


def gguf_key(file: Path) -> str:
    """Return the cache key of a file: its hash and the version of transformers."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:32]
    return f"gguf-{digest}-transformers-{transformers.__version__}"


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a GGUF file, likewise cached."""

    def unpacked(folder: Path) -> PreTrainedTokenizerBase:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder))

    words = _cached(f"{gguf_key(file)}-tokenizer", unpacked, lambda: _unpack_tokenizer(file))
    words.name_or_path = str(file.parent)
    return words


def _cached(key: str, load: Callable[[Path], _Entry], unpack: Callable[[], _Entry]) -> _Entry:
    """Load an entry of the cache; unpack and store it if missing or damaged."""
    entry = folder() / key
    if entry.is_dir():
        try:
            return load(entry)
        except Exception as error:  # whatever a damaged file makes transformers raise
            _LOG.warning("%s cannot be loaded and is made again: %s", entry, first_line(error))
    value = unpack()
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with write_folder(entry) as part:
            value.save_pretrained(part)
    except OSError as error:
        _LOG.warning("%s cannot be kept for the next time: %s", key, error)
    return value


def require_gguf() -> None:
    """Raise `MissingExtra` without the packages that read GGUF."""
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise MissingExtra(module, "hf", "reading a GGUF file")


def _unpack(file: Path) -> PreTrainedModel:
    require_gguf()
    weights = open_weights(file)  # reads the header alone, which transformers trusts
    check_sizes(str(file), weights.config, len(weights.shapes))
    try:
        with redirect_stderr(io.StringIO()):  # the one bar of transformers that asks nobody whether it may show
            packed = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # a truncated or unknown file fails anywhere in the parser
        raise BadCheckpoint(f"{file} is no model that transformers reads: {first_line(error)}") from error
    config = copy.deepcopy(packed.config)
    config.__dict__.pop("quantization_config", None)
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):  # its initial values are drawn, then overwritten
        model = cast(PreTrainedModel, type(packed)(config))
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    return model


def _unpack_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    try:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name))
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise BadCheckpoint(f"{file} has no tokenizer: {first_line(error)}; pass tokenizer=False") from error


def folder() -> Path:
    """Where the cache is: `$ATTNFLOW_CACHE`, or `attnflow` in `$XDG_CACHE_HOME`, which is `~/.cache` by default."""
    own = os.environ.get("ATTNFLOW_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "attnflow"
