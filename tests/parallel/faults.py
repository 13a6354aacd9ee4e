"""Faults that only parallel runs have, each beside its clean twin: steps of this rank, with their shards and orders."""

from typing import Any, NamedTuple

import torch

import attnflow as af
from tests.parallel import layers
from tests.parallel.layers import (
    BEGINS,
    DOCUMENTS,
    LENGTHS,
    TAPS,
    N,
    Sum,
    W,
    alone,
    attention,
    causal,
    convolution,
    convolved,
    decoder,
    earlier,
    experts,
    fed,
    first_served,
    follows,
    gathered,
    keeps,
    normed,
    of_documents,
    pipeline,
    rank,
    ranks,
    ring,
    row_pairs,
    scan,
    scanned,
    scanned_features,
    shift,
    stages,
    to_features,
    to_positions,
    ulysses,
    zigzag,
)  # fmt: skip

DOCUMENT_ORDER = af.masks.batch([af.masks.document(list(sizes)) for sizes in LENGTHS])
CAUSAL_ORDER = af.masks.causal(N)


class Case(NamedTuple):
    """Two steps of token ids, and how they are audited."""

    faulty: Any
    clean: Any
    order: Any = DOCUMENT_ORDER
    shard: Any = "contiguous"
    against: Any = None
    launches: tuple[int, ...] = (2,)
    kind: str = ""  # of the violation; "" for "reference" where there is one, else "order"
    where: str = ""  # words of the report that say where


BOTH = 2, 4


def on(number, moved, at):
    return moved if rank() == number else at


def mixers(faulty, clean, **how):
    return Case(decoder(faulty), decoder(clean), **how)


# -------- attention


def within_shards(asks, keys):
    """Documents count in a query's own shard alone."""
    return causal(asks, keys) & ((DOCUMENTS[:, asks, None] == DOCUMENTS[:, None, keys]) | (asks[0] != keys[0]))


def asked_for(asks, keys):
    """The documents of the keys do not travel with them."""
    return causal(asks, keys) & (DOCUMENTS[:, asks, None] == DOCUMENTS[:, None, asks])


def numbered_anew(asks, keys):
    one, other = (DOCUMENTS[:, at] - DOCUMENTS[:, at[:1]] for at in (asks, keys))
    return causal(asks, keys) & (one[..., None] == other[:, None])


def of_this_shard(asks, keys):
    """Documents of the first shard's length, the last of which goes on."""
    known = DOCUMENTS[:, layers.contiguous(N)]
    whole = torch.cat([known, known[:, -1:].expand(-1, N - known.shape[1])], 1)
    return causal(asks, keys) & (whole[..., None] == whole[:, None])


def backwards(x):
    return torch.cat([*to_features(x).chunk(ranks(), 1)][::-1], 1)


def other_heads(x):
    return torch.cat([*to_positions(x).chunk(ranks(), -1)][::-1], -1)


PLAIN = alone(attention(causal))
RING, CAUSAL_RING, ULYSSES, CONVOLVED, SCANNED, FED, EXPERTS = (  # clean twins are audited once
    *(ring(), ring(causal), ulysses(), convolved(), scanned(), fed(), experts()),
)
ATTENTION = {
    "a query's offset is forgotten on rank 1": mixers(
        ring(lambda asks, keys: causal(on(1, asks - asks[0], asks), keys)), CAUSAL_RING,
        order=CAUSAL_ORDER, against=PLAIN, where="of rank 1",
    ),
    "a key's offset is forgotten on rank 1": mixers(
        ring(causal, told=lambda at: on(1, at - at[0], at)), CAUSAL_RING, order=CAUSAL_ORDER, launches=BOTH,
        where="of rank 1",
    ),
    "zigzag halves are exchanged": Case(
        decoder(ring(told=lambda at: at.roll(len(at) // 2)), zigzag), decoder(RING, zigzag), shard="zigzag",
        launches=BOTH,
    ),
    "zigzag text in a ring that believes in chunks": Case(
        decoder(lambda h, at: ring(causal)(h, layers.contiguous(N)), zigzag), decoder(CAUSAL_RING, zigzag),
        order=CAUSAL_ORDER, shard="zigzag",
    ),
    "a hop of the ring is skipped": mixers(
        ring(causal, counts=lambda hop: float(hop != 1)), CAUSAL_RING, order=CAUSAL_ORDER, against=PLAIN, launches=BOTH
    ),
    "a hop of the ring counts twice": mixers(
        ring(causal, counts=lambda hop: 1.0 + (hop == 1)), CAUSAL_RING, order=CAUSAL_ORDER, against=PLAIN,
    ),
    "values of another rank's document": mixers(ring(ahead=1), RING, launches=BOTH),
    "documents of keys do not travel with them": mixers(ring(asked_for), RING),
    "documents are numbered anew in each shard": mixers(ring(numbered_anew), RING, launches=BOTH),
    "documents end at a shard's edge for attention": mixers(ring(within_shards), RING),
    "positions restart in each shard": Case(
        decoder(ring(), places=lambda at: at - at[0]), decoder(RING), against=alone(attention()),
    ),
    "Ulysses with the documents of one shard": mixers(ulysses(of_this_shard), ULYSSES),
    "Ulysses without documents": mixers(ulysses(causal), ULYSSES),
    "Ulysses joins shards backwards": mixers(ulysses(enter=backwards), ULYSSES, launches=BOTH),
    "Ulysses hands heads back in another order": mixers(
        ulysses(leave=other_heads), ULYSSES, against=alone(attention()), launches=BOTH
    ),
}  # fmt: skip

# -------- state-space layers


def on_edges(mask):
    """True for the first token of a shard, whatever the documents are."""
    return lambda at: mask(at) | (torch.arange(len(at)) == 0)


STATES = {
    "documents end at a shard's edge for a convolution": mixers(
        convolved(same=lambda at, by: follows(at, by) | (at - by < at[0])), CONVOLVED, launches=BOTH
    ),
    "a convolution without documents": mixers(
        convolved(same=lambda at, by: (at >= by)[None]), CONVOLVED
    ),
    "a halo from the shard behind": mixers(convolved(lambda h: shift(h[:, : TAPS - 1], -1)), CONVOLVED),
    "a halo that goes around the ring": Case(
        decoder(convolved(lambda h: shift(h[:, 1 - TAPS :]), same=lambda at, by: torch.ones(1, len(at)))),
        decoder(convolved(same=lambda at, by: torch.ones(1, len(at)))), order=CAUSAL_ORDER,
    ),
    "a halo of zeros": mixers(
        convolved(lambda h: 0 * h[:, 1 - TAPS :]), CONVOLVED, against=alone(of_documents(convolution))
    ),
    "documents end at a shard's edge for a scan": mixers(
        scanned(keep=on_edges(keeps), through=on_edges(keeps)), SCANNED, launches=BOTH
    ),
    "a state goes on beyond a document": mixers(
        scanned(through=lambda at: torch.ones(2, len(at))), SCANNED, launches=BOTH
    ),
    "a state from the shard behind": mixers(
        scanned(hand=lambda x: shift(x, -1) * (rank() + 1 < ranks())), SCANNED,
        against=alone(of_documents(scan)), launches=BOTH,
    ),
    "a state that goes around the ring": mixers(
        scanned(lambda at: torch.ones(1, len(at)), lambda at: torch.ones(1, len(at)), shift),
        scanned(lambda at: torch.ones(1, len(at)), lambda at: torch.ones(1, len(at))), order=CAUSAL_ORDER,
    ),
    "no state arrives": mixers(scanned(hand=torch.zeros_like), SCANNED, against=alone(of_documents(scan))),
    "a scan of features without documents": mixers(
        scanned_features(lambda at: ~BEGINS[:, :1] | (at > 0)), scanned_features()
    ),
}  # fmt: skip

# -------- pipelines


def every_pair(row):
    return causal(torch.arange(N), torch.arange(N))


def staged(faulty, **how):
    return Case(faulty, pipeline(), shard=None, where="rank 1", **how)


def exchanged(tick):
    """The first two microbatches are taken for one another."""
    return 1 - tick if rank() >= 1 and 0 <= tick <= 1 else tick


PIPELINES = {
    "documents are dropped on a middle stage": staged(
        pipeline(lambda row: on(1, every_pair(row), row_pairs(row))), launches=(4,)
    ),
    "documents are dropped on the last stage": staged(
        pipeline(lambda row: on(1, every_pair(row), row_pairs(row))), launches=(2,)
    ),
    "a stage has the documents of another microbatch": staged(
        pipeline(lambda row: on(1, row_pairs(1 - row), row_pairs(row))), launches=BOTH
    ),
    "microbatches are exchanged between stages": staged(
        pipeline(takes=exchanged), against=stages, launches=BOTH
    ),
}  # fmt: skip

# -------- norms, experts, padding


def over_positions(h):
    return (h - h.mean(1, True)) / h.std(1, keepdim=True)


def over_ranks(h):
    """A norm with the statistics of all shards."""
    whole = gathered(h)
    return (h - whole.mean(1, True)) / whole.std(1, keepdim=True)


def next_shard(x):
    return x.chunk(ranks(), 1)[(rank() + 1) % ranks()]


def asked_later(counts):
    return gathered(counts)[:, rank() + 1 :].sum(1, True)


def padded(places, fill):
    """Ring attention to 22 tokens and two more, which stand at `places`."""

    def step(ids):
        n = ids.shape[1]
        long = torch.cat([ids, fill(ids)], 1)
        at = layers.contiguous(long.shape[1])
        mix = ring(causal, told=lambda at: torch.where(at < n, at, places))
        logits = decoder(lambda h, at: mix(h, at))(long)
        return logits[:, at < n]

    return step


def real(n=22):
    at = layers.contiguous(N)
    return at[at < n]


SHARED = {
    "a norm over the positions of a shard": mixers(fed(over_positions), FED),
    "a norm over the positions of all shards": mixers(fed(over_ranks), FED, launches=BOTH),
    "features are summed into another shard": mixers(fed(leave=next_shard), FED),
    "an expert serves later shards first": mixers(experts(asked_later), EXPERTS, order=CAUSAL_ORDER, launches=BOTH),
    "places at an expert are counted in each shard": mixers(
        experts(torch.zeros_like), EXPERTS, order=CAUSAL_ORDER, against=alone(first_served),
    ),
    "padding of repeated tokens at position 0": Case(
        padded(0, lambda ids: ids[:, -2:]), padded(N, lambda ids: ids[:, -2:]),
        order=af.masks.causal(22), shard=real, launches=BOTH
    ),
    "padding of zeros at position 0": Case(
        padded(0, lambda ids: torch.zeros_like(ids[:, -2:])), padded(N, lambda ids: torch.zeros_like(ids[:, -2:])),
        order=af.masks.causal(22), shard=real, against=PLAIN,
    ),
}  # fmt: skip

# -------- ranks with other rows


def mine():
    """This rank's row, and all positions."""
    return torch.tensor([rank() % 2]), slice(None)


def by_rows(mix):
    def step(ids):
        h = W.embed(ids[rank() % 2 :][:1]) + W.place.weight
        return W.head(h + mix(h, torch.arange(N)))

    return step


ROWS = {
    "places at an expert are shared between ranks' rows": Case(
        by_rows(experts(earlier, 14)), by_rows(experts(torch.zeros_like, 14)), order=CAUSAL_ORDER, shard=mine,
        kind="batch",
    ),
    "a norm of a batch that lies on several ranks": Case(
        by_rows(lambda h, at: h - Sum.apply(h) / ranks()), by_rows(lambda h, at: normed(h)), order=CAUSAL_ORDER,
        shard=mine, kind="batch",
    ),
}  # fmt: skip

CASES = {**ATTENTION, **STATES, **PIPELINES, **SHARED, **ROWS}
