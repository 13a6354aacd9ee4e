"""The drawing of a reasoning graph: what it shows, and that whatever a token holds stays text."""

import torch

from attnflow.report import figure, page
from attnflow.report.bias import STRONGEST
from tests.bias.test_graph import BIAS, TRIANGLE, table
from tests.report.reading import parse_page, parse_svg, texts, with_class


def test_svg_has_a_box_for_each_token_and_an_arrow_for_each_edge():
    graph = table(BIAS, TRIANGLE, tokens=["<5>", "+", " six "]).graph(top_k=2)
    root = parse_svg(figure(graph).markup)
    assert len(with_class(root, "af-node")) == 3
    assert len(with_class(root, "af-edge")) == 3
    assert {"<5>", "+", "six"} <= set(texts(root))
    heights = {node.find("title").text: float(node.find("rect").get("y")) for node in with_class(root, "af-node")}
    assert heights["'<5>', position 0"] > heights["'+', position 1"] > heights["' six ', position 2"]  # flows upwards
    assert {"2.00", "1.00", "0.50"} <= set(texts(root))  # each arrow carries its bias
    strongest = with_class(root, "af-edge")[-1]
    assert strongest.find("title").text == "<5> → +: +2.000"
    assert figure(graph) == figure(graph)
    inside = figure(graph, standalone=False).markup
    assert "<style>" not in inside
    assert "af-page" not in inside


def test_large_graphs_show_their_strongest_edges():
    torch.manual_seed(0)
    n = 40
    triangle = torch.ones(1, n, n, dtype=torch.bool).tril()
    graph = table(torch.randn(n, n).tril().tolist(), triangle).graph(top_k=5)
    assert len(graph.edges) > 100
    assert len(with_class(parse_svg(figure(graph).markup), "af-edge")) == STRONGEST
    root = parse_svg(figure(graph, max_edges=30).markup)
    assert len(with_class(root, "af-edge")) == 30
    assert f"the 30 strongest of {len(graph.edges)} edges" in " ".join(" ".join(texts(root)).split())


def test_the_caption_says_what_is_special():
    empty = table([[0.0, 0.0], [0.0, 0.0]]).graph()
    assert "No edges" in " ".join(texts(parse_svg(figure(empty).markup)))
    both = table([[0.0, 3.0], [1.0, 0.0]], causal=False).graph()
    assert "cycles" in " ".join(texts(parse_svg(figure(both).markup)))


def test_a_page_has_the_drawing_and_the_edges():
    made = page(table(BIAS, TRIANGLE, tokens=["<script>", "&", "b"]).graph(top_k=2))
    read = parse_page(made.html)
    assert len(read.of("script")) == 1
    assert "<script> (0)" in read.text
    assert "+2.00" in read.text
    assert len(list(read.of("tr"))) == 4
    assert [section.name for section in made.sections] == ["graph"]
