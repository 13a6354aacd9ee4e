"""The corpus: every leak is found, no clean twin is accused, and the guide counts what other checks find."""

import inspect
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnflow as af
from tests.leaks import alone, batches, borders, losses, models, requests, scorers
from tests.leaks.others import probe_finds, source_check_finds, sources
from tests.leaks.parts import IDS, VOCABULARY

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "audit.md"
TEXT = torch.randint(VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(0))
MISSED = ["a leak that one token opens, three times in a row"]  # by us; the inputs decide what is seen


def audit_model(mix, order=None):
    ids = TEXT if "96" in inspect.getsource(mix) else IDS
    return af.audit.check(models.Net(mix).eval(), ids, order or af.masks.causal(ids.shape[1]))


@cache
def padded_by_one():
    return LlamaForCausalLM(LlamaConfig(**losses.SIZE, pad_token_id=1, eos_token_id=2)).eval()


def audit_batch(batch):
    return af.audit.check_batch(batch, padded_by_one())


AUDITS = {  # kind: (file, cases, our check, the function to probe)
    "models": (models, models.CASES, audit_model, lambda mix: models.Net(mix).eval()),
    "packed models": (
        models,
        models.PACKED,
        lambda mix: audit_model(mix, af.masks.document([5, 7])),
        lambda mix: models.Net(mix).eval(),
    ),
    "scores and losses": (
        scorers,
        scorers.CASES,
        lambda score: af.audit.check_scores(score, IDS, VOCABULARY),
        lambda score: score,
    ),
    "counts and compressors": (
        scorers,
        scorers.COUNTS,
        lambda score: af.audit.check_scores(score, IDS % scorers.WORDS, scorers.WORDS),
        lambda score: lambda ids: score(ids % scorers.WORDS),
    ),
    "states": (
        scorers,
        scorers.STATES,
        lambda make: af.audit.check_scores(make(), IDS, VOCABULARY),
        lambda make: make(),
    ),
    "batches": (batches, batches.CASES, audit_batch, None),
    "losses": (losses, losses.CASES, lambda case: af.audit.check_loss(*case, losses.MODEL), None),
    "rows alone": (alone, alone.CASES, lambda case: af.audit.check_alone(*case), None),
    "requests": (requests, requests.CASES, lambda case: af.audit.check(*case), None),
    "borders and precisions": (
        borders,
        borders.CASES,
        lambda mix: af.audit.check(models.Net(mix).eval(), TEXT, af.masks.causal(TEXT.shape[1]), passes=8),
        lambda mix: models.Net(mix).eval(),
    ),
}
CASES = [(kind, cause) for kind, (_, cases, *_) in AUDITS.items() for cause in cases]


@pytest.mark.parametrize(("kind", "cause"), CASES)
def test_a_leak_and_its_clean_twin(kind, cause):
    _, cases, audit, _ = AUDITS[kind]
    leaky, clean = (audit(each) for each in cases[cause])
    assert clean.ok, clean
    assert leaky.ok == (cause in MISSED), leaky


def counted(kind):
    """[leaks missed, clean twins accused] by the probe, then by the check of the source."""
    file, cases, _, function = AUDITS[kind]
    if function is None:  # a batch is no function of ids, and no code; a loss returns one number
        return [len(cases), 0, len(cases), 0]
    probed = [[probe_finds(function(each)) for each in pair] for pair in cases.values()]
    read = [[source_check_finds(each) for each in sources(Path(file.__file__), cause)] for cause in cases]
    return [count for found in (probed, read) for count in (sum(not a for a, _ in found), sum(b for _, b in found))]


def test_the_guide_counts_them():
    assert len(CASES) >= 140
    assert len({cause for _, cause in CASES}) == len(CASES)
    lines, totals = [], [0] * 7
    for kind, (_, cases, *_) in AUDITS.items():
        row = [len(cases), sum(cause in MISSED for cause in cases), 0, *counted(kind)]
        totals = [a + b for a, b in zip(totals, row, strict=True)]
        lines.append(row_of(kind, row))
    table = "\n".join([*lines, row_of("all", totals)])
    assert table in GUIDE.read_text(), table


def row_of(name, numbers):
    total, *pairs = numbers
    cells = [f"{missed} / {accused}" for missed, accused in zip(pairs[::2], pairs[1::2], strict=True)]
    return f"| {name} | {total} | {' | '.join(cells)} |"
