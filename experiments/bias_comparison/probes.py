"""Small tasks with known answers: each should favour one mechanism, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

IGNORED: Final = -100
VOCABULARY: Final = 108  # tokens of every probe

_KEYS, _VALUES = range(8, 24), range(24, 40)
_ASK: Final = 1
_WRITE, _READ, _IGNORE = 2, 3, 4
_BITS = range(5, 7)
_START: Final = 7

_KINDS, _LABELS = 16, 4  # of pairs
_PAIR, _QUERY, _LABEL, _FILLER = range(8, 72), range(72, 88), range(88, 92), range(92, 108)
_PAIRS: Final = 3  # of recall
CONTEXT: Final = 24  # its tokens before the questions
_WRITES, _REBOUND = 12, 3  # of rebinding
_NAMES, _OBJECTS = range(16, 24), range(24, 32)
_NUMBER: Final = 32  # + n is the number n, up to 18
_Q, _A, _COLON, _HAS, _STOP, _HE, _BUYS, _MORE, _PLUS, _EQUALS = range(1, 11)


@dataclass(frozen=True)
class Sequences:
    tokens: Tensor  # int64[batch, length]
    labels: Tensor  # the same where the model has to answer, and `IGNORED` elsewhere


Draw = Callable[[int, torch.Generator], Sequences]


def recall(
    batch: int, generator: torch.Generator, context: int = CONTEXT, depth: float | None = None, distractors: int = 0
) -> Sequences:
    """Three pairs of key and value, a token each, in filler; then every key, to be answered by its value.

    Args:
        batch: sequences.
        generator: source of chance.
        context: tokens before the questions; 24 in training.
        depth: share of the context before the first pair, which alone is asked for; by default pairs lie anywhere and
            all are asked for.
        distractors: sentences of five filler tokens and a pair that is not asked for, in the middle of the context.
    """
    pairs = _PAIRS + distractors
    keys = torch.rand(batch, _KINDS, generator=generator).argsort(dim=1)[:, :pairs]
    values = torch.randint(_LABELS, keys.shape, generator=generator)
    tokens = _some(batch, _FILLER, context, generator)
    places = torch.rand(batch, context, generator=generator).argsort(dim=1)[:, :_PAIRS]
    if depth is not None:
        first = round(depth * (context - 1))
        places = torch.where(places == first, places[:, :1], places)
        places[:, 0] = first
    written = _pair(keys, values)
    tokens.scatter_(1, places[:, 1:], written[:, 1:_PAIRS]).scatter_(1, places[:, :1], written[:, :1])
    sentences: list[Tensor] = []
    for number in range(_PAIRS, pairs):
        filler = _some(batch, _FILLER, 5, generator)
        sentences.append(torch.cat([filler[:, :3], written[:, number : number + 1], filler[:, 3:]], dim=1))
    tokens = torch.cat([tokens[:, : context // 2], *sentences, tokens[:, context // 2 :]], dim=1)
    asked = torch.arange(1) if depth is not None else torch.randperm(_PAIRS, generator=generator)
    return _asked(tokens, _QUERY.start + keys[:, asked], _LABEL.start + values[:, asked])


def rebinding(batch: int, generator: torch.Generator) -> Sequences:
    """Twelve pairs of three keys: what a key was bound to last is asked for."""
    names = torch.rand(batch, _KINDS, generator=generator).argsort(dim=1)[:, :_REBOUND]
    # Each key at least once: the first writes are one of each, in any order, and the others any.
    first = torch.rand(batch, _REBOUND, generator=generator).argsort(dim=1)
    others = torch.randint(_REBOUND, (batch, _WRITES - _REBOUND), generator=generator)
    which = torch.cat([first, others], dim=1)
    values = torch.randint(_LABELS, which.shape, generator=generator)
    last = torch.zeros(batch, _REBOUND, dtype=torch.long)
    for write in range(_WRITES):
        last.scatter_(1, which[:, write : write + 1], values[:, write : write + 1])
    return _asked(_pair(names.gather(1, which), values), _QUERY.start + names, _LABEL.start + last)


def copy(batch: int, generator: torch.Generator) -> Sequences:
    """A string of ten letters, twice: the second time is to be predicted."""
    text = _some(batch, _KEYS, 10, generator)
    tokens = torch.cat([text, torch.full((batch, 1), _ASK), text], dim=1)
    labels = tokens.clone()
    labels[:, :11] = IGNORED
    return Sequences(tokens, labels)


def distance(batch: int, generator: torch.Generator) -> Sequences:
    """Letters, then a number: the letter that many places before it."""
    text = _some(batch, _KEYS, 12, generator)
    back = torch.randint(1, 9, (batch, 1), generator=generator)
    tokens = torch.cat([text, _VALUES.start + back, text.gather(1, text.shape[1] - back)], dim=1)
    return Sequences(tokens, _last(tokens))


def flip_flop(batch: int, generator: torch.Generator) -> Sequences:
    """Bits that are written, read or to be ignored: a read gives the bit that was written last."""
    steps = 14
    kinds = torch.multinomial(torch.tensor([0.2, 0.2, 0.6]), batch * steps, replacement=True, generator=generator)
    kinds = kinds.view(batch, steps)
    kinds[:, 0], kinds[:, -1] = 0, 1
    bits = torch.randint(2, (batch, steps), generator=generator)
    for step in range(1, steps):
        written = torch.where(kinds[:, :step] == 0, torch.arange(step), -1).max(dim=1).values
        bits[:, step] = torch.where(kinds[:, step] == 1, bits.gather(1, written[:, None])[:, 0], bits[:, step])
    operations = torch.tensor([_WRITE, _READ, _IGNORE])[kinds]
    tokens = torch.stack([operations, _BITS.start + bits], dim=2).flatten(1)
    read = torch.stack([torch.zeros_like(kinds, dtype=torch.bool), kinds == 1], dim=2).flatten(1)
    return Sequences(tokens, tokens.masked_fill(~read, IGNORED))


def counting(batch: int, generator: torch.Generator) -> Sequences:
    """Zeros and ones, then how many ones there were."""
    share = torch.rand(batch, 1, generator=generator)
    bits = (torch.rand(batch, 12, generator=generator) < share).long()
    count = _VALUES.start + bits.sum(dim=1, keepdim=True)
    ends = (torch.full((batch, 1), token) for token in (_START, _ASK))
    start, ask = ends
    tokens = torch.cat([start, _BITS.start + bits, ask, count], dim=1)
    return Sequences(tokens, _last(tokens))


def sums(batch: int, generator: torch.Generator) -> Sequences:
    """ "Q: John has 5 apples. He buys 6 more. A: 5 + 6 = 11", with other names, things and numbers from 1 to 9."""
    name, thing = _some(batch, _NAMES, 1, generator), _some(batch, _OBJECTS, 1, generator)
    one, other = (torch.randint(1, 10, (batch, 1), generator=generator) for _ in range(2))

    def fixed(*tokens: int) -> Tensor:
        return torch.tensor(tokens).expand(batch, -1)

    parts = [fixed(_START, _Q, _COLON), name, fixed(_HAS), _NUMBER + one, thing, fixed(_STOP, _HE, _BUYS)]
    parts += [_NUMBER + other, fixed(_MORE, _STOP, _A, _COLON), _NUMBER + one, fixed(_PLUS), _NUMBER + other]
    tokens = torch.cat([*parts, fixed(_EQUALS), _NUMBER + one + other], dim=1)
    labels = tokens.clone()
    labels[:, :-5] = IGNORED
    return Sequences(tokens, labels)


PROBES: Final[Mapping[str, Draw]] = {
    "recall": recall,
    "copy": copy,
    "rebinding": rebinding,
    "distance": distance,
    "flip-flop": flip_flop,
    "counting": counting,
    "sums": sums,
}


def _some(batch: int, tokens: range, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(tokens.start, tokens.stop, (batch, count), generator=generator)


def _pair(keys: Tensor, values: Tensor) -> Tensor:
    return _PAIR.start + keys * _LABELS + values


def _asked(context: Tensor, questions: Tensor, answers: Tensor) -> Sequences:
    """A context, then each question followed by its answer."""
    tokens = torch.cat([context, torch.stack([questions, answers], dim=2).flatten(1)], dim=1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, context.shape[1] + 1 :: 2] = answers
    return Sequences(tokens, labels)


def _last(tokens: Tensor) -> Tensor:
    labels = torch.full_like(tokens, IGNORED)
    labels[:, -1] = tokens[:, -1]
    return labels
