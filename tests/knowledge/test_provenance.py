"""`Trace`: selection, table, CSV, JSON and figure of what `af.knowledge.trace` returns."""

import csv
import io
from dataclasses import replace

import pytest
import torch

from attnflow.knowledge.reading.provenance import LayerTrace, Promoted, Trace


def layer(number, positions=3, kept=4, effects=True, seed=0, dtype=torch.float32):
    """Random numbers, of which the last kept entry of the first position did not fire."""
    draw = torch.Generator().manual_seed(seed + number)
    ids = torch.stack([torch.randperm(20, generator=draw)[:kept] + 20 * number for _ in range(positions)])
    ids[0, -1] = -1
    heads = torch.zeros_like(ids)
    heads[ids < 0] = -1

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=dtype)

    return LayerTrace(
        number, f"layers.{number}.mlp.down_proj", 20, ids, heads, random(positions, kept),
        random(positions, kept), random(positions, kept), random(positions, kept).abs().sort(descending=True)[0],
        *(random(positions, kept) if effects else None for _ in range(2)), ids % 20, number,
        torch.randint(0, 20, (positions,), generator=draw),
        random(positions).abs(), random(positions).abs() / 9,
        random(positions) if effects else None, random(positions) if effects else None,
    )  # fmt: skip


def made(effects=True, dtype=torch.float32, **options):
    layers = tuple(layer(number, effects=effects, dtype=dtype, **options) for number in (0, 2))
    if not effects:
        return Trace(
            "tiny", (" The", " capital", " of", " x"), (0, 1, 3), layers, without="norms lie between", by="norm"
        )
    numbers = [torch.randn(3, generator=torch.Generator().manual_seed(i), dtype=dtype) for i in range(3)]
    entry = int(layers[1].ids[2, 0])
    return Trace(
        "tiny", (" The", " capital", " of", " x"), (0, 1, 3), layers, (" capital", " of", "\n"), (5, 6, 7), *numbers,
        texts={entry: "Paris | is,\n\"big\""},
        promoted=(Promoted(0, int(layers[0].ids[2, 0]), 0, (" city", "town"), ("no",)),),
    )  # fmt: skip


def test_csv_has_a_line_for_each_entry_that_fired(tmp_path):
    found, path = made(), tmp_path / "trace.csv"
    text = found.to_csv()
    assert found.save(path).read_text() == text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 2 * (3 * 4 - 1)
    one = found.layers[1]
    mine = [row for row in rows if row["layer"] == "2" and row["position"] == "3"]
    assert [int(row["entry"]) for row in mine] == one.ids[2].tolist()
    for place, row in enumerate(mine):
        for name, table in (("score", one.scores), ("weight", one.weights)):
            assert torch.tensor(float(row[name])) == table[2, place]
        assert float(row["effect"]) == pytest.approx(float(one.effects[2, place]), rel=1e-8)
    assert mine[0]["text"] == 'Paris | is,↵"big"'
    assert mine[0]["answer"] == "↵"
    plain = list(csv.DictReader(io.StringIO(made(False).to_csv())))
    assert {row["effect"] for row in plain} == {""}


def test_fired_is_ordered_and_leaves_out_what_did_not_fire():
    found = made()
    every = found.fired()
    assert len(every) == 2 * (3 * 4 - 1)
    assert [abs(one.effect) for one in every] == sorted((abs(one.effect) for one in every), reverse=True)
    by_norm = replace(found, by="norm").fired(count=5)
    assert [one.norm for one in by_norm] == sorted((one.norm for one in every), reverse=True)[:5]
    assert {one.layer for one in found.fired(layer=2)} == {2}
    assert {one.position for one in found.fired(-1)} == {3}
    assert {one.token for one in found.fired(position=1)} == {" capital"}
    assert made(False).fired(count=1)[0].norm == max(one.norm for one in made(False).fired())


def test_what_was_not_traced_is_said():
    found = made()
    for call in (lambda: found.layer(1), lambda: found.fired(layer=1), lambda: found.table(layer=1)):
        with pytest.raises(ValueError, match=r"layer must be one of the traced \[0, 2\], got 1"):
            call()
    for call in (lambda: found.row(2), lambda: found.fired(-4)):
        with pytest.raises(ValueError, match=r"position must be one of the traced \[0, 1, 3\]"):
            call()
