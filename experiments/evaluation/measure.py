"""A model on benchmarks, through lm-eval; prefixes that requests have in common run once."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from attnflow._core.errors import MissingExtra, UnsupportedArchitecture
from attnflow.models.passes.evaluation import evaluating, precision
from experiments.evaluation.benchmarks import Benchmark
from experiments.runner.statistics import Interval, interval, proportion

_LOGGERS: Final = ("lm_eval", "lm-eval", "lm_eval.api.task", "lm_eval.evaluator", "lm_eval.models.huggingface")


@dataclass(frozen=True)
class Score:
    name: str  # of the benchmark
    measure: str  # of its values
    values: tuple[float, ...]  # one for each item, in the order of the benchmark
    total: int  # items that there are where these come from
    answers: tuple[Any, ...] = ()  # what the model said to each item
    seconds: float = 0.0  # it took
    tokens_before: int = 0  # tokens of all requests of likelihoods
    tokens_after: int = 0  # those that were run, with common prefixes once
    not_run: str = ""  # why there is nothing; "" if there is
    not_shared: str = ""  # why prefixes were not shared; "" if they were, or if there were no likelihoods

    @property
    def interval(self) -> Interval:
        """Mean with 95 %: Wilson's for what is right or wrong, else Student's t over items."""
        if not self.values:
            raise ValueError(f"{self.name} was not run: {self.not_run}")
        if self.measure == "nats per token":
            return interval(np.array([self.values]))
        return proportion(round(sum(self.values)), len(self.values))


@dataclass
class _Kept:
    """Numbers and answers by item, as lm-eval asks for them in any order."""

    numbers: dict[int, float] = field(default_factory=dict[int, float])
    answers: dict[int, Any] = field(default_factory=dict[int, Any])


def measure(
    model: Any,
    tokenizer: Any,
    benchmark: Benchmark,
    *,
    batch_size: int = 16,
    tokens_per_pass: int = 4096,
    seed: int = 0,
    cache: Path | None = None,
) -> Score:
    """Run a benchmark.

    Args:
        model: a causal language model of transformers, with or without a bias.
        tokenizer: of it.
        benchmark: which.
        batch_size: prompts that are continued at a time.
        tokens_per_pass: see `tasks.score`.
        seed: of what is drawn.
        cache: file for answers; what was killed goes on there (drawn answers are drawn again).
    """
    if benchmark.not_run:
        return Score(benchmark.name, benchmark.measure, (), benchmark.total, not_run=benchmark.not_run)
    try:
        import datasets
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from experiments.evaluation.harness import SharedPrefixLM
    except ImportError as error:
        raise MissingExtra("lm_eval", "dev", "the evaluation of language models") from error
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    kept = _Kept()
    documents = datasets.Dataset.from_dict({"number": list(range(len(benchmark.items)))})
    began = time.perf_counter()

    def run(kind: Any, **more: Any) -> Any:
        host = kind(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **more)
        lm_eval.simple_evaluate(
            model=host,
            tasks=[_task(benchmark, kept, documents)],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            use_cache=None if cache is None else str(cache),
        )
        return host

    exact = None if benchmark.kind == "generate_until" else torch.float32  # scores differ by less than bfloat16 rounds
    with quiet(), evaluating(model), precision(model, exact), torch.random.fork_rng():
        refused = ""
        try:
            host = run(SharedPrefixLM, tokens_per_pass=tokens_per_pass, max_length=longest)
        except UnsupportedArchitecture as error:
            refused = str(error)
            host = run(HFLM, max_length=longest)
    order = range(len(benchmark.items))
    return Score(
        benchmark.name,
        benchmark.measure,
        tuple(kept.numbers[number] for number in order),
        benchmark.total,
        tuple(kept.answers[number] for number in order),
        time.perf_counter() - began,
        getattr(host, "tokens_before", 0),
        getattr(host, "tokens_after", 0),
        not_shared=refused,
    )


def _task(benchmark: Benchmark, kept: _Kept, documents: Any) -> dict[str, Any]:
    """As lm-eval's `TaskConfig` takes it; items carry their number alone."""
    items = benchmark.items

    def judge(doc: dict[str, Any], results: Any) -> dict[str, float]:
        answers = results[0] if benchmark.repeats > 1 else results
        number = doc["number"]
        kept.numbers[number], kept.answers[number] = benchmark.judge(items[number], answers)
        return {"value": kept.numbers[number]}

    choices, generation = benchmark.choices, benchmark.generation
    config: dict[str, Any] = {
        "task": benchmark.name.replace(" ", "_"),
        "custom_dataset": lambda **_: {"test": documents},
        "test_split": "test",
        "output_type": benchmark.kind,
        "doc_to_text": lambda doc: benchmark.prompt(items[doc["number"]]),
        "doc_to_target": lambda doc: 0 if choices is not None else benchmark.prompt(items[doc["number"]]),
        "process_results": judge,
        "num_fewshot": 0,
        "repeats": benchmark.repeats,
        "metric_list": [
            {"metric": "value", "aggregation": "mean", "higher_is_better": benchmark.measure != "nats per token"}
        ],
    }
    if choices is not None:
        config["doc_to_choice"] = lambda doc: choices(items[doc["number"]])
    if generation is not None:
        config["generation_kwargs"] = dict(generation)
    if benchmark.repeats > 1:
        config["filter_list"] = [{"name": "all", "filter": [{"function": "take_first_k", "k": benchmark.repeats}]}]
    return config


@contextmanager
def quiet() -> Generator[None]:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def table(scores: Sequence[Score]) -> list[list[str]]:
    """Rows of text: benchmark, measure, mean with interval, items of how many, what sharing saved, seconds."""
    rows = [["benchmark", "measure", "value, 95 %", "items", "tokens run", "seconds"]]
    for one in scores:
        if one.not_run:
            rows.append([one.name, one.measure, f"not run: {one.not_run}", "0", "", ""])
            continue
        found = one.interval
        if one.measure == "nats per token":
            value = f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}], perplexity {math.exp(found.mean):.2f}"
        else:
            value = f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}]"
        shared = f"{one.tokens_after:,} of {one.tokens_before:,}" if one.tokens_before else ""
        shared = "all: no sharing" if one.not_shared else shared
        items = f"{len(one.values)} of {one.total}"
        rows.append([one.name, one.measure, value, items, shared, f"{one.seconds:.0f}"])
    return rows
