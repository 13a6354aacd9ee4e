"""The text that additions are trained on: reasoned answers and functions with docstrings, which packages ship.

They have the form of the benchmarks, and none of their items: `shared` counts what they have in common.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from attnflow.models.loading.names import Packaged
from experiments.runner.packing import Drawn, Packed

REASONED: Final = Packaged(
    "lm-eval",
    "lm_eval",
    "tasks/mmlu/flan_cot_fewshot/_cot_prompts.json",
    "the reasoned answers to questions of MMLU",
)
FUNCTIONS: Final = Packaged("networkx", "networkx", "algorithms", "the functions of networkx")
WORDS: Final = 13  # in a row that two texts share: then one has the other's passage
_HELD_OUT: Final = 8  # every so many documents one is not trained on
_LONGEST: Final = 3000  # characters of a function


def reasoned_answers() -> list[str]:
    """Questions of MMLU with an answer that is reasoned step by step: five to each of 57 subjects."""
    held = json.loads(REASONED.path().read_text(encoding="utf-8"))
    return [f"Q: {one.strip()}" for text in held.values() for one in text.split("\n\nQ: ")[1:]]


def functions() -> list[str]:
    """Functions of networkx that have a docstring, as their files have them."""
    found: list[str] = []
    for path in sorted(FUNCTIONS.path().rglob("*.py")):
        if "tests" in path.parts:
            continue
        source = path.read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            text = ast.get_source_segment(source, node) or ""
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(text) <= _LONGEST:
                found.append(text)
    return found


@dataclass(frozen=True)
class Practice:
    training: tuple[Packed, ...]  # rows of each kind
    # tokens [rows, length] of documents that are not trained on, by which learning rates are chosen; as many of each
    # kind
    choosing: Tensor

    def batch(self, seed: int, step: int, steps: int) -> Tensor:
        """The rows of a step, one of each kind: the same for all arms of a seed."""
        return torch.stack([Drawn(rows, steps, seed)[step]["input_ids"] for rows in self.training])


def practice(tokenizer: Any, length: int, held_out: int) -> Practice:
    """Read the packages."""
    kinds = [documents(tokenizer, texts) for texts in (reasoned_answers(), functions())]
    training = [[one for n, one in enumerate(kind) if n % _HELD_OUT] for kind in kinds]
    held = [Packed(kind[::_HELD_OUT], length).tokens for kind in kinds]
    each = held_out // len(kinds)
    chosen = [tokens[[place * len(tokens) // each for place in range(each)]] for tokens in held]
    return Practice(tuple(Packed(kind, length) for kind in training), torch.cat(chosen))


def documents(tokenizer: Any, texts: Iterable[str]) -> list[list[int]]:
    """Tokens of each, with the end of a document behind it."""
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]


def shared(one: Sequence[str], other: Sequence[str], words: int = WORDS) -> int:
    """How many different passages of so many words both have.

    >>> shared(["a b c d"], ["x b c d", "b c d"], 3)
    1
    """

    def passages(texts: Sequence[str]) -> set[tuple[str, ...]]:
        split = [text.split() for text in texts]
        return {tuple(each[n : n + words]) for each in split for n in range(len(each) - words + 1)}

    return len(passages(one) & passages(other))
