"""`GeometryScores`: rows, quartiles, and the forms that it is handed on in."""

import csv
import io
import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from attnflow.geometry.published import Quartiles
from attnflow.geometry.scores import full_scores, head_scores
from attnflow.geometry.table import GeometryScores, MatrixScores, rows_of
from attnflow.models.weights.families.find import Place
from attnflow.models.weights.families.rows import blocks


def row(layer, head, symmetry=0.25, directionality=-0.5, kind="self", tower="", flags=()):
    return MatrixScores(layer, head, kind, symmetry, directionality, 1.5, 1, 2, tower, f"layers.{layer}", flags)


def encoder_decoder():
    """Two encoder layers, one decoder layer with self- and cross-attention; the latter is not square."""
    rows = [row(0, "all", 0.5, 0.1, tower="encoder"), row(0, 0, tower="encoder"), row(0, 1, tower="encoder")]
    rows += [row(1, "all", 0.7, 0.3, tower="encoder"), row(1, 0, 0.0, 0.0, tower="encoder", flags=("zero",))]
    rows += [row(0, "all", 0.2, -0.4, tower="decoder")]
    rows += [row(0, "all", math.nan, -0.6, "cross", "decoder", ("not square", "discovered"))]
    return GeometryScores("org/model", tuple(rows), notes=("a remark",))


def test_rows_hold_the_scores_of_the_weights():
    query, key = torch.randn(8, 20), torch.randn(4, 20)
    query[2:4] = 0  # head 1
    source = Place(
        3, "layers.3.attention", "decoder", "self", blocks("q", 2, 4, 0, 4), blocks("k", 2, 2, 0, 2), 4, 2, False
    )
    full, heads = full_scores(query, key, 4, 2), head_scores(query, key, 4, 2)
    rows = [*rows_of(source, full, 20), *rows_of(source, heads, 20)]
    assert [r.head for r in rows] == ["all", 0, 1, 2, 3]
    assert {r.width for r in rows} == {20}
    assert {(r.layer, r.name, r.tower, r.kind) for r in rows} == {(3, "layers.3.attention", "decoder", "self")}
    assert rows[0].symmetry == full.symmetry.item()
    assert [r.directionality for r in rows[1:]] == heads.directionality.tolist()
    assert [r.outlier_columns for r in rows[1:]] == heads.outlier_columns.tolist()
    assert [r.flags for r in rows] == [(), (), ("zero",), (), ()]
    assert (rows[2].symmetry, rows[2].directionality, rows[2].norm) == (0.0, 0.0, 0.0)


def test_matrices_that_are_not_square_are_flagged():
    source = Place(0, "cross", "decoder", "cross", blocks("q", 2, 4, 0, 4), blocks("k", 2, 4, 0, 4), 4, 4, False)
    (found,) = rows_of(source, full_scores(torch.randn(8, 20), torch.randn(8, 12), 4, 4), 20)
    assert found.flags == ("not square",)
    assert math.isnan(found.symmetry)
    assert found.norm > 0


@pytest.mark.parametrize("values", [[0.3], [0.1, 0.9], [3.0, -1.0, 2.0, 5.0, 0.5]])
def test_quartiles_are_linear(values):
    found = Quartiles.of([*values, math.nan])
    assert [found.q25, found.median, found.q75] == pytest.approx(np.percentile(values, [25, 50, 75]).tolist())


def test_summaries_keep_towers_kinds_and_heads_apart():
    scores = encoder_decoder()
    keys = [(s.tower, s.kind, s.matrix, s.count, s.flagged) for s in scores.summaries]
    assert keys == [
        ("encoder", "self", "all", 2, 0),
        ("encoder", "self", "head", 3, 1),
        ("decoder", "self", "all", 1, 0),
        ("decoder", "cross", "all", 1, 1),
    ]
    encoder, heads, _, cross = scores.summaries
    assert encoder.symmetry.median == pytest.approx(0.6)
    directionality = encoder.directionality
    assert (directionality.q25, directionality.median, directionality.q75) == pytest.approx((0.15, 0.2, 0.25))
    assert heads.symmetry.median == 0.25
    assert math.isnan(cross.symmetry.median)


COLUMNS = ["model", *(field.name for field in fields(MatrixScores) if field.name not in ("in_use", "by_distance"))]


def test_csv_has_a_line_for_each_row(tmp_path):
    scores = encoder_decoder()
    text = scores.to_csv()
    assert scores.save(tmp_path / "scores.csv").read_text() == text
    lines = list(csv.DictReader(io.StringIO(text)))
    assert list(lines[0]) == COLUMNS
    assert [line["head"] for line in lines] == ["all", "0", "1", "all", "0", "all", "all"]
    assert lines[0]["model"] == "org/model"
    assert float(lines[0]["symmetry"]) == 0.5
    assert lines[6]["flags"] == "not square;discovered"
