"""`python -m experiments evaluate MODEL`: a language model on the benchmarks of paper daa."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attnflow import load_model
from attnflow._core.errors import AttnflowError
from attnflow._core.markup import aligned
from attnflow._core.progress import Reporter
from attnflow.bias import AlibiConfig, attach, load
from experiments.evaluation import sources
from experiments.evaluation.benchmarks import (
    NAMES,
    PROMPTINGS,
    Benchmark,
    gsm8k,
    hellaswag,
    humaneval,
    perplexity,
    quality,
)
from experiments.evaluation.measure import Score, measure, table
from experiments.runner.files import read, write

_EPILOG = """
Generated programs run in a sandbox (bubblewrap) that attacks itself first; where it does not hold, humaneval is not
run. quality needs the name of a data set, because no package ships it. What is killed goes on with --work.
"""

_DATA = (
    f"in place of what packages ship, such as gsm8k={sources.GSM8K_NAME}, quality={sources.QUALITY_NAME}, "
    "perplexity=allenai/c4:en:validation"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments evaluate", description=__doc__, epilog=_EPILOG)
    parser.add_argument("model", help="as af.load_model takes it, such as smollm2-135m")
    parser.add_argument(
        "--bias", metavar="DIR", help="a saved bias (af.bias.save), or alibi for ALiBi in place of RoPE"
    )
    parser.add_argument("--tasks", default=",".join(NAMES), help=f"separated by commas, of {', '.join(NAMES)}")
    parser.add_argument("--limit", type=int, help="items of each task, at equal distances; all by default")
    parser.add_argument("--data", action="append", default=[], metavar="TASK=SOURCE", help=_DATA)
    parser.add_argument("--dtype", default="bfloat16", help="of what is generated; likelihoods are in float32")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda")
    parser.add_argument("--batch-size", type=int, default=16, help="prompts that are continued at a time")
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder for finished tasks, to go on with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="numbers and answers of every item")
    given = parser.parse_args(arguments)
    try:
        print(run(given))
    except (ValueError, FileNotFoundError, AttnflowError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(given: argparse.Namespace) -> str:
    """Evaluate as asked; returns the table."""
    names = [name.strip() for name in given.tasks.split(",")]
    data = dict(_source(text) for text in given.data)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"--tasks must be of {', '.join(NAMES)}; got {', '.join(unknown)}")
    model, tokenizer = load_model(given.model, dtype=given.dtype, device=given.device)
    if given.bias == "alibi":
        attach(model, AlibiConfig())
    elif given.bias is not None:
        load(model, given.bias)
    scores: list[Score] = []
    with Reporter() as progress:
        for number, name in enumerate(names):
            progress(number, len(names), f"{name}; tasks")
            made = maker(name, tokenizer, given.limit, data)
            work = None if given.work is None else given.work / f"{name.replace(' ', '-')}.json"
            scores.append(
                finished(made, work, lambda made=made: measure(model, tokenizer, made, batch_size=given.batch_size))
            )
    if given.json is not None:
        write(given.json, {"model": given.model, "bias": given.bias, "scores": [plain(one) for one in scores]})
    return aligned(table(scores), left=(0, 1, 2))


def maker(
    name: str, tokenizer: Any, limit: int | None, data: Mapping[str, str], tokens: int | None = None
) -> Benchmark:
    """The benchmark of a name.

    Args:
        name: of `NAMES`.
        tokenizer: of the model.
        limit: items; all by default.
        data: benchmark -> data set of the hub, in place of what a package ships.
        tokens: that a generated answer has at most; by default those of the benchmark.
    """
    longest = {} if tokens is None else {"tokens": tokens}
    if name == "perplexity":
        return perplexity(tokenizer, data.get(name, "shakespeare"), *(() if limit is None else (limit,)))
    if name == "humaneval":
        return humaneval(limit, **longest)
    if name == "hellaswag":
        return hellaswag(limit)
    if name == "quality":
        return quality(limit, data.get(name))
    prompting = next(one for one in PROMPTINGS if name == f"gsm8k {one}")
    return gsm8k(prompting, limit, data.get("gsm8k", sources.PACKAGED), **longest)


def finished(benchmark: Benchmark, path: Path | None, run: Callable[[], Score]) -> Score:
    """What a file holds of this benchmark, with the same items, or else what is run and written to it."""
    about = {
        "items": [dict(item) for item in benchmark.items],
        "generation": benchmark.generation,
        "repeats": benchmark.repeats,
    }
    about = json.loads(json.dumps(about))
    if path is not None and path.is_file():
        held = read(path)
        if held["about"] != about:
            raise ValueError(f"{path} holds answers to other questions: choose another folder")
        return Score(
            **{**held["score"], "values": tuple(held["score"]["values"]), "answers": tuple(held["score"]["answers"])}
        )
    score = run()
    if path is not None and not score.not_run:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, {"about": about, "score": asdict(score)})
    return score


def plain(score: Score) -> dict[str, object]:
    return {**asdict(score), "interval": None if score.not_run else score.interval.numbers}


def _source(text: str) -> tuple[str, str]:
    name, _, source = text.partition("=")
    if name not in ("gsm8k", "quality", "perplexity") or not source:
        raise ValueError(f"--data must be gsm8k=..., quality=... or perplexity=..., got {text!r}")
    return name, source
