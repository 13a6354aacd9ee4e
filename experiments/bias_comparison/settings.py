"""The parts of the comparison and their settings, scale by scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from attnflow.bias.config import Placement
from experiments.bias_comparison.arms import KNOBS, Trained

Kind = Literal["probe", "text", "masked"]

BATTERY: Final = ("plain", "dense", "alibi", "cumulative", "gate", "key", "lowrank", "guidance")
TUNED: Final = ("dense", "lora", "gate", "key", "lowrank", "guidance")
CHANGES: Final = ("same text", "new text")
FEW: Final = tuple(f"{arm} {rows}" for rows in (16, 64) for arm in ("plain", "dense", "guidance"))


@dataclass(frozen=True)
class Part:
    name: str  # of a probe, or of a task on text
    kind: Kind  # "probe", "text" (next token) or "masked" (an encoder)
    arms: tuple[str, ...]  # what is compared
    # sizes as `LlamaConfig` or `BertConfig` takes them, or the name of a pretrained model
    model: Mapping[str, Any] | str
    # learning rates tried for every arm, on the choosing seeds; the best on data for choosing is kept
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    steps: int = 500  # of the optimiser
    batch_size: int = 32  # sequences or rows of a pass
    passes: int = 1  # of a step
    hidden_dim: int = 32  # of `guidance`; it sets the number of parameters of every arm
    layers: Placement = "every"  # with a bias
    trained: Trained = "all"  # "all", or the "additions" to a frozen model
    # steps that the model is trained before, which all arms of a seed share; 0: arms begin at a random model
    start: int = 0
    start_rate: float = 3e-3  # of these steps
    # whether the start keeps its rate to the end, and arms go on with the state of its optimiser, so that no arm begins
    # by losing what the start has learned. Otherwise its rate falls, and arms begin anew.
    steady: bool = False


@dataclass(frozen=True)
class Comparison:
    """All parts. The defaults are the scale "tiny"."""

    parts: tuple[Part, ...]  # by name, in the order in which they are run
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # of the model at its start, of what is added, and of data
    choosing: int = 1  # how many of the seeds, from the first on, choose the learning rate of each arm
    fresh: bool = False  # whether these seeds are left out of the results
    widen: bool = False  # whether a range of rates is widened where the best one lies at its end
    text: str = "shakespeare"  # "shakespeare", or a data set of the hub, which is streamed
    new_text: str = "poems"  # what "tuned" and "changes" tune to: "poems" of Shakespeare, or another data set
    # how many word pieces are learned from the text, or the name of a tokenizer of the hub, or "" for the pretrained
    # model's own
    tokenizer: int | str = 512
    rows: int = 0  # of a data set, for training
    held_out: int = 96  # rows for the results, and as many for choosing
    length: int = 64  # tokens of a row
    tested: int = 512  # sequences of a probe for the results
    dtype: str = "float32"  # of a pretrained model
    measure_every: int = 50  # steps between two measurements of a task on text
    save_every: int = 200  # steps between two checkpoints


def llama(width: int, layers: int, heads: int, head_dim: int, inner: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
    }


def bert(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _probe(name: str, **changes: Any) -> Part:
    return replace(Part(name, "probe", BATTERY, llama(32, 2, 2, 16, 64), rates=(3e-3, 1e-2)), **changes)


def probes() -> tuple[Part, ...]:
    """The small tasks, but `recall`, which is a study of its own."""
    return (
        _probe("rebinding"),
        _probe("copy", steps=150),
        _probe("distance", steps=200),
        _probe("flip-flop", steps=200),
        _probe("counting", steps=250),
        _probe("sums", steps=350),
    )


def _continued() -> Part:
    """A decoder that has learned from plays, which goes on with them."""
    decoder = llama(64, 4, 4, 16, 176)
    return Part(
        "text", "text", BATTERY, decoder, steps=300, batch_size=8, hidden_dim=64, layers="every_other", start=1000
    )


def texts() -> tuple[Part, ...]:
    """The tasks on text but `text`, which is a study of its own; all but the encoder share one model and its start."""
    text = _continued()
    return (
        replace(text, name="tuned", arms=TUNED, trained="additions"),
        replace(text, name="knobs", arms=(*KNOBS, "bilinear", "dot"), rates=(1e-3, 3e-3)),
        replace(text, name="changes", arms=CHANGES, trained="additions", rates=(3e-3,)),
        replace(
            text,
            name="encoder",
            kind="masked",
            arms=("plain", "dense", "gate", "key", "lowrank", "guidance"),
            model=bert(64, 2, 4),
            layers="every",
            steps=400,
            start=0,
            rates=(3e-3, 1e-2),
        ),
    )


def tiny() -> Comparison:
    """One CPU core; the README says how long."""
    order = {part.name: part for part in (*texts(), *probes())}
    first = ("tuned", "sums", "rebinding")
    return Comparison((*(order.pop(name) for name in first), *order.values()))


def text() -> Comparison:
    """Continued training on text: every arm at every rate, ten seeds, which together choose each arm's rate."""
    part = replace(_continued(), steady=True, rates=(1e-3, 3e-3, 9e-3))
    return Comparison((part,), seeds=tuple(range(10)), choosing=10, widen=True)


def recall() -> Comparison:
    """Retrieval, distractors and depth: three seeds choose each arm's rate, ten others give the results."""
    return Comparison(
        (_probe("recall", rates=(1e-3, 3e-3, 1e-2)),),
        seeds=tuple(range(13)),
        choosing=3,
        fresh=True,
        widen=True,
        measure_every=100,
    )


def few() -> Comparison:
    """Models trained with an arm from their first step, then tuned as a whole to 16 or 64 rows of another text."""
    part = replace(_continued(), name="few", arms=FEW, steps=50, rates=(3e-4, 1e-3, 3e-3))
    return Comparison((part,), seeds=tuple(range(8)), choosing=8, widen=True, measure_every=25)


def smollm2() -> Comparison:
    """SmolLM2-135M, with training of the additions alone: hours of two CPU cores."""
    part = Part(
        "tuned",
        "text",
        TUNED,
        "smollm2-135m",
        steps=100,
        batch_size=1,
        hidden_dim=64,
        layers="every_other",
        trained="additions",
    )
    return Comparison((part,), new_text="shakespeare", tokenizer="", held_out=32, length=256, dtype="bfloat16")


def small() -> Comparison:
    """One GPU: a decoder of 25 M parameters on Wikipedia, tuned to stories; two probes, eight times as wide."""
    parts = tuple(
        replace(part, model=_wider(part.model), steps=2 * part.steps, hidden_dim=64)
        if part.kind == "probe"
        else replace(
            part,
            model=bert(256, 6, 4) if part.kind == "masked" else llama(512, 8, 8, 64, 1408),
            steps=600,
            batch_size=16,
            start=part.start and 3000,
            start_rate=1e-3,
            rates=(1e-4, 3e-4, 1e-3) if part.steady else (3e-4, 1e-3, 3e-3)[: len(part.rates)],
        )
        for part in (*text().parts, *recall().parts, *tiny().parts)
        if part.name in ("text", "tuned", "encoder", "recall", "sums")
    )
    return replace(
        tiny(),
        parts=parts,
        choosing=3,
        widen=True,
        text="wikimedia/wikipedia:20231101.en:train",
        new_text="roneneldan/TinyStories",
        tokenizer="google-bert/bert-base-uncased",
        rows=100_000,
        length=256,
        measure_every=150,
        save_every=500,
    )


def paper() -> Comparison:
    """LLaMA-2-7B, 50,000 steps of 1,024 rows of 2,048 tokens of RedPajama (cleaned), with all controls; and Table 3."""
    part = Part(
        "text",
        "text",
        BATTERY,
        "meta-llama/Llama-2-7b-hf",
        rates=(1e-5, 3e-5, 1e-4),
        steps=50_000,
        batch_size=1,
        passes=1024,
        hidden_dim=64,
        layers="every_other",
    )
    parts = (
        part,
        replace(part, name="tuned", arms=TUNED, trained="additions", rates=(3e-4, 1e-3, 3e-3), steps=5_000),
        replace(part, name="knobs", arms=(*KNOBS, "bilinear", "dot"), rates=(3e-5,)),
    )
    return Comparison(
        parts,
        seeds=(0, 1, 2),
        text="cerebras/SlimPajama-627B",
        new_text="roneneldan/TinyStories",
        tokenizer="",
        rows=5_000_000,
        held_out=1024,
        length=2048,
        dtype="bfloat16",
        measure_every=500,
        save_every=500,
    )


def _wider(sizes: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    if isinstance(sizes, str):
        return sizes
    return {**sizes, "hidden_size": 8 * sizes["hidden_size"], "intermediate_size": 8 * sizes["intermediate_size"]}
