"""Real training processes, killed while they write a checkpoint, and what a call after that makes of it."""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

import attnflow as af
from attnflow.bias.checkpoints import by_step
from attnflow.bias.hf.saving import digest
from attnflow.models.loaded import Loaded
from tests.models import tiny

PROMISE = (
    "A training that is killed (-9) while it writes a checkpoint, up to three times in a row, goes on by the same call "
    "and ends with the losses and the weights, bit for bit, of one that was never killed."
)
TRIALS = 150
SHORT = 1
KILLS = 3  # at most
SAVES = 6

TEXTS = ["to be or not to be that is the question " * 6, "whether tis nobler in the mind to suffer " * 6]
CONFIG = af.bias.TrainingConfig(
    steps=2 * SAVES, batch_size=2, learning_rate=1e-2, log_every=1, save_every=2, evaluate_every=4, seed=3
)

Mode = Literal["guidance", "all"]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.faults.checkpoints"])


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of one id per letter, with an end of text."""
    ids = {letter: index for index, letter in enumerate(["[END]", *"abcdefghijklmnopqrstuvwxyz "])}
    tokens = Tokenizer(WordLevel(ids, unk_token="[END]"))
    tokens.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="[END]")


def biased(mode: Mode, base: int = 0) -> Any:
    """A tiny model with a new bias."""
    with torch.random.fork_rng():
        torch.manual_seed(base)
        model = tiny("Llama", torch.float32)
        torch.manual_seed(1)
        af.bias.attach(model, af.bias.GuidanceConfig(hidden_dim=8, layers="every"), train=mode)
    return model


def train(folder: Path, mode: Mode) -> None:
    """The call that is killed."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    af.bias.train(Loaded(biased(mode), letters()), TEXTS, folder, CONFIG, length=16)


def outcome(folder: Path) -> tuple[object, dict[str, str]]:
    """What a run came to: its result without its folder, and a digest of each file of tensors."""
    result = json.loads((folder / "training.json").read_text())
    del result["folder"]
    return result, {str(p.relative_to(folder)): digest(p.read_bytes()) for p in folder.rglob("*.safetensors")}


@cache
def _undisturbed(mode: Mode) -> tuple[object, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        _ended(Path(folder), mode)
        return outcome(Path(folder))


def _ended(folder: Path, mode: Mode) -> int | None:
    process = _processes.Process(target=train, args=(folder, mode))
    process.start()
    process.join(120)
    return process.exitcode


def killed(folder: Path, mode: Mode, save: int, delay: float) -> bool:
    """Start the call, and kill it so many seconds after it began to write its n-th checkpoint; whether it still ran."""
    process = _processes.Process(target=train, args=(folder, mode))
    process.start()
    before = {path.name for path in by_step(folder / "checkpoints")}
    while process.is_alive() and len({path.name for path in by_step(folder / "checkpoints")} - before) < save:
        time.sleep(0.0005)
    time.sleep(delay)
    process.kill()
    process.join()
    return process.exitcode == -9


def trial(seed: int, folder: Path) -> str | None:
    draw = random.Random(seed)
    mode: Mode = "all" if seed % 2 else "guidance"
    for _ in range(1 + seed % KILLS):
        killed(folder, mode, draw.randint(1, 2), draw.uniform(0, 0.04))
    code = _ended(folder, mode)
    if code:
        return f"the call after the kills ended with {code}"
    (result, files), (expected, whole) = outcome(folder), _undisturbed(mode)
    if result != expected:
        return f"another result: {result}, expected {expected}"
    other = [name for name in sorted({*files, *whole}) if files.get(name) != whole.get(name)]
    return f"other files: {other}" if other else None
