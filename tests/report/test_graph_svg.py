"""The drawing of a reasoning graph: what it shows, and that whatever a token holds stays text."""

import torch

from attnflow.report import figure
from attnflow.report.graph_svg import graph_html
from tests.bias.test_graph import BIAS, TRIANGLE, table
from tests.report.reading import Page, parse_svg, texts, with_class


def test_svg_has_a_box_for_each_token_and_an_arrow_for_each_edge():
    graph = table(BIAS, TRIANGLE, tokens=["<5>", "+", " six "]).graph(top_k=2)
    root = parse_svg(figure(graph))
    assert len(with_class(root, "af-node")) == 3
    assert len(with_class(root, "af-edge")) == 3
    assert {"<5>", "+", "six"} <= set(texts(root))
    heights = {node.find("title").text: float(node.find("rect").get("y")) for node in with_class(root, "af-node")}
    assert heights["'<5>', position 0"] > heights["'+', position 1"] > heights["' six ', position 2"]  # flows upwards
    strongest = with_class(root, "af-edge")[-1]
    assert strongest.find("title").text == "<5> → +: +2.000"
    assert figure(graph) == figure(graph)
    inside = figure(graph, standalone=False)
    assert "<style>" not in inside
    assert "af-page" not in inside


def test_large_graphs_show_their_strongest_edges():
    torch.manual_seed(0)
    n = 40
    triangle = torch.ones(1, n, n, dtype=torch.bool).tril()
    graph = table(torch.randn(n, n).tril().tolist(), triangle).graph(top_k=5)
    assert len(graph.edges) > 100
    root = parse_svg(figure(graph, max_edges=30))
    assert len(with_class(root, "af-edge")) == 30
    assert f"the 30 strongest of {len(graph.edges)} edges" in " ".join(" ".join(texts(root)).split())


def test_the_caption_says_what_is_special():
    empty = table([[0.0, 0.0], [0.0, 0.0]]).graph()
    assert "No edges" in " ".join(texts(parse_svg(figure(empty))))
    both = table([[0.0, 3.0], [1.0, 0.0]], causal=False).graph()
    assert "cycles" in " ".join(texts(parse_svg(figure(both))))


def test_html_is_whole_and_escaped():
    page = Page()
    page.feed(graph_html(table(BIAS, TRIANGLE, tokens=["<script>", "&", "b"]).graph(top_k=2)))
    assert page.open == []
    assert not any(tag == "script" for tag, _ in page.tags)
    assert "<script> (0)" in page.text
    assert "+2.000" in page.text
    assert len(list(page.of("tr"))) == 4
