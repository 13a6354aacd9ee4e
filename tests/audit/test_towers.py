"""Several stacks of different directions in one model: a request belongs to the stack that made it."""

from itertools import product

import pytest
import torch
import transformers
from torch import nn

from attnflow.audit import check, declared_order
from tests.audit.common import wrapped
from tests.conformance.miniature import named
from tests.conformance.senses import runs_on

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 60, "max_position_embeddings": 32}
MORE = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
LENGTH = 11


def tower(causal):
    config = transformers.LlamaConfig(**SIZES) if causal else transformers.ModernBertConfig(**SIZES, **MORE)
    return (transformers.LlamaForCausalLM if causal else transformers.ModernBertModel)(config)


class Towers(nn.Module):
    """One tower that reads `input_ids`, and one of the other direction beside it."""

    def __init__(self, causal, last):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.beside, self.last = tower(causal), tower(not causal), last
        self.config = self.read.config

    def forward(self, input_ids, speech_ids):
        calls = [(self.read, input_ids), (self.beside, speech_ids)]
        states = {tower: tower(ids)[0] for tower, ids in (calls[::-1] if self.last else calls)}
        return states[self.read], states[self.beside].mean((1, 2))


class Generates(Towers):
    """Generates by the tower whose head it is."""

    def can_generate(self):
        return True

    def get_output_embeddings(self):
        return None


def given(length):
    generator = torch.Generator().manual_seed(0)
    lengths = {"input_ids": LENGTH, "speech_ids": length}
    return {name: torch.randint(5, 60, (2, n), generator=generator) for name, n in lengths.items()}


CASES = list(product((Towers, Generates), (False, True), (LENGTH, LENGTH + 2)))


@pytest.mark.parametrize(("kind", "last", "length"), CASES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_healthy_tower_beside_one_of_another_direction(kind, last, length, causal):
    model = kind(causal, last).eval()
    report = check(model, given(length))
    assert report.order.startswith("causal" if causal else "bidirectional"), report.order
    assert report.verdict == ("clean" if causal else "nothing tested"), str(report)
    assert declared_order(model, given(length)).reachability()[0, -1] == (not causal)


@pytest.mark.parametrize(("kind", "last", "length"), CASES)
def test_a_causal_tower_that_leaks_beside_one_that_reads_all(kind, last, length):
    model = kind(True, last).eval()
    layer = model.read.model.layers[1].mlp
    with wrapped(layer, lambda out, hidden: out + 0.1 * hidden.flip(-2)):
        report = check(model, given(length))
    assert [v.module for v in report.violations if v.kind == "order"] == ["read.model.layers.1.mlp"], str(report)


@pytest.mark.parametrize("own", [False, True])
def test_text_beside_speech_that_is_generated(own):
    """CLVP generates by its speech decoder; a head of its own would make its text causal, whatever it asks for."""
    model = named("ClvpModelForConditionalGeneration")
    model.get_output_embeddings = lambda: nn.Linear(32, 60) if own else None
    report = check(model, runs_on(model), watch="layers")
    assert report.order == ("causal" if own else "bidirectional")
    assert bool(report.violations) == own, str(report)
