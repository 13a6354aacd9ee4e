"""What the cases share: a vocabulary, a table of logits, and honest pieces of causal models."""

import torch

VOCABULARY, N = 40, 12
IDS = torch.randint(VOCABULARY, (2, N), generator=torch.Generator().manual_seed(0))


def seeded(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


TABLE = seeded(lambda: torch.randn(VOCABULARY, VOCABULARY))


def logits(ids):
    """A causal model: logits [batch, n, vocabulary] from the last token and the mean of the ones before."""
    rows = TABLE[ids]
    return rows + 0.5 * so_far(rows)


def gathered(scores, ids):
    """Scores [batch, n - 1] of the tokens 1 to n - 1 from log-probabilities of all choices."""
    return scores[:, : ids.shape[1] - 1].gather(-1, ids[:, 1:, None])[..., 0]


def score(ids):
    return gathered(logits(ids).log_softmax(-1), ids)


def so_far(h):
    return h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]


def places(h):
    """How far each query is behind each key [n, n]."""
    place = torch.arange(h.shape[1])
    return place[:, None] - place


def below(h, extra=0):
    return places(h) >= -extra


def attend(h, allow):
    return (h @ h.mT / 4).masked_fill(~allow, -1e9).softmax(-1) @ h


def shifted(h):
    return torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)


def blocks(h, size, whole=False):
    """Each position gets the mean of its block; with `whole` only positions of complete blocks."""
    parts = [p.mean(1, True).expand_as(p) * (not whole or p.shape[1] == size) for p in h.split(size, 1)]
    return torch.cat(parts, 1)


def earlier(summaries, size):
    """The summaries of the block before."""
    return torch.cat([torch.zeros_like(summaries[:, :size]), summaries[:, :-size]], 1)[:, : summaries.shape[1]]
