"""Draws the pictures of README.md and docs/index.md; `make docs` runs it.

    python docs/pictures.py          # those that are missing
    python docs/pictures.py --all    # all of them, in a few minutes on two cores

Each is what the library's own `af.report.figure` makes of a result.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from transformers import Trainer, TrainingArguments

import attnflow as af
from attnflow.report.svg import encode

FOLDER = Path(__file__).parent / "pictures"
SUM = "Q: John has 5 apples. He buys 6 more. A: 5 + 6 ="


def mask() -> Any:
    """A mask: blocks of clean tokens, and blocks that are to be predicted from the blocks before them."""
    return af.report.figure(af.masks.block_two_stream(3, 2), size=300)


def hasse() -> Any:
    """The Hasse diagram of the order that this mask generates."""
    return af.report.figure(af.order.analyze(af.masks.block_two_stream(3, 2)).hasse)


def audit() -> Any:
    """An audit of SmolLM2 with a fault: one norm that takes the mean over the sequence."""
    loaded = af.load_model("smollm2-135m")
    norm: Any = loaded.model.get_submodule("model.layers.12.post_attention_layernorm")
    norm.register_forward_hook(lambda module, inputs, output: output + 0.1 * output.mean(1, keepdim=True))
    return af.report.figure(af.audit.check(loaded, af.models.sample_text("sonnets", 120), passes=8))


def bias() -> Any:
    """What a bias adds to the scores of SmolLM2 after a few steps of training."""
    loaded = af.load_model("smollm2-135m")
    af.bias.attach(loaded, af.bias.GuidanceConfig(), train="guidance")
    ids = loaded.tokenizer(af.models.sample_text("sonnets", 6000), return_tensors="pt")["input_ids"][0]
    rows = [{"input_ids": row, "labels": row} for row in ids.split(128)[:-1]]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder, max_steps=8, per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="no", report_to="none"
        )
        Trainer(loaded.model, options, train_dataset=rows).train()
    return af.report.figure(af.bias.capture(loaded, SUM), layer=14)


def plane() -> Any:
    """Symmetry and directionality of two models, between those that were published."""
    return af.report.figure(*(af.geometry.score(name, per_head=False) for name in ("smollm2-135m", "minilm")))


def trace() -> Any:
    """Which feed-forward entries fired for a text, and what they did to the logit of the next token."""
    result = af.knowledge.trace(af.load_model("smollm2-135m"), "The capital of France is")
    return af.report.figure(replace(result, model="SmolLM2"))


PICTURES: tuple[Callable[[], Any], ...] = (mask, hasse, audit, bias, plane, trace)


def main() -> None:
    """Draw what is missing, or all."""
    FOLDER.mkdir(exist_ok=True)
    for draw in PICTURES:
        path = FOLDER / f"{draw.__name__}.svg"
        if "--all" in sys.argv or not path.exists():
            with rc_context({"svg.fonttype": "none"}):  # letters as text take less room than as paths
                path.write_bytes(encode(draw(), ".svg"))
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
