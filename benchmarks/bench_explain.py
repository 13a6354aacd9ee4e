"""The flow of one answer, and the entries that fired, over one forward pass of SmolLM2-135M.

The peers are that pass, with the logits of all tokens, and plain activation patching: a forward pass without each head
at the last token, which says of every head, and of no entry, what `answer` says of all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attnflow import explain, knowledge, load_model
from benchmarks.bench_attribution import forward, tokens
from benchmarks.harness import Case, main


@torch.no_grad()
def patched(model: nn.Module, n: int) -> object:
    """The likeliest token's logit without each head of each layer at the last token."""
    ids, lost = tokens(n), list[float]()
    own = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    width = model.config.hidden_size // model.config.num_attention_heads
    for layer in model.model.layers:
        for head in range(model.config.num_attention_heads):

            def without(_: nn.Module, given: tuple[Tensor], head: int = head) -> tuple[Tensor]:
                joined = given[0].clone()
                joined[:, -1, head * width : (head + 1) * width] = 0
                return (joined,)

            hook = layer.self_attn.o_proj.register_forward_pre_hook(without)
            logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
            hook.remove()
            lost.append(float((own - logits)[own.argmax()]))
    return lost


def answered(provider: str, n: int) -> Callable[[], object]:
    model = load_model("smollm2-135m").model
    if provider != "attnflow":
        return lambda: {"forward": forward, "patching": patched}[provider](model, n)
    assert explain.answer(model, {"input_ids": tokens(n)}).error < 1e-5  # no speed of a wrong result
    return lambda: explain.answer(model, {"input_ids": tokens(n)})


def traced(provider: str, n: int) -> Callable[[], object]:
    model = load_model("smollm2-135m").model
    if provider == "forward":
        return lambda: forward(model, n)
    converted = model if provider == "plain" else knowledge.from_ffn(model)
    return lambda: knowledge.trace(converted, {"input_ids": tokens(n)}, position=-1)


def cases(device: str) -> list[Case]:
    if device != "cpu":
        return []
    here, listed = "benchmarks.bench_explain", list[Case]()
    for n in (14, 128, 512):
        answers, traces = "explain.answer", "knowledge.trace of the last token"
        listed += [
            Case(answers, "attnflow", n, here, "answered", ("attnflow", n)),
            Case(answers, "one forward pass", n, here, "answered", ("forward", n)),
            Case(traces, "attnflow", n, here, "traced", ("attnflow", n), note="of a converted model"),
            Case(traces, "with the conversion", n, here, "traced", ("plain", n)),
            Case(traces, "one forward pass", n, here, "traced", ("forward", n)),
        ]
    patching = "activation patching of all heads"
    listed.insert(2, Case("explain.answer", patching, 14, here, "answered", ("patching", 14), repeats=3))
    return listed


if __name__ == "__main__":
    main(cases, ["torch", "transformers"], time_limit=300)
