"""A small language model, plain enough that the gradient of every attention score can be read off."""

from __future__ import annotations

import math
from typing import Final, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

Objective = Literal["causal", "bidirectional"]

LENGTH: Final = 32
_BATCH: Final = 32


def draw_tokens(seed: int, vocabulary: int = 48, length: int = 8192) -> Int[Tensor, "length"]:
    """A text from a random Markov chain of order 1: frequencies by Zipf's law, about five likely successors a token."""
    generator = torch.Generator().manual_seed(seed)
    frequency = 1.0 / torch.arange(1, vocabulary + 1)
    # Exponentials to the power 4 are sparse: few successors of a token carry most of its probability.
    transitions = torch.empty(vocabulary, vocabulary).exponential_(generator=generator).pow(4) * frequency
    cumulative = (transitions / transitions.sum(1, keepdim=True)).cumsum(1)
    chances = torch.rand(length, generator=generator)
    tokens = [0]
    for chance in chances[1:]:
        following = int(torch.searchsorted(cumulative[tokens[-1]], chance))
        tokens.append(min(following, vocabulary - 1))
    return torch.tensor(tokens)


class LanguageModel(nn.Module):
    """Embeddings with learned positions, layers of attention and MLP behind norms, outputs tied to the embeddings."""

    def __init__(self, vocabulary: int, width: int, num_heads: int, num_layers: int, seed: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width must be a multiple of num_heads, got {width} and {num_heads}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(vocabulary + 1, width)
            self.position = nn.Embedding(LENGTH, width)
            self._layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
            for embedding in (self.embedding, self.position):
                nn.init.normal_(embedding.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        self.mask_token = vocabulary
        self.masked = torch.empty(0, 0, dtype=torch.bool)  # of the last batch, [row, position]; empty if causal

    def loss(
        self, text: Int[Tensor, "length"], objective: Objective, mask_share: float, generator: torch.Generator
    ) -> Float[Tensor, ""]:
        """The objective's loss on sequences drawn from the text."""
        starts = torch.randint(len(text) - LENGTH, (_BATCH, 1), generator=generator)
        window = text[starts + torch.arange(LENGTH + 1)]
        inputs, targets = window[:, :-1], window[:, 1:]
        if objective == "causal":
            return functional.cross_entropy(self(inputs, causal=True).flatten(0, 1), targets.flatten())
        self.masked = masked = torch.rand(inputs.shape, generator=generator) < mask_share
        logits = self(inputs.masked_fill(masked, self.mask_token), causal=False)
        return functional.cross_entropy(logits[masked], inputs[masked])

    def forward(self, inputs: Int[Tensor, "batch position"], causal: bool) -> Float[Tensor, "batch position words"]:
        hidden = self.embedding(inputs) + self.position.weight[: inputs.shape[1]]
        for layer in self.layers():
            hidden = layer(hidden, causal)
        return self.norm(hidden) @ self.embedding.weight[:-1].T

    def layers(self) -> list[Layer]:
        return cast(list[Layer], list(self._layers))

    def bilinear_forms(self) -> Float[Tensor, "layers d d"]:
        """M = W_q^T W_k of every layer, all heads together, detached."""
        return torch.stack([(layer.query.weight.T @ layer.key.weight).detach() for layer in self.layers()])


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and with a residual; remembers what `rank_one_sum` needs."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scaling = 1 / math.sqrt(width // num_heads)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.norm = nn.LayerNorm(width)
        self._tokens = self._weights = torch.empty(0)

    def forward(self, hidden: Float[Tensor, "batch position d"], causal: bool) -> Float[Tensor, "batch position d"]:
        tokens = self.norm(hidden)
        query, key, value = (
            projection(tokens).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        scores = query @ key.mT * self.scaling
        if causal:
            allow = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allow, -torch.inf)
        weights = scores.softmax(-1)
        weights.retain_grad()
        self._tokens, self._weights = tokens.detach(), weights
        hidden = hidden + self.output((weights @ value).transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)

    def recorded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last pass: tokens [batch, position, d], weights and their gradient [batch, head, query, key]."""
        gradient = self._weights.grad
        assert gradient is not None
        return self._tokens, self._weights.detach(), gradient

    def heads(self) -> tuple[Float[Tensor, "head head_dim d"], Float[Tensor, "head head_dim d"]]:
        split = (weight.detach().unflatten(0, (self.num_heads, -1)) for weight in (self.query.weight, self.key.weight))
        query, key = split
        return query, key
