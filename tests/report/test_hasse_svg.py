"""The Hasse diagram as SVG: well-formed, complete, escaped, and honest about what it leaves out."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnflow import masks
from attnflow.order import analyze
from attnflow.report.hasse_svg import hasse_svg, runs
from tests.report.reading import parse_svg, texts, with_class
from tests.strategies import square_masks

HOSTILE = ["<script>alert(1)</script>", '" onload="x', "a\x00b\x1b[31m", "\u202eback", "\ud800", "&amp;", "]]>", ""]


def random_order(size, share, seed=0):
    table = np.tril(np.random.default_rng(seed).random((size, size)) < share, -1)
    return masks.from_dense(torch.from_numpy(table))


@settings(max_examples=80)
@given(square_masks(9), st.booleans())
def test_small_diagrams_are_complete(mask, standalone):
    hasse = analyze(mask).hasse
    root = parse_svg(hasse_svg(hasse, standalone=standalone))
    if not hasse.nodes:
        assert "empty" in " ".join(texts(root))
        return
    assert len(with_class(root, "af-node")) == len(hasse.nodes)
    assert len(with_class(root, "af-edge")) == len(hasse.edges)
    assert {"".join(node.find("title").itertext()).split(": ")[1] for node in with_class(root, "af-node")} == {
        runs(node) for node in hasse.nodes
    }
    assert (root.find("style") is not None) == standalone
    assert root.get("role") == "img"
    assert root.find("title").text


@settings(max_examples=100)
@given(square_masks(9), st.data())
def test_a_highlighted_path_is_drawn_move_by_move(mask, data):
    flow = analyze(mask)
    if not flow.size:
        return
    source, target = (data.draw(st.integers(0, flow.size - 1)) for _ in range(2))
    path = flow.path(source, target)
    root = parse_svg(hasse_svg(flow.hasse, highlight=path))
    classes = [flow.class_of(position) for position in path]
    moves = {layer: pair for layer, pair in enumerate(pairwise(classes), 1) if pair[0] != pair[1]}
    assert sorted(int(text.text) for badge in with_class(root, "af-badge") for text in badge.iter("text")) == [*moves]
    dashed = [node for node in root.iter("path") if node.get("stroke-dasharray")]
    assert len(dashed) == sum(pair not in set(flow.hasse.edges) for pair in moves.values())
    hot = [node for node in with_class(root, "af-node") if "af-hot" in node.get("class")]
    assert len(hot) == len(set(classes))


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(4096),
        masks.block_two_stream(64, 16),
        masks.butterfly(200),
        masks.big_bird(1024),
        masks.sliding_window(300, 16),
        masks.tree([-1, *np.random.default_rng(0).integers(0, np.arange(1, 1000)).tolist()]),
        random_order(500, 0.008),
    ],
    ids=["causal", "block_two_stream", "butterfly", "big_bird", "window", "tree", "random"],
)
def test_large_diagrams_are_summarised_and_say_so(mask):
    flow = analyze(mask)
    svg = hasse_svg(flow.hasse)
    root = parse_svg(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    assert len(with_class(root, "af-node")) <= 60
    assert max(width, height) < 1800
    assert len(svg) < 60_000
    caption = " ".join(text for group in with_class(root, "af-caption") for text in texts(group))
    if len(flow.classes) > 60:
        assert caption.startswith("Summarised")
        assert f"{len(flow.classes):,}".replace(",", "\u202f") + " classes" in caption
    shown = sum(
        int(re.match(r"([\d\u202f]+)", node.find("title").text.replace("Chain of ", "")).group(1).replace("\u202f", ""))
        for node in with_class(root, "af-node")
    )
    bars = sum(int(texts(band)[1].split()[0].replace("\u202f", "")) for band in with_class(root, "af-band"))
    assert shown + bars == len(flow.classes)


def test_hostile_labels_stay_text():
    labels = [*HOSTILE, "<b>", "word", "x" * 300, "日本語"]
    for mask in (masks.causal(12), masks.full(12)):
        svg = hasse_svg(analyze(mask).hasse, labels=labels)
        root = parse_svg(svg)
        svg.encode("utf-8")
        assert {node.tag for node in root.iter()} <= {"svg", "style", "title", "g", "rect", "path", "text"}
        assert not any(name.startswith("on") for node in root.iter() for name in node.keys())  # noqa: SIM118
        assert "\x00" not in svg
        assert "\u202e" not in svg
    assert any(
        "<script>alert(1)" in text
        for text in texts(parse_svg(hasse_svg(analyze(masks.causal(12)).hasse, labels=labels)))
    )


@settings(max_examples=50)
@given(st.lists(st.text(max_size=40), min_size=5, max_size=5))
def test_any_text_makes_well_formed_xml(labels):
    parse_svg(hasse_svg(analyze(masks.causal(5)).hasse, labels=labels))


def test_labels_fit_their_boxes():
    labels = ["word", "MMMMMMMM", "日本語テキスト", "😀😀😀", "iiii", "x" * 99]
    root = parse_svg(hasse_svg(analyze(masks.causal(6)).hasse, labels=labels))
    for node in with_class(root, "af-node"):
        width = float(next(node.iter("rect")).get("width"))
        first = next(node.iter("text"))
        wide = sum(2 if ord(character) > 0x2000 else 1 for character in first.text.replace("…", "."))
        assert wide * 0.602 * float(first.get("font-size")) <= width - 8


def test_wrong_arguments_are_refused():
    hasse = analyze(masks.causal(3)).hasse
    with pytest.raises(ValueError, match="a label for each of 3 positions, got 2"):
        hasse_svg(hasse, labels=["a", "b"])
    with pytest.raises(ValueError, match="positions of the diagram, got 7"):
        hasse_svg(hasse, highlight=[0, 7])
    with pytest.raises(ValueError, match="max_nodes must be at least 2"):
        hasse_svg(hasse, max_nodes=1)
