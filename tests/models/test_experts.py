"""How a module of experts reads its parameters, found by comparing readings with what it computes."""

import pytest
import torch
from torch import nn

from attnflow.models.anatomy.feed_forward import packed_experts


class Unlike(nn.Module):
    """Experts of the usual shapes that compute something else: a norm after each, or the token itself from one."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.act_fn = kind, nn.functional.silu
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 6))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        written = torch.zeros_like(hidden_states)
        for expert in range(3):
            token, place = torch.where(top_k_index == expert)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            if self.kind == "softmax":  # no weight of its own
                gate = gate.softmax(dim=-1)
            out = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            if self.kind == "norm":
                out = nn.functional.normalize(out, dim=-1)
            if self.kind == "itself" and expert == 2:
                out = hidden_states[token]
            written.index_add_(0, token, out * top_k_weights[token, place, None])
        return written


@pytest.mark.parametrize("kind", ["usual", "norm", "itself", "softmax"])
def test_experts_that_compute_something_else_are_not_taken(kind):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert (packed_experts(Unlike(kind)) is None) == (kind != "usual")
    module = Unlike("usual")
    if kind == "softmax":  # a function of a neuron's scores that looks at others, under the name that is used
        module.act_fn = lambda gate: gate.softmax(dim=-1)
        assert packed_experts(module) is None
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("kind", "interleaved"), [("concatenated", False), ("interleaved", True)])
def test_which_scores_belong_to_a_neuron_is_probed(kind, interleaved):
    module = Unlike("usual")

    def gated(scores):
        gate, up = (scores[..., ::2], scores[..., 1::2]) if interleaved else scores.chunk(2, dim=-1)
        return gate.sigmoid() * (up + 1)

    def forward(hidden_states, top_k_index, top_k_weights):
        written = torch.zeros_like(hidden_states)
        for token, experts in enumerate(top_k_index):
            for place, expert in enumerate(experts):
                weights = gated(module.gate_up_proj[expert] @ hidden_states[token])
                written[token] += top_k_weights[token, place] * (module.down_proj[expert] @ weights)
        return written

    module._apply_gate, module.forward = gated, forward
    read = packed_experts(module)
    assert (read.interleaved, read.joint, read.neurons, read.width) == (interleaved, True, 8, 6)
