"""Golden files of the causal heads that transformers 5.9 to 5.18 left open, for the transformers that runs this.

    python -m tests.audit.golden.make

In an environment with another version, such as `pip install --no-deps --target old transformers==5.17.0`:

    PYTHONPATH=old:src:. python -m tests.audit.golden.make
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from attnflow.audit.measurement import MeasuredOrder, record

SIZE = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.2, "is_decoder": True,
}  # fmt: skip
LEAKS: dict[str, tuple[str, dict[str, object]]] = {
    "BertLMHeadModel": ("BertConfig", {}),
    "RoFormerForCausalLM": ("RoFormerConfig", {}),
    "BigBirdForCausalLM": ("BigBirdConfig", {"attention_type": "original_full"}),
    "RemBertForCausalLM": ("RemBertConfig", {"input_embedding_size": 16, "output_embedding_size": 32}),
    "MegatronBertForCausalLM": ("MegatronBertConfig", {}),
}
IDS = [[7, 50, 3, 22, 14, 41, 9, 33]]


def measured_order(name: str) -> MeasuredOrder:
    """What a random model of that class lets flow."""
    config, more = LEAKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, name)(getattr(transformers, config)(**SIZE, **more))
    return record(model, torch.tensor(IDS))


def main() -> None:
    """Write the files of this version."""
    folder = Path(__file__).parent / transformers.__version__
    folder.mkdir(exist_ok=True)
    for name in LEAKS:
        print(measured_order(name).save(folder / f"{name}.json"))


if __name__ == "__main__":
    main()
