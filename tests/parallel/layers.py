"""Layers that run on several processes, by hand on torch.distributed, and the same on one process.

A mixer takes this rank's hidden vectors [batch, m, 16] and their global positions [m]. What a fault changes is an
argument. Every rank forms the same graph, as each hop of the backward pass needs the other rank, too.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEAD, N, TAPS, PLACES = 40, 16, 4, 24, 4, 8
LENGTHS = [5, 6, 6, 7], [7, 5, 6, 6]  # of documents that straddle the shards' edges, or begin there
DOCUMENTS = torch.stack([torch.arange(4).repeat_interleave(torch.tensor(sizes)) for sizes in LENGTHS])
BEGINS = F.pad(DOCUMENTS.diff(dim=1) != 0, (1, 0), value=True)


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(N, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head, self.router = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, 2)
        self.taps = nn.Parameter(torch.randn(TAPS, WIDTH) / 2)
        self.decay = nn.Parameter(torch.rand(WIDTH) + 1)


with torch.random.fork_rng():
    torch.manual_seed(3)
    W = Weights()
    IDS = torch.randint(VOCABULARY, (2, N))


def rank():
    return dist.get_rank()


def ranks():
    return dist.get_world_size()


def contiguous(n):
    return torch.arange(n).chunk(ranks())[rank()]


def zigzag(n):
    parts = torch.arange(n).chunk(2 * ranks())
    return torch.cat([parts[rank()], parts[-1 - rank()]])


# -------- what ranks send one another, with gradients


class Shift(torch.autograd.Function):
    """What the rank `by` places before has; the last ones are before rank 0."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by, received = by, torch.empty_like(x, memory_format=torch.contiguous_format)
        sent = dist.isend(x.contiguous(), (rank() + by) % ranks())
        dist.irecv(received, (rank() - by) % ranks()).wait()
        sent.wait()
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Shift.apply(gradient, -ctx.by), None


class Swap(torch.autograd.Function):
    """[ranks, ...]: part q goes to rank q, and comes from it."""

    @staticmethod
    def forward(ctx, x):
        received = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient)


class Sum(torch.autograd.Function):
    """Over all ranks, each of which uses it in its own loss."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return Sum.apply(gradient)


def shift(x, by=1):
    return Shift.apply(x, by)


def before(x):
    """What the shard before this one hands on; zeros reach the first."""
    return shift(x) * (rank() > 0)


def gathered(x):
    """Shards [batch, m, ...] to all positions [batch, n, ...]."""
    parts = [x if r == rank() else torch.zeros_like(x) for r in range(ranks())]
    return Sum.apply(torch.cat(parts, 1))


def to_features(x):
    """[batch, m, features] of these positions to [batch, n, features / ranks] of all."""
    return torch.cat([*Swap.apply(torch.stack(x.chunk(ranks(), -1)))], 1)


def to_positions(x):
    return torch.cat([*Swap.apply(torch.stack(x.chunk(ranks(), 1)))], -1)


# -------- which pairs are allowed, bool [batch or 1, queries, keys], by global positions


def causal(asks, keys):
    return (asks[:, None] >= keys)[None]


def packed(asks, keys):
    return causal(asks, keys) & (DOCUMENTS[:, asks, None] == DOCUMENTS[:, None, keys])


# -------- mixers


def heads(x):
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


def ring(allow=packed, told=lambda at: at, ahead=0, counts=lambda hop: 1.0):
    """Attention to the keys of one rank after another; each is `told` at a position, values go `ahead` of keys."""

    def mix(h, at):
        q, k, v = map(heads, W.qkv(h).chunk(3, -1))
        v, keys = shift(v, ahead) if ahead else v, told(at)
        best = torch.full_like(q[..., :1], -1e9)
        total, out = torch.zeros_like(best), torch.zeros_like(q)
        for hop in range(ranks()):
            seen = allow(at, keys)[:, None]
            scores = (q @ k.mT / HEAD**0.5).masked_fill(~seen, -1e9)
            top = torch.maximum(best, scores.amax(-1, True)).detach()
            shares = (scores - top).exp() * seen * counts(hop)
            kept = (best - top).exp()
            total, out, best = total * kept + shares.sum(-1, True), out * kept + shares @ v, top
            k, v, keys = shift(k), shift(v), shift(keys)
        return W.out(joined(out / total.clamp_min(1e-30)))

    return mix


def ulysses(allow=packed, enter=to_features, leave=to_positions):
    """Attention of a few heads to all positions."""

    def mix(h, at):
        q, k, v = (heads(enter(part)) for part in W.qkv(h).chunk(3, -1))
        every = torch.arange(q.shape[2])
        return W.out(leave(joined(F.scaled_dot_product_attention(q, k, v, allow(every, every)[:, None]))))

    return mix


def follows(at, by):
    """Whether the token `by` places before is of the same document, bool [batch, m]."""
    return (at >= by) & (DOCUMENTS[:, at] == DOCUMENTS[:, (at - by).clamp(min=0)])


def convolved(halo=lambda h: before(h[:, 1 - TAPS :]), same=follows):
    """A short causal convolution, whose first taps lie in the shard before."""

    def mix(h, at):
        long, m = torch.cat([halo(h), h], 1), h.shape[1]
        parts = [long[:, TAPS - 1 - by :][:, :m] * W.taps[by] * same(at, by)[..., None] for by in range(TAPS)]
        return sum(parts)

    return mix


def keeps(at):
    return ~BEGINS[:, at]


def run(x, gates):
    state, states = torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = x[:, i] + gates[:, i] * state
        states.append(state)
    return torch.stack(states, 1)


def scanned(keep=keeps, through=keeps, hand=before):
    """state = decay x keep x state + h; `through` is what each token keeps of the state that arrives."""

    def mix(h, at):
        states = run(h, W.decay.sigmoid() * keep(at)[..., None])
        left = (W.decay.sigmoid() * through(at)[..., None]).cumprod(1)
        arrives = torch.zeros_like(h[:, 0])
        for _ in range(ranks() - 1):
            arrives = hand(states[:, -1] + left[:, -1] * arrives)
        return states + left * arrives[:, None]

    return mix


def scanned_features(keep=keeps):
    """The same with all positions of a few features on each rank."""

    def mix(h, at):
        x = to_features(h)
        decay = W.decay.sigmoid().chunk(ranks())[rank()]
        return to_positions(run(x, decay * keep(torch.arange(x.shape[1]))[..., None]))

    return mix


def normed(h):
    return F.layer_norm(h, (WIDTH,))


def fed(norm=normed, leave=lambda x: x.chunk(ranks(), 1)[rank()]):
    """A norm of these positions, and a feed-forward layer of which each rank has some features (tensor parallel)."""

    def mix(h, at):
        mine = torch.arange(2 * WIDTH).chunk(ranks())[rank()]
        x = F.gelu(gathered(norm(h)) @ W.up.weight[mine].T + W.up.bias[mine])
        return leave(Sum.apply(x @ W.down.weight[:, mine].T)) + W.down.bias

    return mix


def earlier(counts):
    """What the ranks before have of [batch, 1]."""
    return gathered(counts)[:, : rank()].sum(1, True)


def experts(ahead=earlier, places=PLACES):
    """An expert has places for the first tokens of each sequence that ask for it; `ahead` have asked on other ranks."""

    def mix(h, at):
        wants = (W.router(h).diff(dim=-1)[..., 0] > 0).to(h)
        place = wants.cumsum(1) + ahead(wants.sum(1, True))
        return F.gelu(W.up(h))[..., :WIDTH] * (wants * (place <= places))[..., None]

    return mix


@cache
def decoder(mix, split=contiguous, places=lambda at: at):
    """Logits of this rank's positions."""

    def step(ids):
        at = split(ids.shape[1])
        h = W.embed(ids[:, at]) + W.place(places(at))
        return W.head(h + mix(h, at))

    return step


def block(h, allow):
    """A layer of a pipeline: attention and a feed-forward layer."""
    q, k, v = map(heads, W.qkv(normed(h)).chunk(3, -1))
    h = h + W.out(joined(F.scaled_dot_product_attention(q, k, v, allow[:, None])))
    return h + W.down(F.gelu(W.up(normed(h))))


def row_pairs(row):
    every = torch.arange(N)
    return packed(every, every)[row : row + 1]


def pipeline(pairs=row_pairs, takes=lambda tick: tick):
    """Each rank is a layer, each row a microbatch, and a tick hands all on; the hidden vectors of this rank's layer."""

    def step(ids):
        last, done = len(ids) - 1, {}
        h = 0 * W.embed(ids[:1])
        for tick in range(last + ranks()):
            row = takes(tick - rank())
            at = min(max(row, 0), last)
            h = 0 * h + W.embed(ids[at : at + 1]) + W.place.weight if rank() == 0 else h
            h = block(h, pairs(at))
            if 0 <= row <= last:
                done[row] = h
            h = shift(h)
        return {f"stage {rank()}": torch.cat([done[row] for row in range(last + 1)]) + 0 * h}

    return step


# -------- the same on one process, of all positions


def alone(mix):
    def step(ids):
        h = W.embed(ids) + W.place.weight[: ids.shape[1]]
        return W.head(h + mix(h))

    return step


def attention(allow=packed):
    def mix(h):
        q, k, v = map(heads, W.qkv(h).chunk(3, -1))
        every = torch.arange(h.shape[1])
        return W.out(joined(F.scaled_dot_product_attention(q, k, v, allow(every, every)[:, None])))

    return mix


def of_documents(mix):
    """Each document by itself."""

    def whole(h):
        rows = [row.split(sizes) for row, sizes in zip(h, LENGTHS, strict=True)]
        return torch.stack([torch.cat([mix(part[None])[0] for part in parts]) for parts in rows])

    return whole


def convolution(h):
    return F.conv1d(F.pad(h.mT, (TAPS - 1, 0)), W.taps.T.flip(1)[:, None], groups=WIDTH).mT


def scan(h):
    return run(h, W.decay.sigmoid().expand_as(h))


def feed_forward(h):
    return W.down(F.gelu(W.up(normed(h))))


def first_served(h):
    wants = W.router(h).argmax(-1)
    return F.gelu(W.up(h))[..., :WIDTH] * (wants * (wants.cumsum(1) <= PLACES))[..., None]


def stages(ids):
    """The hidden vectors of each stage of a pipeline."""
    h, every, found = W.embed(ids) + W.place.weight, torch.arange(N), {}
    for stage in range(ranks()):
        found[f"stage {stage}"] = h = block(h, packed(every, every))
    return found


# what runs in parallel, which positions each rank has, and the same alone
PAIRS = {
    "ring": (decoder(ring()), contiguous, alone(attention())),
    "ring, zigzag": (decoder(ring(), zigzag), zigzag, alone(attention())),
    "ulysses": (decoder(ulysses()), contiguous, alone(attention())),
    "convolution": (decoder(convolved()), contiguous, alone(of_documents(convolution))),
    "scan": (decoder(scanned()), contiguous, alone(of_documents(scan))),
    "scan of features": (decoder(scanned_features()), contiguous, alone(of_documents(scan))),
    "feed-forward": (decoder(fed()), contiguous, alone(feed_forward)),
    "experts": (decoder(experts()), contiguous, alone(first_served)),
    "pipeline": (pipeline(), torch.arange, stages),
}


def gaps():
    """{layer: largest differences of values and of gradients, summed over the ranks, to one process} in float64."""
    W.double()
    noise = torch.randn(2, N, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = {}
    for name, (step, split, reference) in PAIRS.items():
        ours, whole = step(IDS), reference(IDS)
        if name == "pipeline":
            (ours,), whole = ours.values(), whole[f"stage {rank()}"]
        weights = noise[..., : whole.shape[-1]]
        owned = (rank() == ranks() - 1) if name == "pipeline" else 1.0  # its last layer makes the loss
        gradients = []
        for loss in ((ours * weights[:, split(N)]).sum() * owned, (whole * weights).sum() * owned):
            W.zero_grad()
            loss.backward()
            gradients.append(torch.cat([(0 * p if p.grad is None else p.grad).flatten() for p in W.parameters()]))
        dist.all_reduce(gradients[0].detach_())
        expected = gradients[1].detach()
        if name == "pipeline":
            dist.all_reduce(expected)
        gap = torch.stack([(ours - whole[:, split(N)]).abs().max(), (gradients[0] - expected).abs().max()]).detach()
        dist.all_reduce(gap, dist.ReduceOp.MAX)
        found[name] = [*gap.tolist(), float(expected.abs().max())]
    W.float().zero_grad()
    return found
