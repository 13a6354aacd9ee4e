import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

import attnflow as af
from attnflow.cli._arguments import EXAMPLES
from attnflow.report import mask as mask_section


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_run(run: Callable, name: str) -> None:
    code, out, err = run("mask", "show", name, *EXAMPLES[name].split())
    assert (code, err) == (0, "")
    assert out.startswith(f"{name}(")
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_picture_and_numbers(run: Callable) -> None:
    out = run("mask", "show", "sliding_window", "--n", "5", "--set", "window=2").out
    assert "\n3  · · ■ ■ ·\n" in out
    assert "allowed pairs   9 of 25" in out
    assert "depth           4 layers" in out
    assert "Hasse diagram   4 edges, 5 levels" in out


def test_json(run: Callable) -> None:
    code, out, err = run("mask", "show", "butterfly", "--n", "5", "--block-size", "4", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    mask = af.masks.butterfly(5)
    flow = af.order.analyze(mask)
    assert found == {
        "attnflow": "MaskSummary",
        "version": 1,
        "name": "butterfly",
        "parameters": {"n": 5},
        "num_queries": 13,
        "num_keys": 13,
        "allowed_pairs": mask.nnz,
        "density": pytest.approx(mask.density),
        "order": {
            "depth": 1,
            "is_dense": True,
            "num_classes": 13,
            "largest_class": 1,
            "num_hasse_edges": len(flow.hasse.edges),
            "num_levels": max(flow.hasse.levels) + 1,
        },
        "no_order": None,
        "blocks": [found["blocks"][0]],
    }
    blocks = mask.block_mask(4)
    counts = (int(blocks.full_kv_num_blocks.sum()), int(blocks.kv_num_blocks.sum()))
    assert (found["blocks"][0]["full"], found["blocks"][0]["partial"]) == counts
    assert sum(found["blocks"][0][kind] for kind in ("full", "partial", "empty")) == 16


@pytest.mark.parametrize("n", ["0", "1"])
def test_tiny(run: Callable, n: str) -> None:
    assert run("mask", "show", "causal", "--n", n).code == 0
    assert json.loads(run("mask", "show", "causal", "--n", n, "--json").out)["num_keys"] == int(n)


def test_masks_without_an_order_say_why(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    out = run("mask", "show", "full", "--n", "3", "--set", "num_keys=5").out
    assert "order           none: queries and keys are different sequences" in out
    monkeypatch.setattr(mask_section, "LARGEST_ORDER", 8)
    found = json.loads(run("mask", "show", "causal", "--n", "9", "--json").out)
    assert found["order"] is None
    assert found["no_order"] == "the order is not computed above 8 positions"


def test_a_file_in_place_of_the_name(run: Callable, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"dense": ["100", "110", "101"]}))
    code, out, _ = run("mask", "show", str(file), "--json")
    assert code == 0
    assert json.loads(out)["allowed_pairs"] == 5


def test_svg_png_and_html(run: Callable, tmp_path: Path) -> None:
    svg, png, html = (tmp_path / f"mask.{kind}" for kind in ("svg", "png", "html"))
    code, out, _ = run("mask", "show", "causal", "-o", str(svg))
    assert code == 0
    assert f"written         {svg}" in out
    assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert json.loads(run("mask", "show", "causal", "-o", str(png), "--json").out)["name"] == "causal"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert run("mask", "show", "causal", "-o", str(html)).code == 0
    assert html.read_text().startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"mask.svg", "mask.png", "mask.html"}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("mask.gif", "the name must end in .svg or .png or .html, got '.gif'"),
        ("mask", "the name must end in"),
        ("none/mask.svg", "there is no folder"),
        ("folder.svg", "it exists and is not a plain file"),
    ],
)
def test_bad_outputs_write_nothing(run: Callable, tmp_path: Path, output: str, message: str) -> None:
    (tmp_path / "folder.svg").mkdir()
    code, out, err = run("mask", "show", "causal", "-o", str(tmp_path / output))
    assert (code, out) == (2, "")
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_a_failed_write_leaves_the_old_file(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "mask.svg"
    target.write_text("old")

    def full_disk(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(af.report, "figure", full_disk)
    code, out, err = run("mask", "show", "causal", "-o", str(target))
    assert (code, out) == (2, "")
    assert err == f"attnflow: {target}: No space left on device\n"
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["mask.svg"]


def test_a_link_is_followed_and_kept(run: Callable, tmp_path: Path) -> None:
    real, link = tmp_path / "real.svg", tmp_path / "link.svg"
    real.write_text("old")
    link.symlink_to(real)
    assert run("mask", "show", "causal", "-o", str(link)).code == 0
    assert link.is_symlink()
    assert real.read_text().startswith("<svg")


def test_a_bare_format_names_the_file_after_the_mask(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("mask", "show", "causal", "-o", "svg")
    assert code == 0
    assert "causal.svg" in out
    assert (tmp_path / "causal.svg").read_text().startswith("<svg")
