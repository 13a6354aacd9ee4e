"""Our own drawings as files."""

import pytest

from attnflow import masks, report
from attnflow.report.svg import encode


def test_equal_drawings_make_equal_files(tmp_path):
    files = [report.figure(masks.causal(8)).savefig(tmp_path / f"{n}.svg").read_bytes() for n in range(2)]
    assert files[0] == files[1]
    assert files[0] == encode(report.figure(masks.causal(8)), ".svg")
    assert len(list(tmp_path.iterdir())) == 2
    for suffix in (".txt", ".png"):
        with pytest.raises(ValueError, match=rf"ends in \.svg, as masks and diagrams are drawn, got '{suffix}'"):
            report.figure(masks.causal(8)).savefig(tmp_path / f"x{suffix}")
