"""`check_scores`: is a score per token a probability, or does it know the token that it scores?

A procedure that adapts to its own label gives every token that it is shown a high score. What no honest score can do
is to add up to more than one: for every prefix, exp(score) over all choices of the next token is at most one. A score
that obeys this, and that no later token changes, is the length of a code that somebody could decode.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attnflow._core import checks
from attnflow._core.progress import Progress
from attnflow.audit.audit import check
from attnflow.audit.functions import Function, as_function
from attnflow.audit.inputs import read
from attnflow.audit.report import AuditReport, Violation
from attnflow.models.passes.evaluation import REFUSALS, seed_all
from attnflow.models.subject import Subject

_COPIES: Final = 32  # sequences per call, if a function takes more than it was given
_ALIKE: Final = 1e-4  # nats by which a score may differ between batches of two sizes
_DOUBT: Final = 1e-3  # at most this share of honest scores is accused from a sample of the choices


def check_scores(
    score: Callable[..., object],
    tokens: Sequence[int] | Tensor,
    vocab_size: int,
    *,
    labels: Sequence[int] | None = None,
    positions: int = 16,
    choices: int = 1024,
    tolerance: float = 1e-3,
    passes: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> AuditReport:
    """Check that a score per token is honest: later tokens do not change it, and it is a probability of its token.

    First it runs `check` with a causal order. Then, at some positions, it scores every choice of the token after the
    same prefix and sums exp(score). A sum above one is a violation of kind "sum". A sum below one wastes probability,
    which only makes a score worse, so it is a note.

    From a large vocabulary it scores the tokens of the text and a random sample. Their sum must not exceed one either.
    The estimates of the whole sum at all positions give a test that accuses at most one honest score in a thousand
    (a product of e-values; Vovk and Wang, 2021).

    Args:
        score: a function of token ids that returns log-probabilities in nats: n - 1 numbers for the labels 1 to n - 1,
            or n numbers for all labels (for 1 to n if the last never changes). Fewer numbers, as of a response
            alone, are scores of the tokens that move them last. For a loss, pass `lambda ids: -loss(ids)`.
        tokens: ids [n] or [batch, n]; the function is called with this shape, and with more rows if that changes
            nothing.
        vocab_size: number of choices V; ids are below it.
        labels: the tokens that fewer than n - 1 numbers score, as positions, negative ones from the end.
        positions: number of labels to test, evenly spread.
        choices: most choices to score at each position; all of them if V is no larger.
        tolerance: how far a sum may exceed one; rounding of float32 makes about 1e-5.
        passes: as for `check`.
        seed: seed of the replacement tokens and of the sample.
        progress: called as `progress(done, total, what)`.

    Returns:
        The report of `check`. A sum above one is a violation with its position, the two likeliest choices after that
        prefix, and their scores. The verdict is "nothing tested" if the scores do not change with the tokens.

    Raises:
        ValueError: the function returns no score per token, or only numbers above 0, as a loss does. Or it returns
            fewer numbers, and the tokens that they score cannot be told.

    Cost: that of `check`, and positions x choices scored sequences, at most 32 per call. Fewer numbers than labels take
    about 6 log2(n) calls more.
    """
    tokens = torch.as_tensor(tokens)
    if tokens.is_floating_point() or not 1 <= tokens.ndim <= 2 or tokens.shape[-1] < 2:
        raise ValueError(f"tokens must be ids [n] or [batch, n], n at least 2, got {tokens.dtype} {list(tokens.shape)}")
    checks.integer("vocab_size", vocab_size, 2)
    checks.integer("positions", positions, 1)
    checks.integer("choices", choices, 2)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"tokens must lie in [0, {vocab_size}), the vocabulary; got {int(tokens.min())} to {int(tokens.max())}"
        )
    places = _labels_of(score, tokens, labels, vocab_size, seed)
    function = as_function(score, tokens)[0]
    for copy in (function, function.twin):
        if copy is not None:
            copy.labels = places
    # First, as it sees what a first call leaves.
    report = check(function, tokens, passes=passes, seed=seed, progress=progress)
    if places:
        few = ", ".join(map(str, places if len(places) < 6 else [*places[:3], "...", *places[-2:]]))
        report = replace(report, order=f"{report.order}; {len(places)} numbers, the scores of tokens {few}")
    scorer = _Scorer(score, tokens, places, seed)
    least, most = float(scorer.base.min()), float(scorer.base.max())
    if least >= 0 and most > 0:
        raise ValueError(
            f"expected log-probabilities, which are at most 0, got numbers from {least:.3g} to {most:.3g}; of a loss "
            "pass lambda ids: -loss(ids)"
        )
    if report.untested or any(violation.kind == "state" for violation in report.violations):
        return report
    labels = scorer.labels(positions, vocab_size)
    sums = [scorer.sum(label, vocab_size, choices, progress) for label in labels]
    return _judged(report, sums, vocab_size, tolerance, scorer)


def _labels_of(
    score: Callable[..., object], tokens: Tensor, labels: Sequence[int] | None, vocab_size: int, seed: int
) -> list[int]:
    """The tokens that fewer than n - 1 numbers score; an empty list where there are as many numbers as labels."""
    function = as_function(score, tokens)[0]
    function = function.twin or function  # so that the audit sees what a first call leaves
    rows, n = torch.atleast_2d(tokens).shape

    def numbers(ids: Tensor) -> Tensor | None:
        """[rows, numbers for each sequence], if these are fewer than its labels."""
        values = _numbers_of(function, ids, seed)
        if any(value.numel() in (rows * n, rows * (n - 1)) for value in values):
            return None
        lead = tokens.ndim - 1
        few = [value for value in values if value.shape[:lead] == tokens.shape[:lead] and value.ndim <= tokens.ndim]
        return few[0].reshape(rows, -1) if few and 0 < few[0].numel() < rows * (n - 1) else None

    base = numbers(tokens)
    count = 0 if base is None else base.shape[1]
    if labels is not None:
        places = [label + n if label < 0 else label for label in labels]
        if places != sorted(set(places)) or len(places) != count or not all(0 < place < n for place in places):
            raise ValueError(
                f"labels must be rising positions from 1 to {n - 1}, one for each of {count} numbers of a row; got "
                f"{list(labels)}. Leave them out if there are {n - 1} or {n} numbers"
            )
        return places
    if base is None:
        return []
    if count == 1:
        raise ValueError(
            "expected a score per token, got one number for each sequence: return the numbers before they are added "
            "up, or say which token it scores, as labels=[-1]"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = [(tokens + torch.randint(1, vocab_size, tokens.shape, generator=generator)) % vocab_size for _ in range(2)]

    @functools.cache
    def moved(start: int) -> list[bool]:
        before = torch.arange(n) < start
        after = [numbers(torch.where(before, tokens, other)) for other in drawn]
        return torch.stack([(base != part).any(0) for part in after if part is not None]).any(0).tolist()

    def last(column: int) -> int:
        return bisect_left(range(n), True, key=lambda start: not moved(start)[column]) - 1

    first, final = last(0), last(count - 1)  # positions at equal distances, if these and a middle one say so
    places = list(range(first, final + 1, max(1, (final - first) // (count - 1))))
    if first > 0 and len(places) == count and last(count // 2) == places[count // 2]:
        return places
    return _in_turn([last(column) for column in range(count)], n)


def _in_turn(places: list[int], n: int) -> list[int]:
    """Rising positions; those of the last tokens where no number stops before its own, so that a leak shows there."""
    if places[0] > 0 and places == sorted(set(places)):
        return places
    ends = list(range(n - len(places), n))
    if all(place >= end for place, end in zip(places, ends, strict=True)):
        return ends
    raise ValueError(
        f"{len(places)} numbers for each sequence are moved last by the tokens {places[:8]}, so that it cannot be told "
        "which tokens they score: pass labels="
    )


def _numbers_of(function: Function, ids: Tensor, seed: int) -> list[Tensor]:
    seed_all(seed)
    with torch.no_grad():
        output = function(input_ids=ids)
    return [value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point()]


@dataclass(frozen=True)
class _Sum:
    label: int
    total: Tensor  # [batch]: of the choices that were scored
    estimate: Tensor  # [batch]: of all choices, without bias
    scored: int  # choices
    likeliest: Tensor  # [batch, 2]
    scores: Tensor  # [batch, 2]: of these two


class _Scorer:
    def __init__(self, score: Callable[..., object], tokens: Tensor, labels: list[int], seed: int) -> None:
        self.function: Function = as_function(score, tokens)[0]
        self.function.labels = labels
        self.tokens = torch.atleast_2d(tokens)
        self.flat = tokens.ndim == 1
        self.seed = seed
        self.calls = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.function.align(read(Subject(self.function), tokens), seed)
        self.base = self(self.tokens)
        self.first = self.tokens.shape[1] - self.base.shape[1]  # the label of row 0
        self.copies = 1 if self.flat else self._copies()

    def __call__(self, ids: Tensor) -> Tensor:
        batch, n = ids.shape
        self.calls += 1
        self.function.size = (n,) if self.flat else (batch, n)
        tensors = _numbers_of(self.function, ids[0] if self.flat else ids, self.seed)
        for rows, value in product((n, n - 1), tensors):
            if value.numel() == batch * rows and value.shape in ((batch, rows), (rows,), (batch * rows,)):
                return value.reshape(batch, rows).double().cpu()
        shapes = ", ".join(str(list(value.shape)) for value in tensors) or "none"
        raise ValueError(f"expected a score per token, [{batch}, {n - 1}] or [{batch}, {n}]; numbers came as {shapes}")

    def _copies(self) -> int:
        """How many sequences per row of the tokens one call takes without changing the scores of these rows."""
        other = self.tokens[torch.randperm(len(self.tokens), generator=self.generator)].repeat(_COPIES - 1, 1)
        other = other[:, torch.randperm(other.shape[1], generator=self.generator)]
        try:
            scores = self(torch.cat([self.tokens, other]))[: len(self.tokens)]
        except (*REFUSALS, IndexError):
            return 1
        return _COPIES if torch.allclose(scores, self.base, rtol=0, atol=_ALIKE, equal_nan=True) else 1

    def labels(self, count: int, vocab_size: int) -> list[int]:
        """At most `count` positions that are scored: their scores move when all tokens change."""
        drawn = (self.tokens + torch.randint(1, vocab_size, self.tokens.shape, generator=self.generator)) % vocab_size
        scored = (self(drawn) != self.base).any(0).nonzero()[:, 0].tolist()
        chosen = np.unique(np.linspace(0, len(scored) - 1, min(count, len(scored))).round().astype(int))
        return [scored[i] + self.first for i in chosen]

    def sum(self, label: int, vocab_size: int, choices: int, progress: Progress | None) -> _Sum:
        likely = self.tokens.unique()[: choices // 2]  # of a text, its own tokens
        rest = torch.ones(vocab_size, dtype=torch.bool).index_fill_(0, likely, False).nonzero()[:, 0]
        sample = rest[torch.randperm(len(rest), generator=self.generator)[: choices - len(likely)]]
        tried, batch = torch.cat([likely, sample]), len(self.tokens)
        scores: list[Tensor] = []
        for part in tried.split(self.copies):
            if progress is not None:
                progress(len(scores) * self.copies, len(tried), f"choices at position {label}")
            ids = self.tokens.repeat(len(part), 1)
            ids[:, label] = part.repeat_interleave(batch)
            scores.append(self(ids)[:, label - self.first].reshape(len(part), batch))
        table = torch.cat(scores)  # [choices, batch]
        mass, best = table.exp(), table.topk(2, dim=0)
        known, drawn = mass[: len(likely)].sum(0), mass[len(likely) :].sum(0)
        estimate = known + drawn * (len(rest) / max(1, len(sample)))
        return _Sum(label, mass.sum(0), estimate, len(tried), tried[best.indices].T, best.values.T)


def _judged(report: AuditReport, sums: list[_Sum], vocab_size: int, tolerance: float, scorer: _Scorer) -> AuditReport:
    totals = torch.stack([part.total for part in sums])  # [positions, batch]
    estimates = torch.stack([part.estimate for part in sums])
    whole = sums[0].scored == vocab_size
    evidence = ((1 + estimates / (1 + tolerance)) / 2).log().sum(0)  # of each sequence: the log of an e-value
    certain = bool((totals > 1 + tolerance).any())
    notes, violations = list(report.notes), list(report.violations)
    accused = certain or (not whole and bool((evidence > -math.log(_DOUBT / len(evidence))).any()))
    if accused:
        shown = totals if certain else estimates
        worst, row = divmod(int(shown.argmax()), shown.shape[1])
        label, text, scores = sums[worst].label, scorer.tokens[row].tolist(), sums[worst].scores[row].tolist()
        tokens = tuple((*text[:label], token, *text[label + 1 :]) for token in sums[worst].likeliest[row].tolist())
        name, change, sure = type(scorer.function).__name__, float(shown[worst, row]) - 1, certain or None
        place = None, name, None, label, change, row, row, "forward"
        violations.append(Violation("sum", *place, sure, tokens, tuple(scores)))
        over = int((shown > 1 + tolerance).any(1).sum())
        kind = "sum" if certain else "estimate, from a sample,"
        notes.append(f"the {kind} of probabilities exceeds one at {over} of {len(sums)} positions")
    low = float(totals.min())
    if whole and low < 1 - tolerance:
        at = sums[int(totals.min(1).values.argmin())].label
        notes.append(
            f"at position {at} the probabilities sum to {low:.4g}: the rest is given to nothing that can come, which "
            "makes the score worse, not better (or it is not in nats)"
        )
    if not whole:
        most = float(totals.max())
        factor = min(1 / max(most, 1e-300), 2 * math.exp(math.log(len(evidence) / _DOUBT) / len(sums)) - 1)
        notes.append(
            f"{sums[0].scored} of {vocab_size} choices were scored at each position, with at most {most:.3g} of the "
            f"probability: what raises all choices alike shows from a factor of about {factor:.3g} on"
        )
    tested = f"{report.order}; exp(score) over {sums[0].scored} choices at {len(sums)} positions"
    passes = report.forward_passes + scorer.calls
    return replace(report, violations=tuple(violations), order=tested, forward_passes=passes, notes=tuple(notes))
