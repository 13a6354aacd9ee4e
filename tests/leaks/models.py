"""Models that leak, each beside its clean twin: what mixes the hidden vectors [batch, n, 16] of a causal model."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.leaks.parts import VOCABULARY, attend, below, blocks, earlier, places, seeded, shifted, so_far

INF = float("inf")
GRU = seeded(lambda: [nn.GRU(16, 8, batch_first=True, bidirectional=both) for both in (True, False)])
KERNEL = seeded(lambda: torch.randn(16, 1, 3) / 2)
FILTER = seeded(lambda: torch.randn(400, 16) / 4)
EXPERTS = seeded(lambda: torch.randn(16, 2))
DOCUMENT = (torch.arange(400) >= 5).long()  # packed documents of 5 tokens and the rest


def centred(h, before, after):
    return F.conv1d(F.pad(h.mT, (before, after)), KERNEL, groups=16).mT


def dilated(h, before):
    return F.conv1d(F.pad(h.mT, (before, 8 - before)), KERNEL, groups=16, dilation=4).mT


def filtered(h, padding):
    size = h.shape[1] + padding
    spectrum = torch.fft.rfft(h, size, dim=1) * torch.fft.rfft(FILTER[: h.shape[1]].to(h), size, dim=0)
    return torch.fft.irfft(spectrum, size, dim=1)[:, : h.shape[1]]


def capacity(h, dims):
    """Each expert takes the first four tokens that ask for it."""
    wants = (h @ EXPERTS).argmax(-1) == 0
    count = wants.flatten().long().cumsum(0).view_as(wants) if dims == "batch" else wants.long().cumsum(1)
    return torch.where((wants & (count <= 4))[..., None], h, 0.0)


def scan(h, resets):
    state, states = torch.zeros_like(h[:, 0]), []
    for i in range(h.shape[1]):
        state = 0.9 * (state * 0 if resets and i == 5 else state) + h[:, i]
        states.append(state)
    return torch.stack(states, 1)


def apart(n):
    return DOCUMENT[:n, None] == DOCUMENT[:n]


def rare(h):
    """Where one of the forty tokens stands."""
    return h[..., 0] == Net(None).embed.weight[7, 0].to(h)


# cause: (leaky, clean)
CASES = {
    "the mean over all positions": (lambda h: h.mean(1, keepdim=True), so_far),
    "the maximum over all positions": (lambda h: h - h.amax(1, keepdim=True), lambda h: h - h.cummax(1).values),
    "a norm over positions and features": (lambda h: F.layer_norm(h, h.shape[1:]), lambda h: F.layer_norm(h, (16,))),
    "a norm over the batch": (lambda h: h - h.mean(0), lambda h: h - h.mean(2, keepdim=True)),
    "batch norm that still trains": (
        lambda h: F.batch_norm(h.mT, torch.zeros(16), torch.ones(16), training=True).mT,
        lambda h: F.batch_norm(h.mT, torch.zeros(16), torch.ones(16), training=False).mT,
    ),
    "a standard deviation over the sequence": (
        lambda h: h / h.std(1, keepdim=True),
        lambda h: h / h.std(2, keepdim=True),
    ),
    "a median over the sequence": (lambda h: h - h.median(1, True).values, lambda h: h - h.median(2, True).values),
    "attention without a mask": (
        lambda h: F.scaled_dot_product_attention(h, h, h),
        lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    ),
    "a mask that is one too wide": (lambda h: attend(h, below(h, 1)), lambda h: attend(h, below(h))),
    "a transposed mask": (lambda h: attend(h, below(h).mT), lambda h: attend(h, below(h))),
    "a mask after the softmax": (
        lambda h: ((h @ h.mT).softmax(-1) * below(h)) @ h,
        lambda h: (h @ h.mT).masked_fill(~below(h), -INF).softmax(-1) @ h,
    ),
    "a softmax over queries": (
        lambda h: (h @ h.mT).masked_fill(~below(h), -INF).softmax(-2) @ h,
        lambda h: (h @ h.mT).masked_fill(~below(h), -INF).softmax(-1) @ h,
    ),
    "a mask of zeros and ones that is added": (
        lambda h: F.scaled_dot_product_attention(h, h, h, below(h).float()),
        lambda h: F.scaled_dot_product_attention(h, h, h, below(h)),
    ),
    "a mask of minus ten": (
        lambda h: (h @ h.mT / 4 - 10.0 * ~below(h)).softmax(-1) @ h,
        lambda h: (h @ h.mT / 4 - 1e9 * ~below(h)).softmax(-1) @ h,
    ),
    "one head of four without its mask": (
        lambda h: torch.cat([attend(part, below(part) | (i == 2)) for i, part in enumerate(h.chunk(4, -1))], -1),
        lambda h: torch.cat([attend(part, below(part)) for part in h.chunk(4, -1)], -1),
    ),
    "a window on both sides": (
        lambda h: attend(h, places(h).abs() < 3),
        lambda h: attend(h, (places(h) >= 0) & (places(h) < 3)),
    ),
    "a bidirectional prefix that grows with the text": (
        lambda h: attend(h, below(h) | (torch.arange(h.shape[1]) < h.shape[1] // 2)),
        lambda h: attend(h, below(h)),
    ),
    "linear attention over everything": (
        lambda h: h @ (h.mT @ h),
        lambda h: torch.einsum("bnd,bnde->bne", h, torch.einsum("bnd,bne->bnde", h, h).cumsum(1)),
    ),
    "a summary of the block in progress": (lambda h: blocks(h, 4), lambda h: earlier(blocks(h, 4), 4)),
    "a summary of complete blocks of 96": (lambda h: blocks(h, 96, whole=True), lambda h: earlier(blocks(h, 96), 96)),
    "states that begin with the mean of their chunk": (
        lambda h: blocks(h, 16).cumsum(1),
        lambda h: earlier(blocks(h, 16), 16).cumsum(1),
    ),
    "a filter that wraps around": (lambda h: filtered(h, 0), lambda h: filtered(h, h.shape[1])),
    "a centred convolution": (lambda h: centred(h, 1, 1), lambda h: centred(h, 2, 0)),
    "a dilated convolution with the padding of a plain one": (lambda h: dilated(h, 2), lambda h: dilated(h, 8)),
    "a roll that wraps around": (lambda h: h.roll(1, 1), lambda h: shifted(h)),
    "a roll in the wrong direction": (lambda h: h.roll(-1, 1), lambda h: shifted(h)),
    "a scan from the end": (lambda h: h.flip(1).cumsum(1).flip(1), lambda h: h.cumsum(1)),
    "a bidirectional recurrence": (lambda h: GRU[0](h)[0], lambda h: GRU[1](h)[0].repeat(1, 1, 2)),
    "a scale of the whole tensor in FP8": (
        lambda h: (h / h.abs().amax() * 448).to(torch.float8_e4m3fn).float() * h.abs().amax(),
        lambda h: (h / h.abs().amax(-1, True) * 448).to(torch.float8_e4m3fn).float() * h.abs().amax(-1, True),
    ),
    "the highest tokens of the sequence are routed": (
        lambda h: torch.where(h[..., :1] >= h[..., 0].topk(h.shape[1] // 2).values[:, -1, None, None], h, 0.0),
        lambda h: torch.where(h[..., :1] >= 0.0, h, 0.0),
    ),
    "places at an expert, counted over the batch": (lambda h: capacity(h, "batch"), lambda h: capacity(h, "sequence")),
    "positions sorted by content": (
        lambda h: h.gather(1, h[..., :1].argsort(1).expand_as(h)),
        lambda h: h.gather(2, h.argsort(2)),
    ),
    "a classifier token that reads the text": (
        lambda h: torch.cat([h.mean(1, keepdim=True), h[:, 1:]], 1),
        lambda h: torch.cat([torch.ones_like(h[:, :1]), h[:, 1:]], 1),
    ),
    "a temperature from the whole text": (
        lambda h: h / h.norm(dim=(1, 2), keepdim=True),
        lambda h: h / h.norm(dim=2, keepdim=True),
    ),
    "a correlation of features over the sequence": (lambda h: h @ (h.mT @ h).tanh(), lambda h: h @ FILTER[:16].tanh()),
    "sequences mixed in a reshape": (
        lambda h: h.transpose(0, 1).reshape(h.shape).cumsum(1),
        lambda h: h.transpose(0, 1).transpose(0, 1).cumsum(1),
    ),
    "a leak that one token opens": (
        lambda h: h + h.flip(1) * rare(h).any(1, True)[..., None],
        lambda h: h + h.cumsum(1) * rare(h)[..., None],
    ),
    "a leak that one token opens, three times in a row": (
        lambda h: h + h.flip(1) * rare(h).unfold(1, 3, 1).all(-1).any(1)[:, None, None],
        lambda h: h + h.cumsum(1) * rare(h)[..., None],
    ),
}  # fmt: skip
# the same with documents of five tokens and the rest
PACKED = {
    "attention across packed documents": (
        lambda h: attend(h, below(h)),
        lambda h: attend(h, below(h) & apart(h.shape[1])),
    ),
    "a state that is carried across documents": (lambda h: scan(h, False), lambda h: scan(h, True)),
    "a convolution across documents": (
        lambda h: centred(h, 2, 0),
        lambda h: torch.cat([centred(h[:, :5], 2, 0), centred(h[:, 5:], 2, 0)], 1),
    ),
    "positions that restart under a mask that does not": (
        lambda h: attend(h + FILTER[: h.shape[1]] * DOCUMENT[: h.shape[1], None], below(h)),
        lambda h: attend(h + FILTER[: h.shape[1]] * DOCUMENT[: h.shape[1], None], below(h) & apart(h.shape[1])),
    ),
    "a mean over each document": (
        lambda h: torch.cat([h[:, :5].mean(1, True).expand(-1, 5, -1), so_far(h[:, 5:])], 1),
        lambda h: torch.cat([so_far(h[:, :5]), so_far(h[:, 5:])], 1),
    ),
}


class Net(nn.Module):
    """A model with one mixer."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head, self.mix = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY), mix

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + 0.3 * self.mix(h))
