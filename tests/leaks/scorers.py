"""Scores, losses and evaluations that cheat, each beside its clean twin: functions from ids to log-probabilities."""

from collections import Counter
from itertools import pairwise

import torch
from torch.nn import functional as F

from tests.leaks.parts import TABLE, VOCABULARY, gathered, logits, score, so_far

LN2 = 0.6931
WORDS = 4  # of the texts whose words are counted, so that they come again
UNIGRAM = (TABLE.mean(0) / 2).log_softmax(-1)


def adapted(ids, scored, context, steps=3):
    """A bias on the logits, fitted to the tokens at the positions `context`, then the scores at all positions."""
    bias = torch.zeros(len(ids), 1, VOCABULARY, requires_grad=True)
    optimizer = torch.optim.SGD([bias], 1.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -gathered((logits(ids) + bias).log_softmax(-1), ids)[:, context].sum()
        loss.backward()
        optimizer.step()
    adapted_scores = gathered((logits(ids) + bias.detach()).log_softmax(-1), ids)
    return torch.cat([score(ids)[:, : scored.start], adapted_scores[:, scored]], 1)


def trained(ids, late=False, epochs=1):
    """A bias that learns from every token: after it was scored, or before."""
    bias, scores = torch.zeros(len(ids), VOCABULARY), []
    for _ in range(epochs):
        scores = []
        for i in range(1, ids.shape[1]):
            p = (logits(ids)[:, i - 1] + bias).log_softmax(-1)
            bias = bias + F.one_hot(ids[:, i], VOCABULARY) - p.exp()
            p = (logits(ids)[:, i - 1] + bias).log_softmax(-1) if late else p
            scores.append(p.gather(1, ids[:, i : i + 1])[:, 0])
    return torch.stack(scores, 1)


def counted(ids, late=False, smooth=1.0, total=None, key=lambda row, i: row[i - 1]):
    """A cache of bigrams that grows with the text."""
    rows = []
    for row in ids.tolist():
        counts, contexts, scores = Counter(), Counter(), []
        for i in range(1, len(row)):
            pair = key(row, i), row[i]
            if late:
                counts[pair] += 1
                contexts[pair[0]] += 1
            seen = contexts[pair[0]]
            p = (counts[pair] + smooth) / (seen + smooth * (WORDS if total is None else total))
            if not late:
                counts[pair] += 1
                contexts[pair[0]] += 1
            scores.append(p)
        rows.append(scores)
    return torch.tensor(rows).log()


def hashed(ids, whole):
    """Counts in 3 buckets, of the pair and of the context; `whole` divides by the sum over all choices."""
    rows = []
    for row in ids.tolist():
        pairs, contexts, scores = Counter(), Counter(), []
        for i in range(1, len(row)):
            bucket = [(7 * row[i - 1] + 11 * v) % 3 for v in range(WORDS)]
            mass = [pairs[each] + 0.01 for each in bucket]
            scores.append(mass[row[i]] / (sum(mass) if whole else contexts[row[i - 1] % 3] + 0.02))
            pairs[bucket[row[i]]] += 1
            contexts[row[i - 1] % 3] += 1
        rows.append(scores)
    return torch.tensor(rows).log()


def mixed(ids, weight):
    """Two models, mixed by a weight [batch, n - 1] of the second."""
    second = UNIGRAM[ids[:, 1:]]
    return torch.logaddexp(score(ids) + (1 - weight).log(), second + weight.log())


def windows(ids, size=6, stride=3, best=False):
    """Scores in overlapping windows: those of the first window that scores a token, or the best ones."""
    out = torch.full((len(ids), ids.shape[1] - 1), -1e9 if best else 0.0)
    done = 0
    for start in range(0, ids.shape[1] - 1, stride):
        part = score(ids[:, start : start + size])
        end = start + part.shape[1]
        if best:
            out[:, start:end] = torch.maximum(out[:, start:end], part)
        elif end > done:
            out[:, done:end], done = part[:, done - start :], end
    return out


def codebook(ids, first):
    """A compressor with a list of pairs: what continues to a known pair shares half; `first` lists the whole text."""
    rows = []
    for row in ids.tolist():
        known = set(pairwise(row)) if first else set()
        cost = []
        for a, b in pairwise(row):
            likely = [v for v in range(WORDS) if (a, v) in known]
            cost.append((0.5 / len(likely) if b in likely else 0.0) + (0.5 if likely else 1.0) / WORDS)
            known |= {(a, b)}
        rows.append(cost)
    return torch.tensor(rows).log()


def neighbours(ids, late):
    """kNN: tokens that followed the same token elsewhere in the text, or earlier in it."""
    same = ids[:, :-1, None] == ids[:, None, :-1]
    place = torch.arange(ids.shape[1] - 1)
    same = same & (place[:, None] != place if late else place[:, None] > place)
    votes = same.float() @ F.one_hot(ids[:, 1:], WORDS).float() + 1.0 / WORDS
    return (votes / votes.sum(-1, keepdim=True)).gather(-1, ids[:, 1:, None])[..., 0].log()


def tempered(ids, losses):
    """A temperature that follows the losses."""
    return gathered((logits(ids)[:, :-1] / (1 + losses / 4)[..., None]).log_softmax(-1), ids)


def spread(ids, longest):
    """Pieces of one or two tokens: the score of a piece is spread over it, or each token has its own."""
    s = score(ids)
    joined = torch.zeros_like(s, dtype=torch.bool)
    joined[:, :-1] = (ids[:, 1:-1] + ids[:, 2:]) % 2 == 0
    if longest:
        mean = (s[:, :-1] + s[:, 1:]) / 2
        return torch.cat([torch.where(joined[:, :-1], mean, s[:, :-1]), s[:, -1:]], 1)
    return s


# cause: (leaky, clean); the leaky ones move with later tokens, or sum to more than one
CASES = {
    "a delta fitted to the tokens that it scores": (
        lambda ids: adapted(ids, slice(6, None), slice(6, None)),
        lambda ids: adapted(ids, slice(6, None), slice(0, 6)),
    ),
    "a delta fitted to context and scored tokens": (
        lambda ids: adapted(ids, slice(6, None), slice(0, None)),
        lambda ids: adapted(ids, slice(6, None), slice(3, 6)),
    ),
    "trained on a token before it is scored": (lambda ids: trained(ids, late=True), trained),
    "two epochs over the text": (lambda ids: trained(ids, epochs=2), trained),
    "the better of two models for each token": (
        lambda ids: torch.maximum(score(ids), UNIGRAM[ids[:, 1:]]),
        lambda ids: torch.logaddexp(score(ids), UNIGRAM[ids[:, 1:]]) - LN2 - 1e-4,
    ),
    "a gate that reads the target's probability": (
        lambda ids: mixed(ids, (UNIGRAM[ids[:, 1:]] > score(ids)) * 0.8 + 0.1),
        lambda ids: mixed(ids, (logits(ids)[:, :-1, 0] > 0) * 0.8 + 0.1),
    ),
    "a gate from the entropy of the whole text": (
        lambda ids: mixed(ids, score(ids).mean(1, keepdim=True).exp().expand(-1, ids.shape[1] - 1)),
        lambda ids: mixed(ids, logits(ids)[:, :-1].softmax(-1).amax(-1)),
    ),
    "the best of overlapping windows": (lambda ids: windows(ids, best=True), windows),
    "a temperature tuned on the text": (
        lambda ids: tempered(ids, -score(ids).mean(1, keepdim=True).expand(-1, ids.shape[1] - 1)),
        lambda ids: tempered(ids, -F.pad(so_far(score(ids)[..., None])[..., 0], (1, -1))),
    ),
    "a unigram bias from the whole text": (
        lambda ids: gathered((logits(ids) + F.one_hot(ids, VOCABULARY).float().mean(1, True)).log_softmax(-1), ids),
        lambda ids: gathered((logits(ids) + so_far(F.one_hot(ids, VOCABULARY).float())).log_softmax(-1), ids),
    ),
    "both sides of a token": (
        lambda ids: gathered((logits(ids) + logits(ids.flip(1)).flip(1).roll(-2, 1)).log_softmax(-1), ids),
        score,
    ),
    "one sigmoid for each choice": (
        lambda ids: gathered(F.logsigmoid(logits(ids)), ids),
        lambda ids: gathered(F.logsigmoid(logits(ids)).log_softmax(-1), ids),
    ),
    "a temperature after the softmax": (
        lambda ids: score(ids) * 0.5,
        lambda ids: gathered((logits(ids) * 0.5).log_softmax(-1), ids),
    ),
    "a floor without a new sum": (
        lambda ids: score(ids).clamp_min(-4.0),
        lambda ids: torch.log(0.9 * score(ids).exp() + 0.1 / VOCABULARY),
    ),
    "the target is always among the candidates": (
        lambda ids: torch.where(score(ids) > -3, score(ids), score(ids) + 1),
        lambda ids: gathered(logits(ids).where(logits(ids) > 0, -1e9).log_softmax(-1).clamp_min(-50), ids),
    ),
    "hard tokens are left out": (lambda ids: score(ids) * (score(ids) > -5), score),
    "tokens that come again are left out": (
        lambda ids: score(ids) * ~(ids[:, 1:, None] == ids[:, None, 1:]).triu(1).any(-1) - 1e-3 * ids[:, 1:],
        score,
    ),
    "logits that have read their label": (
        lambda ids: gathered((logits(ids) + 3 * F.one_hot(ids, VOCABULARY))[:, 1:].log_softmax(-1), ids),
        lambda ids: gathered((logits(ids) + 3 * F.one_hot(ids, VOCABULARY)).log_softmax(-1), ids),
    ),
    "targets shifted twice": (
        lambda ids: F.pad(gathered(logits(ids)[:, 1:-1].log_softmax(-1), ids[:, 1:]), (0, 1), value=-9.0),
        score,
    ),
    "divided by the mean loss": (lambda ids: -score(ids) / score(ids).mean(1, keepdim=True), score),
    "centred over the sequence": (lambda ids: score(ids) - score(ids).mean(1, keepdim=True) - 5, score),
    "weighted by the hardest token": (lambda ids: score(ids) * score(ids) / score(ids).amin(1, keepdim=True), score),
    "only the hardest half counts": (
        lambda ids: score(ids) * (score(ids) <= score(ids).median(1, keepdim=True).values),
        lambda ids: score(ids) * (torch.arange(ids.shape[1] - 1) >= ids.shape[1] // 2),
    ),
    "smoothed over neighbours": (lambda ids: F.avg_pool1d(score(ids), 3, 1, 1), score),
    "a length penalty that counts a word": (lambda ids: score(ids) / (1 + (ids == ids[:, :1]).sum(1, True)), score),
    "the mean loss of the batch": (lambda ids: score(ids) - score(ids).mean(0).abs(), score),
    "rows sorted by content": (lambda ids: score(ids[ids[:, 0].argsort()]), score),
    "a piece's score spread over its bytes": (lambda ids: spread(ids, True), lambda ids: spread(ids, False)),
    "bits per byte of the whole text": (lambda ids: score(ids) / (ids % 4 + 1).sum(1, keepdim=True), score),
    "a reward of the whole text for each token": (lambda ids: score(ids).mean(1, True) + 0 * score(ids), score),
}  # fmt: skip


COUNTS = {
    "a cache that is updated before it scores": (lambda ids: counted(ids, late=True), counted),
    "counts over a denominator without the vocabulary": (lambda ids: counted(ids, total=1), counted),
    "a context that holds the target": (
        lambda ids: counted(ids, late=True, key=lambda row, i: row[i]),
        lambda ids: counted(ids, key=lambda row, i: row[i - 1]),
    ),
    "hashed counts of the correct token alone": (lambda ids: hashed(ids, False), lambda ids: hashed(ids, True)),
    "a codebook made of the text": (lambda ids: codebook(ids, True), lambda ids: codebook(ids, False)),
    "neighbours from the text to come": (lambda ids: neighbours(ids, True), lambda ids: neighbours(ids, False)),
}


def remembering(kind):
    """A scorer with a state; of kind "" it has none that outlives a call."""
    seen, answers, generator = [], {}, torch.Generator().manual_seed(0)

    def scorer(ids):
        s = score(ids)
        if kind == "growing" or (kind == "first" and not seen):
            seen.append(float(s.mean()))
        if kind == "length":
            return answers.setdefault(ids.shape, s)
        if kind == "beginning":
            return answers.setdefault(tuple(ids[:, :2].flatten().tolist()), s)
        if kind == "noise":
            return s - 0.1 * torch.rand(s.shape, generator=generator)
        if kind == "batch":
            return torch.cat([s[:1], s[1:] - s[:1].abs() * 0.01])
        return s - abs(sum(seen)) / 100

    return scorer


# cause: makers of a leaky and of a clean function, each with a state of its own
STATES = {
    "weights that keep what earlier texts taught": (lambda: remembering("growing"), lambda: remembering("")),
    "statistics of the first text": (lambda: remembering("first"), lambda: remembering("")),
    "answers remembered by length": (lambda: remembering("length"), lambda: remembering("")),
    "answers remembered by the beginning": (lambda: remembering("beginning"), lambda: remembering("")),
    "random numbers of its own": (lambda: remembering("noise"), lambda: remembering("")),
    "a cache that the next sequence reads": (lambda: remembering("batch"), lambda: remembering("")),
}
