"""Classes of transformers that audits accused or refused without reason, in miniature."""

import pytest
import torch
import transformers

from attnflow.audit import check
from tests.conformance.miniature import awake, small_config

TOKENS = torch.arange(9, 57).view(4, 12)
NOISE = torch.Generator().manual_seed(0)
TARGET = {"decoder_input_ids": TOKENS[:1, :10]}
FLAUBERT = {"input_ids": TOKENS[:2], "attention_mask": (torch.arange(12) < torch.tensor([[12], [9]])).long()}
TIGHT = {
    "sliding_window": 4,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
}
SHORT = {"swa_num_key_value_heads": 2, "sliding_window_size": 8, "rel_extent": 16}

# (class, changes of its configuration, inputs, verdict, whether its cache is audited as well)
CASES = [
    ("XLMWithLMHeadModel", {}, {"input_ids": TOKENS[:2]}, "nothing tested", False),
    ("XLMWithLMHeadModel", {"causal": True}, {"input_ids": TOKENS[:2]}, "clean", False),
    ("FlaubertWithLMHeadModel", {}, FLAUBERT, "clean", False),
    ("DeepseekV4ForCausalLM", TIGHT, {"input_ids": TOKENS[:2]}, "clean", False),
    ("MusicgenForCausalLM", {"num_codebooks": 4}, {"input_ids": TOKENS}, "clean", False),
    ("MusicgenMelodyForCausalLM", {"num_codebooks": 2}, {"input_ids": TOKENS}, "clean", False),
    ("RfDetrModel", {"num_queries": 10}, {"pixel_values": torch.rand(2, 3, 64, 64)}, "nothing tested", False),
    ("LightGlueForKeypointMatching", {}, {"pixel_values": torch.rand(1, 2, 3, 64, 64)}, "nothing tested", False),
    (
        *("NemotronAsrStreamingEncoder", {"sliding_window": 5, "default_num_lookahead_tokens": 2}),
        *({"input_features": torch.randn(1, 300, 80, generator=NOISE)}, "nothing tested", False),
    ),
    ("Inkling2ForCausalLM", SHORT, {"input_ids": TOKENS[:1]}, "clean", True),
    (
        *("MoonshineForConditionalGeneration", {}),
        *(TARGET | {"input_values": torch.randn(1, 16000, generator=NOISE)}, "clean", True),
    ),
    *(
        (name, {}, TARGET | {"input_features": torch.randn(1, 200, 80, generator=NOISE)}, "clean", True)
        for name in ("CanaryForConditionalGeneration", "CohereAsrForConditionalGeneration")
    ),
]


@pytest.mark.parametrize(("name", "changes", "given", "verdict", "cache"), CASES)
def test_families_raise_no_alarm(name, changes, given, verdict, cache):
    report = check(miniature(name, changes), given, cache=cache, passes=6, both_sides=False)
    assert report.verdict == verdict, str(report)


def test_crosstalk_of_codebooks_is_found(mode):
    """Rows of one sequence are added up; the next sequence must not move with them."""
    model = miniature("MusicgenForCausalLM", {"num_codebooks": 2})
    model.lm_heads[0].register_forward_hook(lambda _, args, output: output + output.roll(1, 0))
    report = check(model, TOKENS, mode=mode, both_sides=False)
    assert [violation.kind for violation in report.violations] == ["batch"], str(report)


def miniature(name, changes):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return awake(cls(small_config(cls.config_class, **changes)))
