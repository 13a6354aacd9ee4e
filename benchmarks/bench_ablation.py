"""Ablations of SmolLM2's entries in one batch, against one forward pass of as many copies and against one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

import attnflow as af
from attnflow.knowledge.layered import readers
from attnflow.knowledge.reading.ablation import LocatedEntry, logits_without
from attnflow.models import sample_text
from benchmarks.harness import OURS, Case, main

COUNT = 16  # entries
FORWARD, SINGLY = "one forward of batch 16", "one by one"


def ablations(provider: str, tokens: int) -> Callable[[], object]:
    """The callable to time; the entries are spread over the layers."""
    loaded = af.load_model("smollm2-135m", dtype="float32")
    model = cast(Any, af.knowledge.from_ffn(loaded))
    ids = cast(Any, loaded.tokenizer)(sample_text(), return_tensors="pt", truncation=True, max_length=tokens)[
        "input_ids"
    ]
    layers = readers(model)
    some = [LocatedEntry(layers[place * len(layers) // COUNT], place) for place in range(COUNT)]
    inputs, last = {"input_ids": ids}, ids.shape[1] - 1
    batch = ids.expand(COUNT, -1).contiguous()

    @torch.no_grad()
    def run() -> object:
        if provider == FORWARD:
            return model(input_ids=batch, use_cache=False, logits_to_keep=1)
        if provider == SINGLY:
            return [logits_without(model, inputs, [one], last) for one in some]
        return logits_without(model, inputs, some, last)

    return run


def cases(device: str) -> list[Case]:
    """In main memory only, for a short and a longer text."""
    return [
        Case(f"{COUNT} ablations of SmolLM2-135M", provider, tokens, __name__, "ablations", (provider, tokens), 5)
        for tokens in (16, 64)
        for provider in (OURS, FORWARD, SINGLY)
        if device == "cpu"
    ]


if __name__ == "__main__":
    main(cases, ["torch", "transformers"])
