"""What the models write: whether decoding is what was trained, and whether it makes words."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

import attnflow as af
from experiments.hasse.arms import Arm

_WORD: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_SEED: Final = 0  # of drawing, the same for all arms


def words(texts: Sequence[str]) -> list[str]:
    """Of texts that may begin and end within a word: the first and the last one of each are left out.

    >>> words(["ome love's labour lo"])
    ["love's", 'labour']
    """
    return [word for text in texts for word in _WORD.findall(text.lower())[1:-1]]


def real(texts: Sequence[str], vocabulary: frozenset[str]) -> float:
    """Share of the letters of all words that are in words of the training text; 0 without any words.

    >>> real(["a love xyz b"], frozenset({"love"}))
    0.5714285714285714
    """
    return share(words(texts), vocabulary)


def share(every: Sequence[str], vocabulary: frozenset[str]) -> float:
    """Of the letters of some words, those in words of a vocabulary; 0 without any words."""
    return sum(len(word) for word in every if word in vocabulary) / max(1, sum(map(len, every)))


def touching(text: str, start: int, end: int) -> list[str]:
    """Words with a letter in [start, end), but for the first and the last of a text, which may be parts of words.

    >>> touching("ome love's labour lost", 9, 13)
    ["love's", 'labour']
    """
    inner = list(_WORD.finditer(text.lower()))[1:-1]
    return [match.group() for match in inner if match.start() < end and match.end() > start]


def decoded(
    model: Any, arm: Arm, rows: Tensor, mask_token: int, tokenizer: Any, vocabulary: frozenset[str]
) -> Mapping[str, object]:
    """The second half of each row written anew, by drawing from the unchanged model, in one batch.

    Returns:
        Passes of the model, tokens of a sequence for each, share of letters in real words, seconds, and a sample.
    """
    prompts, count = rows[:, : rows.shape[1] // 2], rows.shape[1] - rows.shape[1] // 2
    began = time.process_time()
    if arm.family == "causal":
        prompts = prompts.to(model.device)
        with torch.random.fork_rng():
            torch.manual_seed(_SEED)
            whole = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count, min_new_tokens=count,
                do_sample=True, top_k=0, temperature=1.0, pad_token_id=mask_token,
            )  # fmt: skip
        tokens, passes = whole[:, prompts.shape[1] :].tolist(), count
    else:
        written = af.tasks.generate_blocks(
            model, prompts, arm.block, max_new_tokens=count, mask_token=mask_token, temperature=1.0, seed=_SEED,
            eos_token=-1,
        )  # fmt: skip
        tokens, passes = written.tokens, written.passes
    seconds = time.process_time() - began
    texts = [str(tokenizer.decode(list(one))) for one in tokens]
    return {
        "passes": passes,
        "tokens_per_pass": count / passes,
        "real_words": real(texts, vocabulary),
        "seconds": seconds,
        "sample": texts[0],
    }


@torch.no_grad()
def agreement(model: Any, arm: Arm, rows: Tensor, mask_token: int) -> Mapping[str, object]:
    """Whether each next block, decoded greedily after each whole block of some rows, is what the merged task says.

    Returns:
        Tokens compared, those that differ, and the largest margin between the two best logits at one that does.
    """
    compared, margins = 0, list[float]()
    task_of = arm.task(mask_token)
    collate = af.tasks.Collator(task_of, by_length=True)
    labels = sorted(task_of(rows[0].tolist()).labels, key=lambda label: label.data_index or 0)
    places = [label.position for label in labels]
    device = next(model.parameters()).device
    for row in rows:
        batch = {name: value.to(device) for name, value in collate([row]).items() if name != "labels"}
        logits = model(**batch, use_cache=False).logits[0].cpu()
        ends = range(arm.block, len(row), arm.block)
        prompts = [row[:end].tolist() for end in ends]
        written = af.tasks.generate_blocks(
            model, prompts, arm.block, max_new_tokens=arm.block, mask_token=mask_token, eos_token=-1
        )
        best = logits[places].topk(2)
        said = torch.tensor([token for one in written.tokens for token in one])
        compared += len(said)
        differ = best.indices[:, 0] != said
        margins += (best.values[:, 0] - best.values[:, 1])[differ].tolist()
    return {"compared": compared, "differ": len(margins), "margin": max(margins, default=0.0)}
