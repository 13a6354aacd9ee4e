"""Checkpoints, their configs and indices, specs of masks and tasks, saved biases: damaged in one to four places."""

from __future__ import annotations

import json
import random
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

import attnflow as af
from attnflow.models.checkpoints import BadCheckpoint
from attnflow.models.loader import load_model
from tests.models import tiny
from tests.models.damage import FORMATS, SPECS, damaged, read_whole

PROMISE = (
    "A damaged file is read as what it says, or refused by one error that names it (BadCheckpoint; ValueError for "
    "specs and biases), within 4 GB of memory."
)
TRIALS = 14_000
SHORT = 28
ROOM = 4 << 30  # bytes that a trial may take; the files have some kilobytes


def trial(seed: int, folder: Path) -> str | None:
    """One damaged file of one format, read whole."""
    kinds = [*FORMATS, *SPECS, "model", "model config", "bias", "bias config"]
    kind, draw = kinds[seed % len(kinds)], random.Random(seed)
    with warnings.catch_warnings(), _room():
        warnings.simplefilter("ignore")
        try:
            if kind in SPECS:
                return _spec(kind, draw)
            file, read = _written(kind, folder)
            file.write_bytes(damaged(file.read_bytes(), draw))
            read()
        except BadCheckpoint as error:
            named = str(folder) in str(error) or "weight_block_size" in str(error)
            return None if named else f"{kind}: the message names no file: {error}"
        except (ValueError, af.AttnflowError, FileNotFoundError) as error:
            if kind.startswith("bias") and not isinstance(error, UnicodeError):
                return None if str(error) else f"{kind}: {type(error).__name__} without a message"
            return f"{kind}: {type(error).__name__}: {error}"
        except Exception as error:
            return f"{kind}: {type(error).__name__}: {error}"
    return None


def _spec(kind: str, draw: random.Random) -> str | None:
    read, spec = SPECS[kind]
    try:
        value = json.loads(damaged(json.dumps(spec).encode(), draw))
    except (ValueError, RecursionError):  # the reader of files says so; here the reader of specs is tried
        return None
    try:
        read(value)
    except ValueError as error:
        return None if str(error) else f"{kind}: a ValueError without a message"
    except Exception as error:
        return f"{kind}: {type(error).__name__}: {error}"
    return None


def _written(kind: str, folder: Path) -> tuple[Path, Callable[[], object]]:
    """(the file to damage, what reads it): in `folder`, which is empty."""
    if kind in FORMATS:
        return FORMATS[kind](folder), lambda: read_whole(folder)
    model, bias = _sound()
    place = folder / "saved"
    if kind.startswith("model"):
        shutil.copytree(model, place)
        name = "config.json" if kind == "model config" else "model.safetensors"
        return place / name, lambda: load_model(place, tokenizer=False)
    shutil.copytree(bias, place)
    name = "bias_config.json" if kind == "bias config" else "bias.safetensors"
    return place / name, lambda: af.bias.load(_base(), place).remove()


def _base() -> torch.nn.Module:
    torch.manual_seed(0)
    return tiny("Llama")


@cache
def _sound() -> tuple[Path, Path]:
    """A saved model and a saved bias, once in a process."""
    folder = Path(mkdtemp(prefix="fault-files-"))
    tiny("Llama").save_pretrained(folder / "model")
    with af.bias.attach(_base(), af.bias.GuidanceConfig(layers="every", hidden_dim=4)) as handle:
        af.bias.save(handle.model, folder / "bias")
    return folder / "model", folder / "bias"


@contextmanager
def _room() -> Iterator[None]:
    """No more memory than `ROOM` beyond what the process has; what asks for more fails at once."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
