"""Our own drawings as files: the same picture as SVG, PNG and PDF, with and without matplotlib."""

import sys

import numpy as np
import pytest

import attnflow as af
from attnflow import masks, report
from attnflow.report.svg import _figure_of, encode


def pixels(figure, dpi=96):
    figure.set_dpi(dpi)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def test_png_shows_the_relation_cell_by_cell():
    mask = masks.butterfly(5)
    markup = report.figure(mask).markup
    left, top, side = map(float, markup.split('data-box="')[1].split('"')[0].split())
    image = pixels(_figure_of(markup))
    places = [int(side * (i + 0.5)) for i in range(mask.num_queries)]
    blue = [[int(image[int(top) + y, int(left) + x, 0]) < 128 for x in places] for y in places]
    assert np.array_equal(blue, mask.dense().numpy())


def test_a_diagram_is_drawn_with_its_boxes_arrows_and_names():
    flow = af.order.analyze(masks.tree([-1, 0, 0, 1]))
    figure = _figure_of(report.figure(flow, highlight=[0, 1]).markup)
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} >= {"0", "1", "2", "3"}
    kinds = [type(patch).__name__ for patch in axes.patches]
    assert kinds.count("FancyBboxPatch") == 4 + 1  # and a badge with the layer
    assert kinds.count("PathPatch") == 2 * len(flow.hasse.edges)
    for patch in axes.patches:
        box = patch.get_window_extent()
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_equal_drawings_make_equal_files(suffix, tmp_path):
    files = [report.figure(masks.causal(8)).savefig(tmp_path / f"{n}{suffix}").read_bytes() for n in range(2)]
    assert files[0] == files[1]
    assert files[0] == encode(report.figure(masks.causal(8)), suffix)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match=r"ends in \.svg, \.png or \.pdf"):
        report.figure(masks.causal(8)).savefig(tmp_path / "x.txt")


def test_png_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(af.MissingExtra, match=r"attnflow\[report\]"):
        report.figure(masks.causal(4)).savefig(tmp_path / "mask.png")
    assert list(tmp_path.iterdir()) == []
    assert report.figure(masks.causal(4)).savefig(tmp_path / "mask.svg").exists()
