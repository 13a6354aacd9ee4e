"""Every pair of features on one small model: works, refused with the reason, or not applicable; into docs/."""

from __future__ import annotations

import csv
import multiprocessing
import os
import queue
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed

from tests.conformance.cells import Cell, markdown, refused, within, words
from tests.conformance.features import DISTRIBUTED, FEATURES, Feature, quiet
from tests.conformance.scene import Impossible, Scene, Wrong

DOCS = Path(__file__).parents[2] / "docs"
FILE, PAGE = DOCS / "conformance_pairs.csv", DOCS / "conformance_pairs.md"
COLUMNS = ("feature", "with", "code", "reason")
SECONDS = 60  # for a pair
PAIRS = list(combinations(FEATURES, 2))
Pair = tuple[str, str]

# Pairs that exclude each other, whoever offers them.
_APART = {
    ("packed rows", "decodes"): "generate continues one document in each row",
    (
        "assisted generation",
        "FSDP2",
    ): "each process accepts as many drafts as its rows allow, and shards need all at once",
    ("left padding", "packed rows"): "transformers reads restarting positions only where no attention_mask is given",
    ("gradient checkpointing", "offload"): "offloaded weights are not trained",
    ("NEFTune", "offload"): "noise is for training, and offloaded weights are not trained",
    ("DDP", "offload"): "offloaded weights are not trained",
    ("FSDP2", "offload"): "offloaded weights are not trained",
    ("offload", "threads"): "accelerate moves weights during each call, so concurrent calls disturb one another",
    ("DDP", "threads"): "processes must call their collectives in one order",
    ("FSDP2", "threads"): "processes must call their collectives in one order",
    ("gradient checkpointing", "threads"): "concurrent calls are for inference, which nothing is recomputed for",
    ("NEFTune", "threads"): "concurrent calls are for inference, and noise is added in training alone",
}


def _apart(a: Feature, b: Feature) -> str:
    for one, other in ((a, b), (b, a)):
        for key in ((one.name, other.name), (one.name, "decodes" if other.decodes else "")):
            if key in _APART:
                return _APART[key]
    if a.group and a.group == b.group:
        return "one at a time"
    return ""


def cell(a: str, b: str) -> Cell:
    """What becomes of a pair, in both orders in which it can be put on a model."""
    first, second = FEATURES[a], FEATURES[b]
    if why := _apart(first, second):
        return Cell("none", why)
    features = [first, second] if first.ours or second.ours else [FEATURES["mask"], first, second]
    answers = [_answer(order, turned) for turned, order in enumerate(_orders(features))]
    codes = [answer.code for answer in answers]
    worst = next((code for code in ("wrong", "unclear") if code in codes), None)
    if worst is not None:
        return answers[codes.index(worst)]
    if len(set(codes)) == 2 and "works" in codes and "refused" in codes:
        way = " after ".join((b, a) if codes[0] == "refused" else (a, b))
        return Cell("works", f"refused when {way} is put on: {answers[codes.index('refused')].reason}")
    notes = dict.fromkeys(answer.reason for answer in answers if answer.reason)
    return Cell(codes[0], "; ".join(notes))


def _orders(features: list[Feature]) -> Iterator[list[Feature]]:
    """As people do it, and turned, where both are put on a model."""
    usual = sorted(features, key=lambda feature: -1 if feature.place is None else feature.place)
    yield usual
    if len(usual) == 2 and usual[0].place is not None:
        yield usual[::-1]


def _answer(order: list[Feature], turned: bool) -> Cell:
    scene = Scene()
    foreign = tuple(feature.name for feature in order if not feature.ours)
    try:
        with within(SECONDS), quiet():
            if why := _stock_fails(foreign):
                return Cell("none", f"without attnflow: {why}")
            _put(scene, order)
            scene.run()
            scene.leave(first_in=turned)
            _as_before(scene, foreign)
    except Wrong as error:
        return Cell("wrong", words(error))
    except Impossible as error:
        return Cell("none", words(error))
    except Exception as error:
        if not refused(error):
            return Cell("unclear", f"{type(error).__name__}: {words(error)}")
        try:
            with quiet():
                scene.leave(first_in=False)
                if left := scene.traces():
                    return Cell("wrong", f"refused, and something is left: {left[:3]}")
        except Exception as after:
            return Cell("wrong", f"refused, and what was put on does not come off: {words(after)}")
        return Cell("refused", words(error))
    return Cell("works", "; ".join(dict.fromkeys(scene.notes)))


def _put(scene: Scene, order: Iterable[Feature]) -> None:
    order = list(order)
    if distributed.is_initialized():
        scene.rank, scene.ranks = distributed.get_rank(), distributed.get_world_size()
    scene.decodes = any(feature.decodes for feature in order)
    if any(feature.name == "offload" for feature in order):
        scene.mode = "forward"
    if scene.decodes:
        scene.mode, scene.count = "decode", 2
        scene.count *= scene.ranks
    for feature in sorted(order, key=lambda feature: feature.place is not None):
        feature.put(scene)


def _as_before(scene: Scene, foreign: tuple[str, ...]) -> None:
    """Nothing of ours is left, and the model answers as one that never had it, to the bit."""
    if left := scene.traces():
        raise Wrong(f"removed, and something is left: {left[:3]}")
    if scene.copied:
        scene.model = scene.copied[0]
        foreign = tuple(name for name in foreign if name not in ("deepcopy", "pickle", *DISTRIBUTED))
    if not torch.equal(scene.plain(), _never_had(foreign)):
        raise Wrong("removed, and the outputs are others")


@cache
def _never_had(foreign: tuple[str, ...]) -> torch.Tensor:
    """What a model answers that never had anything of ours."""
    scene = Scene()
    _put(scene, [FEATURES[name] for name in foreign])
    return scene.plain()


@cache
def _stock_fails(foreign: tuple[str, ...]) -> str:
    """Why these features fail without ours, or ""."""
    scene = Scene()
    try:
        _put(scene, [FEATURES[name] for name in foreign])
        scene.run()
    except AssertionError as error:
        return words(error)
    except Exception as error:
        return f"{type(error).__name__}: {words(error)}"
    return ""


# -------- runs


def run(chosen: Iterable[Pair]) -> Iterator[tuple[Pair, Cell]]:
    """The cells of pairs: here, and in two processes those that need two."""
    chosen = list(chosen)
    for pair in chosen:
        if not DISTRIBUTED & set(pair):
            yield pair, cell(*pair)
    yield from _in_two_processes([pair for pair in chosen if DISTRIBUTED & set(pair)])


def _in_two_processes(chosen: list[Pair]) -> Iterator[tuple[Pair, Cell]]:
    if not chosen:
        return
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        workers = [
            context.Process(target=_worker, args=(rank, port, chosen, answers, folder), daemon=True) for rank in (0, 1)
        ]
        for worker in workers:
            worker.start()
        for number, pair in enumerate(chosen):
            try:
                yield pair, answers.get(timeout=SECONDS)
            except queue.Empty:
                yield pair, Cell("unclear", f"no answer in {SECONDS} s: one process waits for the other")
                for worker in workers:
                    worker.kill()
                yield from _in_two_processes(chosen[number + 1 :])
                return
        for worker in workers:
            worker.join(10)


def _worker(rank: int, port: int, chosen: list[Pair], answers: Any, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    distributed.init_process_group("gloo")
    for pair in chosen:
        mine = cell(*pair)
        every: list[Any] = [None, None]
        distributed.all_gather_object(every, mine)
        if rank == 0:
            ranked = ("wrong", "unclear", "refused", "works", "none")
            answers.put(min(every, key=lambda one: ranked.index(one.code)))
    distributed.destroy_process_group()


def read(path: Path = FILE) -> dict[Pair, Cell]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        lines = [(line["feature"], line["with"], line["code"], line["reason"]) for line in csv.DictReader(file)]
    return {(a, b): Cell(code, reason) for a, b, code, reason in lines if (a, b) in PAIRS}  # type: ignore[arg-type]


def write(table: Mapping[Pair, Cell], path: Path = FILE, page: Path = PAGE) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((*pair, table[pair].code, table[pair].reason) for pair in PAIRS if pair in table)
    page.write_text("\n".join(_page(table)) + "\n")


SIGNS = {"works": "+", "refused": "r", "none": "", "wrong": "**wrong**", "unclear": "**unclear**"}


def _page(table: Mapping[Pair, Cell]) -> Iterator[str]:
    counts = Counter(one.code for one in table.values())
    yield from (
        "# Which features work together?",
        "",
        f"Every pair of {len(FEATURES)} features on a small Llama of transformers {transformers.__version__} (torch",
        f"{torch.__version__}). Logits, losses, gradients of every parameter, decoded tokens and scores are compared",
        "with the same function written out in float64 over dense tables, which shares no code with attnflow.",
        "Then what attnflow put on is removed: nothing of it is left in the model, whose logits are, bit for bit,",
        "those of a model that never had it. A pair is tried in both orders of attaching. A pair without",
        "attnflow in it runs under a mask of ours. `make conformance` makes this page and",
        "[the table](conformance_pairs.csv).",
        "",
        f"**{counts['works']} pairs work (+), {counts['refused']} are refused with a reason (r), {counts['none']} do",
        f"not apply (empty), {counts['wrong']} are wrong, {counts['unclear']} unclear.** {len(PAIRS)} pairs in all.",
        "",
        "Quantised caches are tried without their rounding. `torch.compile` traces the model and leaves the kernels to",
        "eager PyTorch. Half precision is float16. DDP and FSDP2 are two processes on the CPU, threads are four that",
        "share one model.",
        "",
    )
    names = list(FEATURES)
    yield "| | " + " | ".join(str(number) for number in range(1, len(names) + 1)) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for number, name in enumerate(names, 1):
        cells = [table.get((name, other)) or table.get((other, name)) for other in names]
        signs = ("" if one is None else SIGNS[one.code] for one in cells)
        yield f"| {number} {name} | " + " | ".join(signs) + " |"
    for code, title in (("wrong", "Wrong"), ("unclear", "Unclear"), ("refused", "Refused"), ("works", "Notes"),
                        ("none", "Does not apply")):  # fmt: skip
        chosen = [(pair, one) for pair, one in table.items() if one.code == code and one.reason]
        if chosen:
            yield from ("", f"## {title}", "", "| pairs | what happens |", "|---|---|")
            by_reason: dict[str, list[Pair]] = {}
            for pair, one in chosen:
                by_reason.setdefault(one.reason, []).append(pair)
            yield from (f"| {_together(pairs)} | {markdown(reason)} |" for reason, pairs in by_reason.items())


def _together(pairs: Sequence[Pair]) -> str:
    """Pairs by their most frequent feature, named once: "beams with mask, bias; LoRA with monitor"."""
    left, groups = list(pairs), []
    while left:
        most = max(FEATURES, key=lambda name: sum(name in pair for pair in left))
        others = [(set(pair) - {most}).pop() for pair in left if most in pair]
        groups.append(f"{most} with {', '.join(others)}")
        left = [pair for pair in left if most not in pair]
    return "; ".join(groups)


def main(names: Iterable[str], resume: bool, tell: Callable[[str], object]) -> list[str]:
    """Fill the table; what is wrong or unclear, and what got worse, as lines."""
    table = read()
    chosen = [pair for pair in PAIRS if not names or set(names) & set(pair)]
    chosen = [pair for pair in chosen if not (resume and pair in table)]
    lines: list[str] = []
    for pair, one in run(chosen):
        before = table.get(pair)
        table[pair] = one
        write(table)
        tell(f"{one.code:8} {' with '.join(pair)}  {one.reason}")
        if one.code in ("wrong", "unclear") or (before is not None and before.code == "works" != one.code):
            lines.append(f"{' with '.join(pair)}: {one.code}: {one.reason}")
    return lines
