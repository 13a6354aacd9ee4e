"""Why a head attended where it did: the time after the model's own pass, and memory, on SmolLM2-135M.

The peers are differentiation of the held pass for each component, which holds for every architecture, and one forward
pass of the model. Beyond 4,096 tokens the outputs of sublayers are projected when they come, and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from importlib import import_module
from unittest.mock import patch

import torch

from attnflow import geometry, load_model
from attnflow.models.passes.stream import ResidualStream
from benchmarks.harness import Case, main

LAYER, HEAD = 20, 3
parts = import_module("attnflow.geometry.parts")


def tokens(n: int) -> torch.Tensor:
    """Ids drawn at random: what they say changes no shape."""
    return torch.randint(20, 40_000, (1, n), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def forward(model: torch.nn.Module, n: int) -> object:
    return model(tokens(n), use_cache=False)[0][0, -1, 0].item()


def after_the_pass(provider: str, n: int) -> Callable[[], object]:
    model = load_model("smollm2-135m").model
    if provider == "forward":
        return lambda: forward(model, n)
    reading = geometry.reading(model, {"input_ids": tokens(n)})
    assert reading.explain(LAYER, HEAD).error < 1e-5  # no speed of a wrong result

    def differentiated() -> object:
        with patch.object(parts, "_direct", return_value=None):
            return reading.explain(LAYER, HEAD)

    return differentiated if provider == "differentiated" else lambda: reading.explain(LAYER, HEAD)


def whole(provider: str, n: int) -> Callable[[], object]:
    model = load_model("smollm2-135m").model
    if provider == "kept":
        ResidualStream.record = partialmethod(ResidualStream.record, limit=float("inf"))  # type: ignore[assignment]
    if provider == "forward":
        return lambda: forward(model.model, n)
    return lambda: geometry.attribute(model, {"input_ids": tokens(n)}, LAYER, HEAD)


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    here, after, all_of_it = "benchmarks.bench_attribution", "attribution after the pass", "attribution, whole call"
    listed = [
        Case(after, "attnflow", 512, here, "after_the_pass", ("attnflow", 512), note="one head, one query, all keys"),
        Case(after, "differentiation by component", 512, here, "after_the_pass", ("differentiated", 512)),
        Case(after, "one forward pass", 512, here, "after_the_pass", ("forward", 512)),
    ]
    for provider, key in (("attnflow", "attnflow"), ("all outputs kept", "kept"), ("one forward pass", "forward")):
        listed.append(Case(all_of_it, provider, 8192, here, "whole", (key, 8192), repeats=1))
    return listed


if __name__ == "__main__":
    main(cases, ["torch", "transformers"], time_limit=300)
