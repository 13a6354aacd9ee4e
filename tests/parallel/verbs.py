"""A process of a launch that calls every verb on every way to spread a model, and compares with the plain model.

Each cell is made twice on every rank: of the plain model, and of the spread one. It works if both give the same
numbers on each rank; else the error is kept, of each rank.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import attnflow as af
from attnflow.models.passes import processes
from tests.models.saved import word_tokenizer
from tests.parallel.spread import Build, layers, plain, sharded, ways
from tests.processes import leave

WORDS = [f"w{number}" for number in range(50)]
IDS = torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(1))
GROUP = torch.cat([IDS[:1, :6].repeat(4, 1), torch.arange(3, 11).reshape(4, 2)], 1)
TOKENIZER = word_tokenizer(["[PAD]", "[UNK]", *WORDS], pad_token="[PAD]")
FACT = {"prompt": "w1 w2 w3", "answer": "w4", "subject": "w3"}
TEXT = " ".join(WORDS[number % 50] for number in range(3, 900, 7))


def numbers(value: Any) -> Any:
    """What a result says, as nested lists."""
    if isinstance(value, Tensor):
        return value.detach().double().tolist()
    if isinstance(value, Mapping):
        return {str(name): numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else numbers(value.to_dict())


def close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return one == other or abs(one - other) <= 2e-4 * max(1.0, abs(one)) or (one != one and other != other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(close(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(close, one, other))
    return one == other


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def masked(model: Any, build: Build, after: bool, heads: bool = False) -> Any:
    mask = af.masks.sliding_window(8, 3) & af.masks.causal(8)
    if heads:
        mask = af.masks.per_head([mask] * 4 + [af.masks.causal(8)] * 4)
    model = build(model) if after else model
    with af.masks.attach(model, mask):
        return logits(model if after else build(model))


def with_bias(model: Any, after: bool, build: Build, config: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(2)
    model = build(model) if after else model
    handle = af.bias.attach(model, config or af.bias.GuidanceConfig(hidden_dim=8, init="kaiming"))
    return (model if after else build(model)), handle


def biased(model: Any, build: Build, after: bool, what: str = "run") -> Any:
    model, handle = with_bias(model, after, build)
    if what == "capture":
        return numbers(af.bias.capture(model, IDS[:1], tokenizer=TOKENIZER))
    if what == "save":
        folder = af.bias.save(model, shared_folder("bias"))
        other = plain()
        af.bias.load(other, folder)
        return logits(other)
    return [logits(model), str(handle)]


def shared_folder(name: str) -> Path:
    places = [tempfile.mkdtemp()]
    dist.broadcast_object_list(places)
    return Path(places[0]) / name


def loaded_bias(model: Any, build: Build) -> Any:
    folder, other = shared_folder("bias"), plain()
    with_bias(other, False, lambda model: model)
    if not dist.get_rank():
        af.bias.save(other, folder)
    dist.barrier()
    spread = build(model)
    af.bias.load(spread, folder)
    return logits(spread)


def prefixes(model: Any, build: Build, after: bool) -> Any:
    model = build(model) if after else model
    handle = af.tasks.share_prefixes(model)
    return [logits(model if after else build(model), GROUP), handle.report.shared]


def monitored(model: Any, build: Build) -> Any:
    model = build(model)
    with af.geometry.monitor(model, every=1) as handle:
        handle.step()
    return list(handle.history) and numbers(handle.history) if not dist.get_rank() else None


def store() -> Any:
    opened = af.knowledge.Store.open("memory", dim=8)
    opened.insert(embeddings=torch.eye(8), texts=[f"w{number}" for number in range(8)])
    return opened


def read_store(model: Any, build: Build, after: bool) -> Any:
    torch.manual_seed(3)
    model = build(model) if after else model
    with af.knowledge.attach(model, store()) as handle:
        for reader in handle.readers:
            for parameter in reader.parameters():
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(4))
        return logits(model if after else build(model))


def with_features(model: Any, build: Build, after: bool) -> Any:
    generator = torch.Generator().manual_seed(5)
    given = {"W_enc": torch.randn(32, 40, generator=generator), "W_dec": torch.randn(40, 32, generator=generator)}
    model = build(model) if after else model
    with af.knowledge.attach_features(model, {1: given}):
        return logits(model if after else build(model))


def edited(model: Any, build: Build) -> Any:
    converted = af.knowledge.from_ffn(model)
    try:
        model = build(converted)
    except NotImplementedError:  # torch splits no entries
        model = build(model)
    with af.knowledge.edit(model, FACT, text=TEXT, tokenizer=TOKENIZER, layers=[1], guard=False) as handle:
        return [logits(model), handle.report.facts[0].to_dict() if hasattr(handle.report.facts[0], "to_dict") else 0]


def of(verb: Callable[[Any], Any]) -> Callable[[Any, Build], Any]:
    return lambda model, build: numbers(verb(build(model)))


def reading(verb: Callable[..., Any], question: Callable[[Any], Any]) -> Callable[[Any, Build], Any]:
    def ask(model: Any, build: Build) -> Any:
        with verb(build(model), IDS[:1]) as handle:
            return numbers(question(handle))

    return ask


VERBS: dict[str, Callable[[Any, Build], Any]] = {
    "masks.attach": partial(masked, after=True),
    "masks.attach, then wrap": partial(masked, after=False),
    "masks.attach (per head)": partial(masked, after=True, heads=True),
    "bias.attach": partial(biased, after=True),
    "bias.attach, then wrap": partial(biased, after=False),
    "bias.save": partial(biased, after=False, what="save"),
    "bias.load": loaded_bias,
    "bias.capture": partial(biased, after=False, what="capture"),
    "tasks.share_prefixes": partial(prefixes, after=True),
    "tasks.share_prefixes, then wrap": partial(prefixes, after=False),
    "geometry.score": of(af.geometry.score),
    "geometry.score (inputs, distances)": of(lambda m: af.geometry.score(m, inputs=IDS[:1], distances=[1])),
    "geometry.attribute": of(lambda m: af.geometry.attribute(m, IDS[:1], 1, 0)),
    "geometry.reading": reading(af.geometry.reading, lambda handle: handle.explain(1, 0)),
    "geometry.pairs": of(lambda m: af.geometry.pairs(m, IDS[:1], 1)),
    "geometry.monitor": monitored,
    "explain.answer": of(lambda m: af.explain.answer(m, IDS[:1])),
    "explain.reading": reading(af.explain.reading, lambda handle: handle.answer()),
    "knowledge.trace": of(lambda m: af.knowledge.trace(m, IDS[:1])),
    "knowledge.from_ffn": of(lambda m: logits(af.knowledge.from_ffn(m))),
    "knowledge.attach": partial(read_store, after=True),
    "knowledge.attach, then wrap": partial(read_store, after=False),
    "knowledge.attach_features": partial(with_features, after=True),
    "knowledge.edit": edited,
}


def outcome(verb: Callable[[Any, Build], Any], model: Any, build: Build) -> dict[str, Any]:
    try:
        return {"value": numbers(verb(model, build))}
    except Exception as error:
        if os.environ.get("TRACEBACK"):
            raise
        return {"error": type(error).__name__, "says": str(error)}


def cell(name: str, made: Callable[[], Any], build: Build) -> dict[str, Any]:
    """{"equal": whether a spread model gives the same}, or the error, and whether the plain model raises it, too."""
    alone = _alone.setdefault((made, name), outcome(VERBS[name], made(), lambda model: model))
    found = outcome(VERBS[name], made(), build)
    if "error" in found:
        return {**found, "alone": alone == found}
    same = close(alone.get("value"), found["value"])
    return {"equal": same} if same else {"equal": same, "expected": str(alone), "found": str(found)}


_alone: dict[tuple[object, str], dict[str, Any]] = {}


def raised(call: Callable[[], Any]) -> Any:
    """What a call gives; the ranks wait for one another before the next."""
    try:
        return numbers(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()


def cases(mesh: Any) -> dict[str, Any]:
    """{case: what this rank sees}, beside the cells: one rank alone, errors on one rank, and parts that are whole."""
    rank, folder, seen = dist.get_rank(), shared_folder("place"), {}
    model = sharded(plain(), mesh)
    scores = af.geometry.score(plain())
    with patch.object(processes, "LIMIT", timedelta(seconds=3)):
        seen["alone"] = raised(lambda: "" if rank else af.geometry.score(model))
        seen["monitor alone"] = raised(lambda: af.geometry.monitor(model).record() if rank else "")
    seen["after"] = close(numbers(scores), raised(lambda: af.geometry.score(model)))
    logits(model)
    seen["handles"] = [repr(af.geometry.monitor(model)), str(af.geometry.monitor(model))]
    part = plain()
    fully_shard(layers(part)[0], mesh=mesh)
    seen["one layer"] = close(numbers(scores), raised(lambda: af.geometry.score(part)))
    outermost = fully_shard(plain(), mesh=mesh)
    logits(outermost)
    seen["whole after a pass"] = not any(hasattr(p, "device_mesh") for p in outermost.parameters())
    seen["trace after a pass"] = raised(lambda: af.knowledge.trace(outermost, IDS[:1]))
    seen["score after a pass"] = close(numbers(scores), raised(lambda: af.geometry.score(outermost)))
    model, _ = with_bias(plain(), False, partial(sharded, mesh=mesh))
    seen["saved"] = raised(lambda: str(af.bias.save(model, folder))) == str(folder)
    if not rank:
        (folder.parent / "file").write_text("")
    dist.barrier()
    seen["not written"] = raised(lambda: af.bias.save(model, folder.parent / "file" / "x"))
    for parameter in model.parameters():
        if not rank:  # the other rank holds no number of a bias that is this small
            parameter.data.to_local().fill_(float("nan"))
    seen["not finite"] = raised(lambda: str(af.bias.save(model, folder)))
    return seen


def main(path: Path) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    count, chosen = dist.get_world_size(), os.environ.get("CELLS", "").split("/")
    found: dict[str, Any] = {}
    for way, (made, build) in ways(count).items():
        for name in VERBS:
            if way == "tp_plan" and ("then wrap" in name or name in ("bias.save", "bias.capture", "knowledge.edit")):
                continue  # the plan makes a new model of a folder
            if chosen[0] not in ("", way) or (len(chosen) > 1 and chosen[1] != name):
                continue
            ranks: list[Any] = [None] * count
            dist.all_gather_object(ranks, cell(name, made, build))
            found.setdefault(way, {})[name] = ranks
            torch.compiler.reset()
            if not dist.get_rank() and os.environ.get("SHOW"):
                said = [{k: str(v)[:260] for k, v in one.items()} for one in ranks]
                print(f"{way:20} {name:30}", said[0] if said[0] == said[1] else said, flush=True)
    aside: list[Any] = [None] * count
    dist.all_gather_object(aside, cases(init_device_mesh("cpu", (count,))) if chosen[0] in ("", "cases") else {})
    if not dist.get_rank():
        path.write_text(json.dumps({"cells": found, "cases": aside}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
