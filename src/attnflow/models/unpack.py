"""Models in GGUF files: unpacked by transformers once, then loaded from the cache."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core.errors import MissingExtra
from attnflow.models import cache

_LOG: Final = logging.getLogger("attnflow.models")


_Entry = TypeVar("_Entry", PreTrainedModel, PreTrainedTokenizerBase)


def load_gguf(
    file: Path, dtype: torch.dtype, tokenizer: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model of a GGUF file and, if it is asked for, its tokenizer.

    A model read from GGUF by transformers counts as quantised: it refuses to be saved or trained. Its weights are
    therefore copied into a fresh model of the same class. That takes seconds, so that the result, in float32, goes to
    the cache, under the hash of the file's content and the version of transformers; the logits are identical.

    Raises:
        MissingExtra: the packages that read GGUF are not installed.
        ValueError: the file is damaged, or of an architecture that transformers does not read.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:32]
    key = f"gguf-{digest}-transformers-{transformers.__version__}"

    def unpacked(folder: Path) -> PreTrainedModel:
        return cast(PreTrainedModel, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    def tokens(folder: Path) -> PreTrainedTokenizerBase:
        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder))

    model = _cached(f"{key}-model", unpacked, lambda: _unpack(file))
    model.config._name_or_path = model.name_or_path = str(file.parent)
    model.config.dtype = dtype
    nn.Module.to(model, dtype)
    if not tokenizer:
        return model, None
    words = _cached(f"{key}-tokenizer", tokens, lambda: _unpack_tokenizer(file))
    words.name_or_path = str(file.parent)
    return model, words


def _cached(key: str, load: Callable[[Path], _Entry], unpack: Callable[[], _Entry]) -> _Entry:
    """What an entry of the cache holds; if there is none, it is unpacked and stored."""
    folder = cache.lookup(key)
    if folder is not None:
        return load(folder)
    value = unpack()
    try:
        cache.store(key, value.save_pretrained)
    except OSError as error:
        _LOG.warning("%s cannot be kept for the next time: %s", key, error)
    return value


def _unpack(file: Path) -> PreTrainedModel:
    for module in ("gguf", "accelerate"):
        if find_spec(module) is None:
            raise MissingExtra(module, "hf", "reading a GGUF file")
    try:
        with _without_bar():
            packed = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a truncated or unknown file fails anywhere in the parser
        raise ValueError(f"{file} is no model that transformers reads: {first_line(error)}") from error
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} has no tokenizer: {first_line(error)}; pass tokenizer=False") from error


@contextmanager
def _without_bar() -> Generator[None]:
    """The one bar of transformers that asks nobody whether it may show."""
    try:
        from transformers import modeling_gguf_pytorch_utils
    except ImportError:
        yield
        return
    reader = cast(Any, modeling_gguf_pytorch_utils)
    bar = getattr(reader, "tqdm", None)

    def no_bar(items: Iterable[object], **_: object) -> Iterable[object]:
        return items

    reader.tqdm = no_bar
    try:
        yield
    finally:
        reader.tqdm = bar


def first_line(error: Exception) -> str:
    """What an error says, without what follows in other lines."""
    return str(error).strip().split("\n")[0][:300]
