"""Leaks through what a model chooses, told from leaks through values, with the vote that carries them."""

import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.audit.choices import Choices, separated
from tests.models import tiny

WIDTH, BLOCK, N = 16, 4, 32


def _moba(scores, causal, past, votes):
    """Each query chooses among the blocks before its own (MoBA; NSA's selection)."""
    top = votes.masked_fill(~past, -torch.inf).topk(2, -1).indices
    chosen = torch.zeros_like(votes, dtype=torch.bool).scatter(-1, top, True) & past
    return chosen.repeat_interleave(BLOCK, -1)


def _tile(scores, causal, past, votes):
    """The queries of a block vote on the blocks that all of them read."""
    shared = votes.unflatten(1, (-1, BLOCK)).mean(2).repeat_interleave(BLOCK, 1)
    return _moba(scores, causal, past, shared)


def _indexer(scores, causal, past, votes):
    """Each query chooses keys; the scores are masked first (DeepSeek's sparse attention)."""
    top = scores.masked_fill(~causal, -torch.inf).topk(3, -1).indices
    return torch.zeros_like(causal).expand_as(scores).scatter(-1, top, True)


def _masked_late(scores, causal, past, votes):
    """Later keys take places among the chosen, and are masked only then."""
    return torch.zeros_like(causal).expand_as(scores).scatter(-1, scores.topk(6, -1).indices, True)


def _threshold(scores, causal, past, votes):
    """A query reads keys above the mean over all queries."""
    return scores > scores.mean((1, 2), keepdim=True)


def _own_threshold(scores, causal, past, votes):
    own = scores.masked_fill(~causal, 0).sum(-1, keepdim=True) / causal.sum(-1, keepdim=True)
    return scores > own


def _dense(scores, causal, past, votes):
    return causal


class Sparse(nn.Module):
    def __init__(self, choose, leak=0.0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.choose, self.leak = choose, leak

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        v = v + self.leak * v.roll(-1, 1)
        at = torch.arange(x.shape[1])
        causal, own = at[:, None] >= at, at[:, None] // BLOCK == at // BLOCK
        past = at[:, None] // BLOCK > torch.arange(x.shape[1] // BLOCK)
        scores = q @ k.mT / WIDTH**0.5
        votes = q @ k.unflatten(1, (-1, BLOCK)).mean(2).mT
        allow = (self.choose(scores, causal, past, votes) | own) & causal
        return x + scores.masked_fill(~allow, -torch.inf).softmax(-1) @ v


class ExpertChoice(nn.Module):
    """Each expert takes the tokens that score highest with it (arXiv:2202.09368)."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        gates = self.router(x).sigmoid()
        for number, expert in enumerate(self.experts):
            taken = gates[..., number].topk(x.shape[1] // 2, -1).indices[..., None]
            x = x.scatter_add(1, taken.expand(-1, -1, WIDTH), expert(x.gather(1, taken.expand(-1, -1, WIDTH))))
        return x


class Capacity(nn.Module):
    """Each token chooses an expert, which drops tokens beyond its capacity: those at the start, or at the end."""

    def __init__(self, keep_last):
        super().__init__()
        self.router, self.expert, self.keep_last = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH), keep_last

    def forward(self, x):
        mine = self.router(x).argmax(-1) == 0
        seen = mine.long().flip(1).cumsum(1).flip(1) if self.keep_last else mine.long().cumsum(1)
        return x + (mine & (seen <= 5))[..., None] * self.expert(x)


class Depths(nn.Module):
    """A mixture of depths: a layer counts for half of the tokens (arXiv:2404.02258)."""

    def __init__(self):
        super().__init__()
        self.router, self.inner = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        taken = self.router(x).topk(x.shape[1] // 2, 1).indices
        return x + torch.zeros((*x.shape[:2], 1)).scatter(1, taken, 1.0) * self.inner(x)


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList([layer])

    def forward(self, input_ids):
        return self.head(self.layers[0](self.table(input_ids)))


LAYERS = {  # what is built, through what it leaks, and the operator that votes
    "MoBA": (lambda: Sparse(_moba), None, ""),
    "tile vote": (lambda: Sparse(_tile), "choices", "topk"),
    "indexer": (lambda: Sparse(_indexer), None, ""),
    "masked after the choice": (lambda: Sparse(_masked_late), "choices", "topk"),
    "threshold of all": (lambda: Sparse(_threshold), "choices", "gt"),
    "threshold of its own": (lambda: Sparse(_own_threshold), None, ""),
    "expert choice": (ExpertChoice, "choices", "topk"),
    "depths": (Depths, "choices", "topk"),
    "first tokens kept": (lambda: Capacity(keep_last=False), None, ""),
    "last tokens kept": (lambda: Capacity(keep_last=True), "choices", "argmax"),
    "values": (lambda: Sparse(_dense, leak=0.1), "", ""),
    "values, beside a causal choice": (lambda: Sparse(_moba, leak=0.1), "values", ""),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_way_of_a_leak(name):
    make, through, operator = LAYERS[name]
    torch.manual_seed(1)
    model = Model(make())
    report = af.audit.check(model, torch.randint(0, 32, (1, N)), order=af.masks.causal(N), passes=N)
    assert report.ok == (through is None)
    for violation in report.violations[:1]:
        assert violation.through == through
        assert violation.vote.split(" ")[0] == operator
        assert ("test_choices.py:" in violation.vote) == bool(operator)
        assert (f"through {through}" in str(violation)) == bool(through)


def test_a_model_of_experts_that_leaks_through_values():
    """Later tokens go to other experts, as they may; the leak is none of them."""
    model = tiny("Mixtral", torch.float32)
    projection = model.model.layers[1].self_attn.v_proj
    projection.register_forward_hook(lambda _, __, out: out + out.roll(-1, dims=1))
    report = af.audit.check(model, torch.randint(0, 16, (1, 12), generator=torch.Generator().manual_seed(0)))
    assert not report.ok
    assert {violation.through for violation in report.violations} <= {"", "values"}
    assert {violation.vote for violation in report.violations} == {""}


@pytest.mark.parametrize("scale", [1, 6])
def test_offsets_of_experts_are_no_votes(scale):
    """They count what routers chose; the vote is the top-k over tokens in the hook."""
    model = tiny("Mixtral", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)

    def depths(module, inputs, output):
        taken = output.norm(dim=-1).topk(output.shape[1] // 2).indices
        return output * torch.zeros(output.shape[:2]).scatter(1, taken, 1.0)[..., None]

    model.model.layers[1].mlp.register_forward_hook(depths)
    report = af.audit.check(model, torch.randint(0, 16, (1, 12), generator=torch.Generator().manual_seed(0)))
    assert report.violations[0].vote.startswith("topk (test_choices.py:")


OPERATORS = {
    "topk": lambda z: z.topk(2).indices[0],
    "sort": lambda z: z.sort(descending=True, stable=True).indices[1],
    "argmax": lambda z: z.argmax(),
    "max": lambda z: z.max(0, keepdim=True).indices[0],
    "kthvalue": lambda z: z.kthvalue(2).indices,
    "comparison": lambda z: (z > 0).sum() % 4,
    "rounding": lambda z: z.sum().long() % 4,
    "a branch": lambda z: torch.tensor(1 if z[0] > z[1] else 2),
    "histogram": lambda z: torch.bucketize(z[0], torch.tensor([0.0, 1.0])),
}
WAS, IS = torch.tensor([1.5, -1.0, 0.5, -0.2]), torch.tensor([-1.0, 0.3, 2.5, 2.0])


@pytest.mark.parametrize("name", OPERATORS)
def test_every_kind_of_choice_is_held(name):
    table = torch.arange(4.0)[:, None] + 1

    def way(function):
        base = function(WAS)
        return separated(lambda changed: function(IS if changed else WAS), lambda v: not torch.allclose(v, base))

    through, vote = way(lambda z: table[OPERATORS[name](z)])
    assert through == "choices"
    assert "test_choices.py:" in vote
    assert way(lambda z: z[:1] + 0 * table[OPERATORS[name](z)])[0] == "values"
    assert way(lambda z: z[:1] + 10 * table[OPERATORS[name](z)])[0] == "values and choices"


def test_values_at_held_indices_are_computed_anew():
    with Choices() as first:
        WAS.topk(2)
    with Choices(dict(enumerate(first.made))):
        values, indices = IS.topk(2)
    assert torch.equal(indices, WAS.topk(2).indices)
    assert torch.equal(values, IS[indices])


def test_another_way_through_the_code_counts_as_values():
    def run(changed):
        z = IS if changed else WAS
        return z.sort().values[:1] if z[0] > z[1] else z.max(0).values[None]

    assert separated(run, lambda v: not torch.equal(v, run(False)))[0].startswith("values")
