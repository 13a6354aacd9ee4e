"""The encoder X that makes entries of facts, the language model that reads them, and what both are trained for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from attnflow.knowledge.modular import Entries, ModularConfig, ModularForCausalLM
from attnflow.knowledge.reader import LayerReading
from experiments.facts.corpus import Vocabulary

_LONGEST: Final = 3  # words of an answer, its end included
_SHARPNESS: Final = 4.0  # of the retrieval loss: a score of 1 / 4 counts as much as a logit of 1


class FactEncoder(nn.Module):
    """X: a fact's key text and value text to one entry, [key | value] (knowledge, sec. 6.2).

    The key part is a sum of word embeddings, a small network, a linear map; the value part is a sum of word embeddings.
    Texts are read as bags of words: the syllables of a name differ by their place in it. The word embeddings are those
    of the language model.
    """

    def __init__(self, vocabulary: Vocabulary, words: nn.Embedding) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.words = words
        dim = words.embedding_dim
        self.network = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.out = nn.Linear(dim, dim)

    @property
    def entry_dim(self) -> int:
        return 2 * self.words.embedding_dim

    def key(self, texts: Sequence[str]) -> Float[Tensor, "texts dim"]:
        """The key part for key texts, or for questions."""
        hidden = self._sum(texts) / 2
        return self.out(hidden + self.network(hidden))

    def forward(self, keys: Sequence[str], values: Sequence[str]) -> Float[Tensor, "texts entry_dim"]:
        return torch.cat([self.key(keys), self._sum(values)], dim=1)

    def query(self, questions: Sequence[str]) -> Float[Tensor, "texts entry_dim"]:
        """What a store is searched with for the nearest key: the value part is zero."""
        found = self.key(questions)
        return torch.cat([found, torch.zeros_like(found)], dim=1)

    def _sum(self, texts: Sequence[str]) -> Tensor:
        ids = padded([self.vocabulary.encode(text) for text in texts], self.vocabulary.PADDING)
        return (self.words(ids) * (ids != self.vocabulary.PADDING)[..., None]).sum(dim=1)


@dataclass(frozen=True, eq=False)
class Asked:
    ids: Tensor  # [rows, tokens], padded at the right, where causal attention does not see it
    row: Tensor  # of each token of an answer
    place: Tensor  # before it, the position that predicts it
    target: Tensor  # the token

    def right(self, logits: Float[Tensor, "answers vocabulary"]) -> Tensor:
        """For each row, whether every token of the answer is the likeliest: what greedy decoding would say."""
        wrong = logits.argmax(dim=-1) != self.target
        return torch.zeros(len(self.ids)).index_add(0, self.row, wrong.float()) == 0


class FactReader:
    """The language model, as what answers questions from entries or from text."""

    def __init__(self, config: ModularConfig, vocabulary: Vocabulary) -> None:
        self.model = ModularForCausalLM(config)
        self.vocabulary = vocabulary
        _align(self.model)

    def asked(
        self, questions: Sequence[str], answers: Sequence[str], contexts: Sequence[Sequence[str]] | None = None
    ) -> Asked:
        """Questions with answers, each after the sentences of its context if there are any."""
        words = self.vocabulary
        fact, answer, end = (words.encode(mark)[0] for mark in ("<fact>", "<answer>", "<end>"))
        rows: list[list[int]] = []
        row, place, target = list[int](), list[int](), list[int]()
        for number, (question, said) in enumerate(zip(questions, answers, strict=True)):
            tokens: list[int] = []
            for one in () if contexts is None else contexts[number]:
                tokens += [fact, *words.encode(one)]
            tokens += [*words.encode(question), answer]
            ends = [*words.encode(said), end]
            for offset, token in enumerate(ends):
                row.append(number)
                place.append(len(tokens) - 1 + offset)
                target.append(token)
            rows.append([*tokens, *ends[:-1]])
        ids = padded(rows, words.PADDING)
        return Asked(ids, torch.tensor(row), torch.tensor(place), torch.tensor(target))

    def logits(self, asked: Asked, entries: Entries | None) -> Tensor:
        """Logits at the places that predict answers, read from entries; if these are None, from the model's own."""
        return self.model(input_ids=asked.ids, entries=entries, use_cache=False).logits[asked.row, asked.place]

    @torch.no_grad()
    def say(
        self, questions: Sequence[str], entries: Entries | None, contexts: Sequence[Sequence[str]] | None = None
    ) -> list[str]:
        """Answers by greedy decoding, of at most three words."""
        words, end = self.vocabulary, self.vocabulary.encode("<end>")[0]
        said = [""] * len(questions)
        going = list(range(len(questions)))
        for _ in range(_LONGEST):
            asked = self.asked(
                [questions[row] for row in going],
                [said[row] for row in going],
                None if contexts is None else [contexts[row] for row in going],
            )
            last = torch.cat([asked.row.diff() > 0, torch.ones(1, dtype=torch.bool)])
            tokens = self.logits(asked, entries)[last].argmax(dim=-1).tolist()
            for row, token in zip(going, tokens, strict=True):
                if token != end:
                    said[row] = f"{said[row]} {words.words[token]}".strip()
            going = [row for row, token in zip(going, tokens, strict=True) if token != end]
            if not going:
                break
        return said

    @contextmanager
    def watched(self) -> Generator[list[Tensor]]:
        """Collects the last block's scores of all entries, [rows, tokens, heads, entries], with gradients."""
        found, last = list[Tensor](), self.model.readers()[-1]

        def keep(reading: LayerReading) -> None:
            found.append(reading.scores[0])

        last.observer = keep
        try:
            yield found
        finally:
            last.observer = None


@torch.no_grad()
def _align(model: ModularForCausalLM) -> None:
    """Start where a block's scores compare its tokens with the key half of entries, and its values are the other half.

    The layout of an entry is known, [key | value]; the model need not find it out.
    """
    for reader in model.readers():
        attention = reader.attention
        dim, half = attention.model_dim, attention.entry_dim // 2
        attention.query.copy_(torch.eye(dim, attention.key_dim))
        attention.key.zero_()[..., :half, :] = torch.eye(half, attention.key_dim)
        attention.value.zero_()[:, half:, :] = torch.eye(half, dim)


def retrieval_loss(scores: Float[Tensor, "answers facts"], which: Tensor) -> Tensor:
    """The entry that answers shall be above its threshold, all others below: supervised reading."""
    sharp = _SHARPNESS * scores
    answers = functional.one_hot(which.clamp(min=0), scores.shape[1]).bool() & (which >= 0)[:, None]
    fires = functional.softplus(-sharp[answers]).sum()
    zero = torch.zeros(len(scores), 1)
    rests = torch.cat([sharp.masked_fill(answers, float("-inf")), zero], dim=1).logsumexp(dim=1).sum()
    return (fires + rests) / len(scores)


def nearest_loss(queries: Float[Tensor, "questions dim"], keys: Float[Tensor, "facts dim"], which: Tensor) -> Tensor:
    """X shall place a question nearest to the key that it asks for (InfoNCE); questions without a fact are left out."""
    there = which >= 0
    return functional.cross_entropy((queries @ keys.T / keys.shape[1] ** 0.5)[there], which[there])


def padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
