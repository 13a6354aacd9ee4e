"""The geometry of attention in use: symmetry and directionality among the tokens that really meet in a text.

Symmetry of the weights asks whether M = W_q^T W_k treats two tokens alike if both may be anything. Here the tokens are
those of a text, and their scores are those that the model computes, with biases, positions and norms. `docs/maths.md`
("Geometry in use") has the definitions and what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.row import causal_without_mask
from attnflow.geometry.scores import Mode, from_norms, ratio, summed
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.passes.watching import Call, Watch
from attnflow.models.subject import Subject, Text
from attnflow.models.weights.attention import AttentionLayer
from attnflow.models.weights.families.rows import Composed, Selected

_SCORES: Final = 1 << 21  # scores held at once: heads x queries x keys


@dataclass(frozen=True)
class InUse:
    """The geometry of one matrix among the tokens of a text."""

    symmetry: float  # of the model's own scores, in [-1, 1]: 1 where each pair of tokens scores alike both ways
    form_symmetry: float  # the same of x_i^T M x_j alone, without biases, positions and norms of queries and keys
    skew_from_form: float  # share, in [0, 1], of s_ij - s_ji that the skew part of M explains; 0 if all are alike
    directionality: float  # of M, each coordinate weighted by how much the tokens vary in it
    key_share: float  # share, in [0, 1], of the scores' variance within rows that a term of the key alone explains
    form_key_share: float  # the same of x_i^T M x_j alone
    key_chance: float  # the mean share of scores that are independent noise
    key_error: float | None  # standard error of `key_share` over sequences; None of one
    pairs: int  # number of ordered pairs of two tokens


@dataclass(frozen=True, eq=False)
class LayerTokens:
    """One self-attention layer on the n tokens of one sequence, without pads."""

    positions: Tensor  # of these tokens in the sequence, [n]
    query_input: Tensor  # what their queries are made from, [n, d]
    key_input: Tensor  # what their keys are made from, [n, d]
    # queries and keys [heads, n, head_dim], of the model, scaled as it scales them, and of M alone; keys less their
    # mean, which only adds a constant to each row
    sides: tuple[tuple[Tensor, Tensor], ...]
    meet: Tensor | None  # bool[n, n], whether a query of the one may attend to the other, or back; None: all do
    allow: Tensor | None = None  # bool[n, n], whether the query of the row may attend to the key; None: all may

    @property
    def summed(self) -> tuple[tuple[Tensor, Tensor], ...]:
        joined = [[side.transpose(0, 1).flatten(1)[None] for side in pair] for pair in self.sides]
        return tuple((left, right) for left, right in joined)


class Accumulator:
    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer
        # over pairs of two tokens <s, s>, <s, s^T>, <f, f>, <f, f^T>, <s, f>, <s, f^T> of scores s and the form's f
        self._sums = torch.zeros(6, layer.num_heads + 1, dtype=torch.float64)
        self.pairs = 0
        self._tokens = 0
        self._moments: list[Tensor] = []
        self._shares: list[Tensor] = []  # of each sequence: by the keys of scores and of the form, and of noise

    def add(self, tokens: LayerTokens) -> None:
        """Add one sequence.

        Cost: O(heads * head_dim^2 * n) if all tokens meet, and else O(heads * head_dim * n^2) in blocks of scores and
        O(n^3) for the keys' terms.
        """
        size, meet, full = len(tokens.positions), tokens.meet, tokens.summed
        self.pairs += size * (size - 1) if meet is None else int(meet.sum()) - size
        factored = meet is None and size > full[0][0].shape[-1]
        sums = [_factored_sums(tokens.sides) if meet is None else _blocked_sums(tokens.sides, meet)]
        sums.append(_factored_sums(full) if factored else _blocked_sums(full, meet))
        self._sums += torch.cat(sums, dim=1)
        keys = KeyTerms(tokens.allow, size)
        shares = [torch.cat([keys.share(*one) for one in pair]) for pair in zip(tokens.sides, full, strict=True)]
        self._shares.append(torch.stack([*shares, torch.full_like(shares[0], keys.chance)]))
        # second moments of queries' tokens, covariances of keys' tokens within the sequence; of both, projected
        _, (query, key) = full
        inputs = [tokens.query_input.double(), tokens.key_input.double()]
        parts = [inputs[0].square().sum(0), (inputs[1] - inputs[1].mean(0)).square().sum(0)]
        shared = key.unflatten(-1, (self._layer.num_kv_heads, -1, self._layer.head_dim))[..., 0, :].flatten(-2)
        parts = [part.cpu() for part in (*parts, *(side.mT @ side for side in (query[0].double(), shared[0].double())))]
        self._moments = [a + b for a, b in zip(self._moments, parts, strict=True)] if self._moments else parts
        self._tokens += size

    def result(self, gamma: float, mode: Mode) -> list[InUse]:
        squares, turned, form, form_turned, cross, cross_turned = self._sums
        symmetry, form_symmetry = ratio(turned, squares), ratio(form_turned, form)
        # |s_n|^2 = (<s, s> - <s, s^T>) / 2, and so for the form and for their product
        skew, skew_form = (squares - turned).clamp(min=0), (form - form_turned).clamp(min=0)
        explained = ratio((cross - cross_turned).square(), skew * skew_form)
        # Of scores that are symmetric but for rounding there is nothing to explain.
        explained = torch.where(skew > 1e-9 * squares, explained, 0.0)
        directionality = self._directionality(gamma, mode)
        shares = torch.stack(self._shares)
        error = (shares[:, 0].std(0) / len(shares) ** 0.5).tolist() if len(shares) > 1 else [None] * len(symmetry)
        numbers = (symmetry, form_symmetry, explained, directionality, *shares.mean(0))
        columns = zip(*(part.tolist() for part in numbers), error, strict=True)
        *heads, full = [InUse(*cast(Any, values), pairs=self.pairs) for values in columns]
        return [full, *heads]

    def _directionality(self, gamma: float, mode: Mode) -> Tensor:
        layer = self._layer
        query_variance, key_variance, by_query, by_key = (moment / self._tokens for moment in self._moments)
        query, key = (side().detach().cpu().double() for side in (layer.query, layer.key))
        heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim

        def directionality(of_queries: Tensor, of_keys: Tensor, query: Tensor, key: Tensor) -> Tensor:
            rows = ((of_keys @ query) * query).sum(0) * query_variance
            columns = ((of_queries @ key) * key).sum(0) * key_variance
            return from_norms(rows.clamp(min=0).sqrt(), columns.clamp(min=0).sqrt(), gamma, mode)

        scores: list[Tensor] = []
        for head in range(heads):
            mine, its = (slice(at * width, (at + 1) * width) for at in (head, head * kv_heads // heads))
            scores.append(directionality(by_query[mine, mine], by_key[its, its], query[mine], key[its]))
        # of the sum over the query heads of each group
        groups = by_query.unflatten(0, (kv_heads, -1, width)).unflatten(-1, (kv_heads, -1, width))
        by_sum = groups.sum((1, 4)).flatten(0, 1).flatten(1)
        return torch.stack([*scores, directionality(by_sum, by_key, *summed(query, key, heads, kv_heads))])


def measure(
    subject: Subject, layers: Sequence[AttentionLayer], inputs: Text, gamma: float, mode: Mode
) -> dict[str, list[InUse]]:
    """The geometry in use of every self-attention layer, by its name: all heads together, then each head."""
    layers = [layer for layer in layers if layer.kind == "self"]
    sums = {layer.name: Accumulator(layer) for layer in layers}
    observe(subject, layers, subject.read(inputs), lambda layer, tokens: sums[layer.name].add(tokens))
    if silent := [name for name, layer in sums.items() if not layer.pairs]:
        raise ValueError(
            f"no pair of tokens met in {silent[0]}: pass at least 2 tokens, and inputs for every tower of the model"
        )
    return {name: layer.result(gamma, mode) for name, layer in sums.items()}


def observe(
    subject: Subject,
    layers: Sequence[AttentionLayer],
    tensors: Mapping[str, Tensor],
    see: Callable[[AttentionLayer, LayerTokens], None],
) -> None:
    from attnflow.models.anatomy.sites import models_around
    from attnflow.models.passes.interception import AttentionCall, Output, Proceed, intercept, readable_implementation

    named = {layer.name: layer for layer in layers}
    sites = [site for site in subject.sites if site.name in named]
    if missing := sorted(set(named) - {site.name for site in sites}):
        raise UnsupportedArchitecture(
            f"{missing[0]} does not call the attention interface of transformers, where queries and keys are read: "
            "score it without inputs"
        )
    sources = {name: (source_of(layer.query_rows), source_of(layer.key_rows)) for name, layer in named.items()}
    latest: dict[str, Tensor] = {}
    uses = [path for pair in sources.values() for path in set(pair)]

    def enter(call: Call) -> None:
        latest[call.name] = call.first

    def interceptor(name: str, part: str) -> Any:
        def around(call: AttentionCall, proceed: Proceed) -> Output:
            tokens = [latest.get(path) for path in sources[name]]
            for path in sources[name]:
                if uses.count(path) == 1:  # else a later layer attends to keys that were made here
                    latest.pop(path, None)
            mask = tensors.get("decoder_attention_mask" if part == "decoder" else "attention_mask")
            for sequence in _sequences(named[name], call, tokens, mask):
                see(named[name], sequence)
            return proceed(call)

        return around

    by_module = {site.module: interceptor(site.name, site.part) for site in sites}
    implementations = {readable_implementation(site.owner.config) for site in sites}
    implementation = implementations.pop() if len(implementations) == 1 else "sdpa"
    modules = {path: subject.model.get_submodule(path) for path in dict.fromkeys(uses)}
    exact = torch.autocast(subject.device.type, enabled=False)
    with evaluating(subject.model), torch.no_grad(), exact, Watch(modules, enter):
        interception = intercept(models_around(sites), by_module, role="pool", implementation=implementation)
        try:
            subject.model(**tensors, **subject.sparing)
        finally:
            interception.remove()


def _sequences(
    layer: AttentionLayer, call: Any, tokens: Sequence[Tensor | None], mask: Tensor | None
) -> Iterator[LayerTokens]:
    query, key = cast(Tensor, call.query), cast(Tensor, call.key)
    batch, heads, size, head_dim = query.shape
    inputs = [None if token is None or token.numel() % (batch * size) else token for token in tokens]
    if heads != layer.num_heads or key.shape[2] != size or inputs[0] is None or inputs[1] is None:
        raise UnsupportedArchitecture(
            f"{layer.name} has {layer.num_heads} heads, but attended with {heads} heads of {size} queries to "
            f"{key.shape[2]} keys: its geometry in use is not read"
        )
    dtype = torch.promote_types(query.dtype, torch.float32)
    allowed = _allowed(call.mask, size)
    scale = call.kwargs.get("scaling") or head_dim**-0.5
    for number in range(batch):
        real = torch.ones(size, dtype=torch.bool, device=query.device)
        allow = real.expand(size, size)
        if allowed is not None:
            allow = allowed[number if len(allowed) > 1 else 0].any(0)
            real &= allow.diagonal()  # a token that may not attend to itself is a pad
        elif causal_without_mask(call):
            allow = allow.tril()
        if mask is not None and mask.shape == (batch, size):
            real &= mask[number].to(real.device).bool()
        allow = allow[real][:, real]
        meet, allow = (None if bool(table.all()) else table for table in (allow | allow.T, allow))
        x, y = (cast(Tensor, one).reshape(batch, size, -1)[number][real].to(dtype) for one in inputs)
        form = (x @ layer.query().detach().to(x).T, y @ layer.key().detach().to(y).T)
        sides = [(query[number][:, real].to(dtype) * scale, key[number][:, real].to(dtype))]
        left, right = (part.unflatten(-1, (-1, layer.head_dim)).transpose(0, 1) for part in form)
        sides.append((left, right))
        pairs = tuple(
            (left, (right - right.mean(1, keepdim=True)).repeat_interleave(heads // len(right), 0))
            for left, right in sides
        )
        yield LayerTokens(real.nonzero()[:, 0], x, y, pairs, meet, allow)


def _allowed(mask: object, size: int) -> Tensor | None:
    """A mask of the attention interface as bool[batch or 1, heads or 1, queries, keys]; None: all keys, or causal."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-1] < size:
        return None
    mask = mask[..., :size, :size].expand(-1, -1, size, -1)
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def source_of(rows: Selected | Composed) -> str:
    while isinstance(rows, Composed):
        piece = rows.pieces[0]
        rows = piece.rows if piece.input is None else piece.input
    return rows.tensor.rpartition(".")[0]


class KeyTerms:
    """Least-squares terms of keys: s_ij ~ a_i + b_j over the pairs of one sequence that a mask allows.

    Without the rows' means, b solves L b = r with r_j the sum of column j and L = diag(columns) - A^T diag(1/rows) A,
    the Laplacian of the keys that share rows; r b is what the keys explain of the variance within rows.
    """

    def __init__(self, allow: Tensor | None, size: int) -> None:
        self._allow = allow
        self.chance = 1 / size if allow is None else 0.0  # rank L / (pairs - rows)
        if allow is not None:
            table = allow.double()
            rows = table.sum(1).clamp(min=1)
            laplacian = table.sum(0).diag() - table.mT @ (table / rows[:, None])
            self._inverse = torch.linalg.pinv(laplacian, rtol=1e-10, hermitian=True)
            free = float(table.sum() - (table.sum(1) > 0).sum())
            self.chance = float((self._inverse * laplacian).sum()) / free if free else 0.0

    def share(self, query: Tensor, key: Tensor) -> Tensor:
        """What the keys explain of the variance within rows of query @ key.mT, [heads]; 0 without variance."""
        query, key = query.double(), (key - key.mean(1, keepdim=True)).double()
        if self._allow is None:
            by_key = key.shape[1] * (key @ query.mean(1)[..., None]).square().sum((1, 2))
            return ratio(by_key, ((query.mT @ query) * (key.mT @ key)).sum((1, 2))).cpu()
        heads, size = query.shape[:2]
        total, columns = query.new_zeros(heads), query.new_zeros(heads, size)
        for at in range(0, size, step := max(1, _SCORES // (heads * size))):
            weights = self._allow[at : at + step].to(query)
            score = (query[:, at : at + step] @ key.mT) * weights
            score -= (score.sum(-1) / weights.sum(-1).clamp(min=1))[..., None] * weights
            total += score.square().sum((1, 2))
            columns += score.sum(1)
        return ratio(((columns @ self._inverse) * columns).sum(1), total).cpu()


def _factored_sums(sides: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The sums of `Accumulator`, [6, heads], over all pairs of two tokens, without a table of tokens x tokens.

    For tables A = Q K^T and B = P L^T, <A, B> = <Q^T P, K^T L> and <A, B^T> = tr((K^T P) (L^T Q)).
    """
    (query, key), (form_query, form_key) = [(q.double(), k.double()) for q, k in sides]
    sums: list[Tensor] = []
    for (q, k), (p, m) in (
        ((query, key), (query, key)),
        ((form_query, form_key), (form_query, form_key)),
        ((query, key), (form_query, form_key)),
    ):
        alone = ((q * k).sum(-1) * (p * m).sum(-1)).sum(-1)  # a token with itself
        sums.append(((q.mT @ p) * (k.mT @ m)).sum((-2, -1)) - alone)
        sums.append(((k.mT @ p) * (q.mT @ m)).sum((-2, -1)) - alone)
    return torch.stack(sums).cpu()


def _blocked_sums(sides: Sequence[tuple[Tensor, Tensor]], meet: Tensor | None) -> Tensor:
    """The same over the pairs that meet, from blocks of queries; each row is centred over what meets its query."""
    heads, size = sides[0][0].shape[:2]
    step = max(1, _SCORES // (heads * size))
    blocks = [slice(at, min(at + step, size)) for at in range(0, size, step)]
    means = [query.new_zeros(heads, size) for query, _ in sides]
    if meet is not None:
        weights = meet.to(sides[0][0])
        means = [
            torch.cat([((query[:, at] @ key.mT) * weights[at]).sum(-1) for at in blocks], dim=1) / weights.sum(-1)
            for query, key in sides
        ]
    total = torch.zeros(6, heads, dtype=torch.float64)
    number = torch.arange(size, device=sides[0][0].device)
    for rows in blocks:
        pairs = number[rows, None] != number
        weights = (pairs if meet is None else pairs & meet[rows]).to(sides[0][0])
        (score, score_back), (form, form_back) = [
            ((query[:, rows] @ key.mT - mean[:, rows, None]) * weights,
             (key[:, rows] @ query.mT - mean[:, None]) * weights)
            for (query, key), mean in zip(sides, means, strict=True)
        ]  # fmt: skip
        products = ((score, score), (score, score_back), (form, form), (form, form_back), (score, form),
                    (score, form_back))  # fmt: skip
        total += torch.stack([(a * b).sum((1, 2), dtype=torch.float64).cpu() for a, b in products])
    return total
