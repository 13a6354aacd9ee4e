"""Our own drawings as files."""

import io

import matplotlib.image
import numpy as np
import pytest

from attnflow import masks, report
from attnflow.report.svg import Svg, encode, root


def test_equal_drawings_make_equal_files(tmp_path):
    files = [report.figure(masks.causal(8)).savefig(tmp_path / f"{n}.svg").read_bytes() for n in range(2)]
    assert files[0] == files[1]
    assert files[0] == encode(report.figure(masks.causal(8)), ".svg")
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(ValueError, match=r"ends in \.svg, \.png or \.pdf, got '\.txt'"):
        report.figure(masks.causal(8)).savefig(tmp_path / "x.txt")


def test_a_drawing_carries_rules_without_comments():
    markup = report.figure(masks.causal(4)).markup
    assert "<style>:root.af-page{" in markup
    assert "/*" not in markup


def pixels(markup):
    content = encode(Svg(markup), ".png")
    return np.round(255 * matplotlib.image.imread(io.BytesIO(content))).astype(int)[..., :3]


def test_every_shape_is_painted_where_the_svg_has_it():
    """One pixel of a drawing is two of its .png; what is not covered is white."""
    shapes = (
        '<g transform="translate(10,20)" fill="#ff0000"><rect x="0" y="0" width="10" height="10"/>'
        '<g transform="translate(30,0) rotate(90)"><rect width="5" height="20" fill="#00ff00"/></g></g>'
        '<path d="M60 20h10v10h-10z M80,20L90,20L90,30Z" fill="#0000ff" fill-opacity="0.5"/>'
        '<circle cx="15" cy="55" r="5" fill="currentColor"/>'
        '<line x1="30" y1="55" x2="50" y2="55" stroke="#f0f" stroke-width="4"/>'
        '<path d="M60,60C60,50 80,50 80,60" fill="none" stroke="#0ff" stroke-width="4" stroke-dasharray="4 4"/>'
    )
    image = pixels(root(shapes, 100.0, 70.0, "shapes", title="Title"))
    assert image.shape[:2] == (2 * (70 + 28), 200)

    def at(x, y):
        return tuple(image[2 * (y + 28) + 1, 2 * x + 1])

    assert at(15, 25) == (255, 0, 0)
    assert at(25, 25) == at(35, 15) == (255, 255, 255)
    assert at(30, 22) == at(22, 22) == (0, 255, 0)  # turned clockwise
    assert at(65, 25) == at(88, 22) == (127, 127, 255)
    assert at(82, 28) == (255, 255, 255)
    assert at(15, 55) == (27, 31, 35)
    assert at(40, 55) == (255, 0, 255)
    curve = (image[2 * 78 :, 2 * 58 : 2 * 82] == (0, 255, 255)).all(axis=2).any(axis=0)
    assert np.count_nonzero(np.diff(curve)) >= 6  # dashes
    assert (image[:50] < 100).any()  # the title
