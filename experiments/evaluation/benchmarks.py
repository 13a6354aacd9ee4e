"""The benchmarks of daa as tasks of lm-eval: prompts of its sec. 4.1.3, data of packages or, by name, of the hub.

Where the paper is silent: texts are continued greedily (it samples at a temperature and a top-p that the text does not
give), and self-consistency draws 5 answers at temperature 0.7 and top-p 0.95.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from experiments.evaluation import sources
from experiments.evaluation.sandbox import Limits, run_program
from experiments.evaluation.self_test import self_test
from experiments.evaluation.sources import Item

Prompting = Literal["zero-shot", "five-shot", "chain of thought", "self-consistency"]

PROMPTINGS: Final[tuple[Prompting, ...]] = ("zero-shot", "five-shot", "chain of thought", "self-consistency")
PATHS: Final = 5  # answers that self-consistency draws
SAMPLING: Final = {"do_sample": True, "temperature": 0.7, "top_p": 0.95}
LIMITS: Final = Limits()  # of a program of HumanEval
_STOPS: Final = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # where the function of HumanEval ends
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LAST: Final = re.compile(r"[Tt]he answer is[^\d-]*(-?\d[\d,]*(?:\.\d+)?)")


@dataclass(frozen=True)
class Benchmark:
    """A task, ready for lm-eval or not to be run."""

    name: str  # such as "gsm8k five-shot"
    measure: str  # "accuracy", "pass@1" or "nats per token" (the perplexity's logarithm; lower is better)
    items: tuple[Item, ...]  # those that are run
    total: int  # how many the benchmark has where these come from
    kind: Literal["generate_until", "multiple_choice", "loglikelihood_rolling"]  # of lm-eval's requests
    prompt: Callable[[Item], str]  # of an item
    # (item, answers of the model) -> number of the measure, and what is kept of the answers
    judge: Callable[[Item, Sequence[Any]], tuple[float, Any]]
    choices: Callable[[Item], list[str]] | None = None  # of an item, where the model chooses
    generation: Mapping[str, Any] | None = None  # where the model writes: until what, how long, how
    repeats: int = 1  # answers that are drawn to each prompt
    not_run: str = ""  # why it cannot be run here; "" if it can


def perplexity(tokenizer: Any, source: str = "shakespeare", pieces: int = 24, characters: int = 1500) -> Benchmark:
    """Next-token loss on text that no model here was trained on, in nats per token of the tokenizer."""
    texts = sources.held_out(source, pieces, characters)
    counts = {text: len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts}
    return Benchmark(
        name="perplexity",
        measure="nats per token",
        items=tuple({"text": text} for text in texts),
        total=len(texts),
        kind="loglikelihood_rolling",
        prompt=lambda item: item["text"],
        judge=lambda item, answers: (-float(answers[0]) / counts[item["text"]], None),
    )


def humaneval(limit: int | None = None, tokens: int = 256) -> Benchmark:
    """Functions from their head and docstring, a greedy answer to each; tests run in the sandbox or not at all."""
    every = sources.humaneval()
    found = self_test()
    return Benchmark(
        name="humaneval",
        measure="pass@1",
        items=tuple(sources.chosen(every, limit)),
        total=len(every),
        kind="generate_until",
        prompt=lambda item: item["prompt"],
        judge=judge_program,
        generation={"until": list(_STOPS), "max_gen_toks": tokens, "do_sample": False},
        not_run="" if found.held else f"the sandbox: {found.problem}",
    )


def judge_program(item: Item, answers: Sequence[str]) -> tuple[float, Any]:
    """Whether a completion passes the tests of its problem."""
    outcome = run_program(program(item, answers[0]), LIMITS)
    return float(outcome.passed), {"text": answers[0], "verdict": outcome.verdict}


def program(item: Item, completion: str) -> str:
    return f"{item['prompt']}{completion}\n{item['test']}\ncheck({item['entry_point']})\n"


def gsm8k(
    prompting: Prompting, limit: int | None = None, source: str = sources.PACKAGED, tokens: int = 192
) -> Benchmark:
    """Word problems: right if the number that the answer ends with is.

    Args:
        prompting: how: the question alone; after five examples with their answers only; after the same with reasons;
            the last with five answers drawn, of which the most frequent number counts.
        limit: problems.
        source: see `sources.gsm8k`.
        tokens: that an answer has at most.
    """
    every = sources.gsm8k(source)
    shots = shown(prompting)
    drawn = prompting == "self-consistency"
    until = {"until": ["Q:", "\n\n\n"], "max_gen_toks": tokens, **(SAMPLING if drawn else {"do_sample": False})}
    return Benchmark(
        name=f"gsm8k {prompting}",
        measure="accuracy",
        items=tuple(sources.chosen(every, limit)),
        total=len(every),
        kind="generate_until",
        prompt=lambda item: f"{shots}Q: {item['question']}\nA:",
        judge=judge_number,
        generation=until,
        repeats=PATHS if drawn else 1,
    )


def shown(prompting: Prompting) -> str:
    if prompting == "zero-shot":
        return ""
    pairs = sources.examples()
    if prompting == "five-shot":
        pairs = [(question, answer[answer.rindex("The answer is") :]) for question, answer in pairs]
    return "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in pairs)


def judge_number(item: Item, answers: Sequence[str]) -> tuple[float, Any]:
    """Whether the most frequent number is the right one; of two as frequent ones the first."""
    numbers = [number for number in map(number_of, answers) if number is not None]
    common = Counter(numbers).most_common(1)
    right = bool(common) and common[0][0] == number_of(item["answer"])
    return float(right), {"texts": list(answers), "numbers": numbers}


def number_of(text: str) -> float | None:
    """The number that an answer ends with: after the last "The answer is", else the last one.

    >>> number_of("5 + 6 = 11. The answer is $1,100.00. So 3"), number_of("18 eggs"), number_of("none")
    (1100.0, 18.0, None)
    """
    found = _LAST.findall(text) or _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def multiple_choice(name: str, items: Sequence[Item], limit: int | None, not_run: str = "") -> Benchmark:
    """The choice whose text is likeliest after the context, per byte."""
    return Benchmark(
        name=name,
        measure="accuracy",
        items=tuple(sources.chosen(items, limit)),
        total=len(items),
        kind="multiple_choice",
        prompt=lambda item: item["context"],
        judge=judge_choice,
        choices=lambda item: item["choices"],
        not_run=not_run,
    )


def judge_choice(item: Item, answers: Sequence[tuple[float, bool]]) -> tuple[float, Any]:
    """Whether the likeliest choice per byte is the right one; the log-probabilities are kept."""
    per_byte = [
        float(answer[0]) / max(1, len(choice.encode())) for answer, choice in zip(answers, item["choices"], strict=True)
    ]
    return float(per_byte.index(max(per_byte)) == item["label"]), [float(answer[0]) for answer in answers]


def hellaswag(limit: int | None = None) -> Benchmark:
    """No benchmark of the paper: a choice by likelihood that a package ships, and a small model can make."""
    return multiple_choice("hellaswag", sources.hellaswag(), limit)


def quality(limit: int | None = None, source: str | None = None) -> Benchmark:
    """Questions on long articles; without the name of a data set it is not run, as no package ships one."""
    if source is None:
        said = f"no package ships QuALITY; by name: {sources.QUALITY_NAME}"
        return multiple_choice("quality", [], limit, said)
    return multiple_choice("quality", sources.quality(source), limit)


NAMES: Final = ("perplexity", "humaneval", *(f"gsm8k {prompting}" for prompting in PROMPTINGS), "quality", "hellaswag")
