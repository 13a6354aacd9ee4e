"""Models whose rows are others in a batch, each beside its clean twin: a model, and the batch of its call."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.leaks.parts import VOCABULARY, attend, below, seeded

IDS = torch.arange(5, 13).repeat(2, 1) + torch.tensor([[0], [20]])
LEFT, RIGHT = (torch.ones(2, 8, dtype=torch.int64) for _ in range(2))
LEFT[0, :3] = 0
RIGHT[0, 5:] = 0
ON_THE_LEFT = {"input_ids": IDS * LEFT, "attention_mask": LEFT}
ON_THE_RIGHT = {"input_ids": IDS * RIGHT, "attention_mask": RIGHT}
PACKED = {"input_ids": IDS, "position_ids": torch.cat([torch.arange(3), torch.arange(5)]).repeat(2, 1)}
PLACES = seeded(lambda: torch.randn(64, 16))


def together(numbers):
    return numbers[:, :, None] == numbers[:, None, :]


def reads(covered=True, first=0):
    """Causal attention to what is real; `first` columns count as real."""

    def mix(h, real, positions):
        columns = torch.arange(h.shape[1])
        return attend(h, below(h) & (real | (columns < first) | (not covered))[:, None, :])

    return mix


def placed(count):
    return lambda h, real, positions: reads()(h + PLACES[count(real, positions)], real, positions)


def columns(real, positions):
    return torch.arange(real.shape[1]).expand_as(real)


def tokens(real, positions):
    return (real.long().cumsum(-1) - 1).clamp(min=0)


def chunks(count):
    return lambda h, real, positions: attend(h, below(h) & together(count(real, None) // 4) & real[:, None, :])


def documents(late):
    """Attention within documents, that begin where positions restart, or one token later."""

    def mix(h, real, positions):
        if positions is None:
            return attend(h, below(h))
        return attend(h, below(h) & together((positions == late).cumsum(-1) - (positions[:, :1] < late).long()))

    return mix


def carried(resets):
    def mix(h, real, positions):
        state, states = torch.zeros_like(h[:, 0]), []
        for i in range(h.shape[1]):
            begins = resets and positions is not None and bool((positions[:, i] == 0).all())
            state = h[:, i] + 0.9 * (state * 0 if begins else state)
            states.append(state)
        return torch.stack(states, 1)

    return mix


def prompted(ahead):
    """Four vectors before the text; ones are added to the mask for them before it, or behind it."""

    def mix(h, real, positions):
        long = torch.cat([PLACES[:4].expand(len(h), -1, -1), h], 1)
        seen = F.pad(real, (4, 0) if ahead else (0, 4), value=True)
        return attend(long, below(long) & seen[:, None, :])[:, 4:]

    return mix


def mean(weigh):
    return lambda h, real, positions: (h * weigh(h, real)).sum(1, True) / weigh(h, real).sum(1, True)


def normed(by):
    return lambda h, real, positions: (h - h.mean(by, keepdim=True)) / (1 + h.var(by, keepdim=True))


class Rows(nn.Module):
    """A model with one mixer of hidden states [batch, n, 16], which is told what is real, and the positions."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head, self.mix = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY), mix

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        h = self.embed(input_ids)
        return self.head(h + self.mix(h, real.bool(), position_ids))


class Encoded(nn.Module):
    """A decoder that reads all states of an encoder, or those that the mask covers."""

    def __init__(self, covered):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head, self.covered = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY), covered

    def forward(self, input_ids, decoder_input_ids, attention_mask=None):
        states, h = self.embed(input_ids), self.embed(decoder_input_ids)
        scores = h @ states.mT / 4
        if attention_mask is not None and self.covered:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        return self.head(h + scores.softmax(-1) @ states)


def beside(leaky, clean, batch):
    return (leaky, batch), (clean, batch)


# cause: ((leaky model, its batch), (clean model, its batch))
CASES = {
    "padding on the left is read": beside(Rows(reads(False)), Rows(reads()), ON_THE_LEFT),
    "the first column of padding is read": beside(Rows(reads(first=1)), Rows(reads()), ON_THE_LEFT),
    "positions of columns": beside(Rows(placed(columns)), Rows(placed(tokens)), ON_THE_LEFT),
    "chunks of columns": beside(Rows(chunks(columns)), Rows(chunks(tokens)), ON_THE_LEFT),
    "a mask that ends before a prompt's vectors": beside(Rows(prompted(False)), Rows(prompted(True)), ON_THE_LEFT),
    "padding of an encoder is read": beside(Encoded(False), Encoded(True), {**ON_THE_RIGHT, "decoder_input_ids": IDS}),
    "a mean over padding": beside(
        Rows(mean(lambda h, real: torch.ones_like(h))),
        Rows(mean(lambda h, real: real[..., None].to(h))),
        ON_THE_RIGHT,
    ),
    "statistics of the batch": beside(Rows(normed((0, 1))), Rows(normed(2)), {"input_ids": IDS}),
    "documents that begin one token late": beside(Rows(documents(1)), Rows(documents(0)), PACKED),
    "a state that goes on into the next document": beside(Rows(carried(False)), Rows(carried(True)), PACKED),
}
