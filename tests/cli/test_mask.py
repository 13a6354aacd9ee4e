"""`attnflow mask list` and `mask show`: the catalogue, a mask in text, JSON and files, files in place of names."""

import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

import attnflow as af
from attnflow.cli._arguments import EXAMPLES, mask_argument
from attnflow.cli._output import BadUsage
from attnflow.masks.spec import mask_from_dict, named_masks
from attnflow.report import mask as mask_section


def test_text(run: Callable) -> None:
    code, out, err = run("mask", "list")
    assert (code, err) == (0, "")
    assert "sliding_window(n, window, causal=true)\n    Causal: q - window < k <= q" in out
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_json_lists_every_mask_of_the_catalogue(run: Callable) -> None:
    code, out, err = run("mask", "list", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "attnflow.mask.list/1"
    assert {mask["name"] for mask in found["masks"]} == set(named_masks())
    document = next(mask for mask in found["masks"] if mask["name"] == "document")
    assert document["signature"] == 'document(lengths, inner="causal")'
    assert document["parameters"][1] == {
        "name": "inner",
        "kind": "text",
        "required": False,
        "default": "causal",
        "choices": ["causal", "full"],
    }
    for mask in found["masks"]:
        assert mask["relation"]
        assert mask["example"].startswith(f"attnflow mask show {mask['name']} ")


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_every_catalogue_mask_is_made_by_its_example(name: str) -> None:
    words = EXAMPLES[name].split()
    n = int(words[words.index("--n") + 1]) if "--n" in words else None
    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    mask = mask_argument(name, n, settings)
    assert mask.name == name
    spec = {"name": name, "parameters": json.loads(json.dumps(dict(mask.parameters)))}
    assert mask_from_dict(spec) == mask


def test_examples_name_catalogue_masks_only() -> None:
    assert set(EXAMPLES) == set(named_masks())


def test_typed_values_reach_the_mask() -> None:
    mask = mask_argument("sliding_window", 9, ["window=3", "causal=False"])
    assert mask == af.masks.sliding_window(9, 3, causal=False)
    assert mask_argument("document", None, ["lengths=[2, 1]", "inner=full"]) == af.masks.document([2, 1], "full")
    assert mask_argument("document", None, ["lengths="]) == af.masks.document([])
    assert mask_argument("tree", None, ["parents=-1,0"]) == af.masks.tree([-1, 0])
    assert mask_argument("causal", None, []) == af.masks.causal(16)
    assert mask_argument("full", 3, ["num_keys=5"]).shape == (3, 5)


def test_a_file_stands_for_its_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"name": "causal", "parameters": {"n": 3}}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8-sig")
    assert mask_argument(str(file), None, []) == af.masks.causal(3)
    file.write_text(json.dumps({"inputs": [1, 2, 3], "labels": [], "mask": spec}))
    assert mask_argument(str(file), None, []) == af.masks.causal(3)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(spec)))
    assert mask_argument("-", None, []) == af.masks.causal(3)
    with pytest.raises(BadUsage, match="belong to masks of the catalogue"):
        mask_argument(str(file), 3, [])


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
        "schema": "attnflow.mask.show/1",
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


def test_a_bare_format_names_the_file_after_the_mask(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("mask", "show", "causal", "-o", "svg")
    assert code == 0
    assert "causal.svg" in out
    assert (tmp_path / "causal.svg").read_text().startswith("<svg")
