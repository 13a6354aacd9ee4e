"""Gold solutions of GSM8k and HumanEval, each beside wrong ones that differ in one number or operator.

A perturbation has as many tokens as the gold solution, and the same ones up to a place. It is drawn by the item alone,
so that every arm and every seed reads the same texts.
"""

from __future__ import annotations

import io
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from experiments.evaluation.sources import Item

RESULT, ANSWER, PROGRAM = "result", "answer", "program"  # what a perturbation changes
_RESULTS: Final = re.compile(r"=\s*\$?(\d+)")  # what a step of a solution comes to
_STEPS: Final = (1, -1, 2, -2, 3, -3, 10, -10)  # by how much a number is wrong
_PAIRS: Final = ("< >", "<= >=", "== !=", "+ -", "// %", "+= -=", "and or", "True False", "min max", "any all")
_SWAPS: Final = {"*": "+", "/": "*"} | {
    one: other for pair in _PAIRS for one, other in (pair.split(), pair.split()[::-1])
}


@dataclass(frozen=True)
class Wrong:
    kind: str  # "result" of a step, final "answer", or "program"
    start: int  # tokens of the solution that it shares with the gold one, at its beginning
    rest: tuple[int, ...]  # its tokens from there on, as many as the gold one has
    text: str  # from the changed place on, for people


@dataclass(frozen=True)
class Gold:
    name: str  # of the item
    prompt: tuple[int, ...]  # its tokens
    solution: tuple[int, ...]  # likewise; it follows the prompt
    split: int  # tokens of the solution before the sentence with the final answer; of a program all
    wrong: tuple[Wrong, ...]  # perturbed solutions


def word_problems(items: Sequence[Item], tokenizer: Any) -> list[Gold]:
    """Of GSM8k: "Q: ...", "A:" and the solution in one line that ends with "The answer is N.".

    One perturbation changes what a step comes to, drawn from all steps that end in a whole number, and changes
    nothing else; one changes the final answer.
    """
    found: list[Gold] = []
    for number, item in enumerate(items):
        draw = random.Random(f"gsm8k {number}")
        prompt, steps = f"Q: {item['question']}\nA:", f" {item['solution']}"
        gold = f"{steps} The answer is {item['answer']}."
        before, whole = _pieces(prompt, gold, tokenizer)
        wrong: list[Wrong] = []
        places = [(match.start(1), match.end(1)) for match in _RESULTS.finditer(steps)]
        draw.shuffle(places)
        last = (len(gold) - 1 - len(item["answer"]), len(gold) - 1)
        for kind, spans in ((RESULT, places), (ANSWER, [last])):
            tried = (
                gold[:start] + other + gold[end:] for start, end in spans for other in _near(gold[start:end], draw)
            )
            wrong += _fitting(kind, prompt, whole, tried, tokenizer, 1)
        split = len(_pieces(prompt, steps, tokenizer)[1])
        found.append(Gold(f"gsm8k {number}", tuple(before), tuple(whole), split, tuple(wrong)))
    return found


def programs(items: Sequence[Item], tokenizer: Any, count: int = 2) -> list[Gold]:
    """Of HumanEval: the head with its docstring, and the canonical solution.

    Each of `count` perturbations swaps one operator, name or digit; it is still a program of Python. Whether it fails
    the tests is not looked at.
    """
    found: list[Gold] = []
    for item in items:
        prompt, gold = item["prompt"], item["canonical_solution"].rstrip()
        before, whole = _pieces(prompt, gold, tokenizer)
        tried = list(_mutants(prompt, gold))
        random.Random(item["task_id"]).shuffle(tried)
        wrong = _fitting(PROGRAM, prompt, whole, iter(tried), tokenizer, count)
        found.append(Gold(item["task_id"], tuple(before), tuple(whole), len(whole), tuple(wrong)))
    return found


def _pieces(prompt: str, rest: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of both, each by itself: what follows never changes the prompt."""
    return tuple(list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (prompt, rest))  # pyright: ignore[reportReturnType]


def _fitting(
    kind: str, prompt: str, gold: Sequence[int], tried: Iterator[str], tokenizer: Any, count: int
) -> list[Wrong]:
    """The first of them that have as many tokens as the gold solution."""
    found: list[Wrong] = []
    for text in tried:
        ids = _pieces(prompt, text, tokenizer)[1]
        if len(found) < count and len(ids) == len(gold) and ids != list(gold):
            start = next(place for place, (one, other) in enumerate(zip(ids, gold, strict=True)) if one != other)
            found.append(Wrong(kind, start, tuple(ids[start:]), tokenizer.decode(ids[start:])))
    return found


def _near(number: str, draw: random.Random) -> list[str]:
    """Numbers of as many characters near this one, whose last run of digits is what changes."""
    match = re.fullmatch(r"(.*?)(\d+)", number)
    if match is None:
        return []
    head, digits = match.groups()
    near = [int(digits) + step for step in _STEPS]
    found = [f"{head}{value}" for value in near if value > 0 and len(str(value)) == len(digits)]
    draw.shuffle(found)
    return found


def _mutants(prompt: str, solution: str) -> Iterator[str]:
    """The solution with one token of Python exchanged, wherever that is possible."""
    source = prompt + solution
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for token in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
        place = starts[token.start[0] - 1] + token.start[1] - len(prompt)
        text = token.string
        other = _SWAPS.get(text, "")
        if token.type == tokenize.NUMBER and text.isdigit():
            other = text[:-1] + ("8" if text[-1] == "9" else str(int(text[-1]) + 1))
        if place < 0 or not other or token.type == tokenize.STRING:
            continue
        changed = solution[:place] + other + solution[place + len(text) :]
        try:
            compile(prompt + changed, "program", "exec")
        except SyntaxError:
            continue
        yield changed
