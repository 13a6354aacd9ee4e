"""The chart of a trace: both maps and the strongest entries."""

import pytest
import torch

from attnflow.report import figure
from attnflow.report.svg import encode
from tests.knowledge.test_provenance import made


@pytest.mark.parametrize("effects", [True, False])
def test_figure_shows_layers_tokens_and_entries(effects):
    pytest.importorskip("matplotlib")
    found = made(effects)
    drawn = figure(found, count=5, title="the $title")
    shares, written, bars = drawn.axes[:3]
    assert shares.images[0].get_array().shape == (2, 3)
    expected = [one.active / 20 for one in found]
    assert torch.allclose(torch.tensor(shares.images[0].get_array()), torch.stack(expected).double())
    table = [one.effect if effects else one.output_norm for one in found]
    assert torch.equal(torch.tensor(written.images[0].get_array()), torch.stack(table).double())
    strongest = found.fired(-1, count=5)
    sizes = [one.effect if effects else one.norm for one in strongest]
    assert [patch.get_width() for patch in bars.patches] == pytest.approx(sizes)
    assert [text.get_text() for text in bars.get_yticklabels()] == [f"{one.layer} · {one.entry}" for one in strongest]
    for axes in (shares, written):
        assert axes.get_ylim()[0] > axes.get_ylim()[1]  # layer 0 is at the top
    for suffix in (".png", ".svg"):
        assert len(encode(drawn, suffix)) > 5000
    with pytest.raises(ValueError, match=r"position must be one of the traced \[0, 1, 3\]"):
        figure(found, position=2)
