"""What PyTorch's memory-efficient operator computes, in plain PyTorch, for machines without CUDA.

It keeps what callers must respect: rows of the log-sum-exp padded to 32, bias and queries in one type, and gradients of
the bias that are not written where the causal flag skips pairs.
"""

import torch


def scores(query, key, bias, causal, scale):
    score = query.float() @ key.float().mT * scale + bias.float()
    allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return score.masked_fill(~allowed.tril(), -torch.inf) if causal else score


def forward(query, key, value, bias, needs_lse, dropout, causal, *, scale):
    assert bias.dtype == query.dtype == key.dtype == value.dtype
    assert bias.shape == (*query.shape[:3], key.shape[2])
    assert bias.stride(2) * bias.itemsize % 16 == 0
    assert dropout == 0.0
    score = scores(query, key, bias, causal, scale)
    lse = torch.nn.functional.pad(score.logsumexp(dim=-1), (0, -query.shape[2] % 32), value=torch.inf)
    output = (score.softmax(dim=-1).to(value.dtype).float() @ value.float()).to(value.dtype)
    return output.transpose(1, 2).contiguous().transpose(1, 2), lse if needs_lse else lse[..., :0], *torch.zeros(2)


def backward(upstream, query, key, value, bias, output, lse, _, __, dropout, needs, causal, *, scale):
    queries = query.shape[2]
    assert lse.shape[2] == queries + -queries % 32
    weights = (scores(query, key, bias, causal, scale) - lse[..., :queries, None]).exp()
    along = (upstream.float() * output.float()).sum(dim=-1, keepdim=True)
    to_scores = weights * (upstream.float() @ value.float().mT - along)
    low = to_scores.to(query.dtype).float()
    parts = low @ key.float() * scale, low.mT @ query.float() * scale
    to_value = weights.to(value.dtype).float().mT @ upstream.float()
    if causal:
        to_scores[..., ~torch.ones(to_scores.shape[2:], dtype=torch.bool).tril()] = torch.nan
    return *(p.to(query.dtype) for p in (*parts, to_value)), to_scores.to(query.dtype) if needs[3] else None
