"""A small attention model with a ladder of what stands before its attention, and the arms that are added to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from attnflow.bias import GuidanceConfig, KeyConfig, LowRankConfig, attention
from attnflow.bias.config import BiasConfig, LayerShape, Vectors
from attnflow.bias.kind import BiasTerm
from experiments.pairwise_control.task import Problems, Task

Rung = Literal["nothing", "norm", "attention", "network", "block"]
Arm = Literal["plain", "dense", "lowrank", "key", "guidance"]
RUNGS: Final[tuple[Rung, ...]] = get_args(Rung)
ARMS: Final[tuple[Arm, ...]] = get_args(Arm)

WIDTH: Final = 32
HEAD: Final = 8  # width of queries and keys
UNITS: Final = 32  # of a feed-forward layer
DENSE: Final = 10  # more units of the last one, with the parameters of a bias

# With rank 40 on vectors of width 8, `lowrank` can be every bilinear form of query and key.
BIASES: Final[Mapping[str, BiasConfig]] = {
    "lowrank": LowRankConfig(rank=40),
    "key": KeyConfig(hidden_dim=53),
    "guidance": GuidanceConfig(hidden_dim=32),
}


class FeedForward(nn.Module):
    """W2 GELU(W1 h + b)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, units), nn.Linear(units, WIDTH, bias=False)

    def forward(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return self.out(functional.gelu(self.into(hidden)))


class Attention(nn.Module):
    """One head; every token attends to the candidates alone, which come first; no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, HEAD, bias=False), nn.Linear(WIDTH, HEAD, bias=False)
        self.value, self.output = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self,
        tokens: Float[Tensor, "batch tokens width"],
        candidates: Float[Tensor, "batch candidates width"],
        values: Float[Tensor, "batch candidates width"],
        bias: nn.Module | None = None,
    ) -> tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens candidates"]]:
        """What is added to the tokens, and the weights."""
        query, key = self.query(tokens), self.key(candidates)
        terms = []
        if bias is not None:
            places = torch.arange(key.shape[1] + 1)[None]
            kind = cast(BiasTerm, bias)
            columns = kind.columns(Vectors(key, None, None, places[:, :-1]))
            terms = [kind.term(Vectors(query, None, None, places[:, -1:]), columns, None)]
        value = self.value(values)
        mixed, weights = attention(query[:, None], key[:, None], value[:, None], terms, need_weights=True)
        assert weights is not None
        return self.output(mixed[:, 0]), weights[:, 0]


class Ladder(nn.Module):
    """Numbers, embedded linearly; what the rung puts before attention; attention of the query; a feed-forward layer.

    The values of the last attention are the labels' embeddings, its keys functions of the candidates' numbers alone. At
    the rung "nothing" queries and keys are affine in their numbers. Logits are products with the labels' embeddings.
    Values and outputs start as the identity, so that a model begins by naming what it attends to. Otherwise some
    seeds learn to attend to wrong candidates, and stay there. All arms of a seed begin as the same function.

    Args:
        task: whose numbers are embedded.
        rung: what stands before attention: "nothing"; "norm", RMSNorm; "attention", a layer of it among candidates;
            "network", a feed-forward layer; "block", a whole pre-norm block and the norm that follows it.
        arm: what is added: "plain", nothing; "dense", units of the last feed-forward layer; or a bias.
        seed: of the initial weights.
    """

    def __init__(self, task: Task, rung: Rung, arm: Arm, seed: int) -> None:
        super().__init__()
        self.scale = task.distance
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.candidate, self.asked = nn.Linear(1, WIDTH), nn.Linear(1, WIDTH)
            self.label = nn.Embedding(task.candidates, WIDTH)
            nn.init.normal_(self.label.weight, std=0.5)
            self.last, self.after = Attention(), FeedForward(UNITS)
            for projection in (self.last.value, self.last.output):
                nn.init.eye_(projection.weight)
            self.mixing = Attention() if rung in ("attention", "block") else None
            self.network = FeedForward(UNITS) if rung in ("network", "block") else None
            normed = rung in ("norm", "block")
            self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) if normed else nn.Identity() for _ in range(3))
            self.more = self.bias = None
            if arm == "dense":
                self.more = FeedForward(DENSE)
                nn.init.zeros_(self.more.out.weight)
            elif arm != "plain":
                self.bias = BIASES[arm].module(LayerShape(0, 1, 1, HEAD, WIDTH, is_causal=False))

    @property
    def added(self) -> int:
        return sum(p.numel() for part in (self.more, self.bias) if part is not None for p in part.parameters())

    def forward(
        self,
        query: Int[Tensor, "batch"],
        numbers: Int[Tensor, "batch candidates"],
        labels: Int[Tensor, "batch candidates"],
    ) -> tuple[Float[Tensor, "batch labels"], Float[Tensor, "batch candidates"]]:
        """Logits of the labels, and the weights of the query's attention to the candidates."""
        given = self.candidate(numbers[..., None] / self.scale)
        hidden = torch.cat([given, self.asked(query[:, None, None] / self.scale)], dim=1)
        if self.mixing is not None:
            seen = self.norms[0](hidden)
            hidden = hidden + self.mixing(seen, seen[:, :-1], seen[:, :-1])[0]
        if self.network is not None:
            hidden = hidden + self.network(self.norms[1](hidden))
        seen = self.norms[2](hidden)
        candidates = seen[:, :-1]
        mixed, weights = self.last(seen[:, -1:], candidates, self.label(labels), self.bias)
        state = (hidden[:, -1:] + mixed)[:, 0]
        more = 0.0 if self.more is None else self.more(state)
        return (state + self.after(state) + more) @ self.label.weight.T, weights[:, 0]

    def loss(self, problems: Problems) -> Float[Tensor, ""]:
        logits, _ = self(problems.query, problems.numbers, problems.labels)
        return functional.cross_entropy(logits, problems.answers)
