"""`attnflow mask ...`: the catalogue, a mask, a task, a family of tasks; other kernels, and masks that people bring."""

import io
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attnflow as af
from attnflow.cli._arguments import example
from attnflow.masks.in_model import ModelMasks
from attnflow.masks.registry import named_masks
from attnflow.report import mask as mask_section
from attnflow.tasks import derivation


def test_text(run: Callable) -> None:
    out = run.ok("mask", "list")
    assert "sliding_window(n, window, causal=true)\n    Causal: q - window < k <= q" in out
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_json_lists_every_mask_of_the_catalogue(run: Callable) -> None:
    out = run.ok("mask", "list", "--json")
    found = json.loads(out)
    assert found["schema"] == "attnflow.mask.list/1"
    assert {mask["name"] for mask in found["masks"]} == set(named_masks())
    document = next(mask for mask in found["masks"] if mask["name"] == "document")
    assert document["signature"].startswith('document(lengths=null, inner="causal", ids=null, ')
    inner = {"name": "inner", "kind": "text", "required": False, "default": "causal", "choices": ["causal", "full"]}
    assert document["parameters"][1] == inner
    for mask in found["masks"]:
        assert mask["relation"]
        assert mask["example"].startswith(f"attnflow mask show {mask['name']} ")


def test_documents_are_given_in_any_form(run: Callable) -> None:
    forms = ["lengths=2,1", "ids=7,7,9", "position_ids=0,1,0", "cu_seqlens=0,2,3"]
    shown = [run.ok("mask", "show", "document", "--set", form, "--json") for form in forms]
    assert len(set(shown)) == 1
    assert json.loads(shown[0])["parameters"] == {"lengths": [2, 1], "inner": "causal"}


def test_a_file_stands_for_its_mask(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, spec = tmp_path / "spec.json", {"name": "causal", "parameters": {"n": 3}}
    expected = run("mask", "show", "causal", "--n", "3").out
    for content in (spec, {"inputs": [1, 2, 3], "labels": [], "mask": spec}):
        file.write_text(json.dumps(content), encoding="utf-8-sig")
        assert run("mask", "show", str(file)).out == expected
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(spec)))
    assert run("mask", "show", "-").out == expected


@pytest.mark.parametrize("name", sorted(named_masks()))
def test_every_example_shows_its_mask(run: Callable, name: str, tmp_path: Path) -> None:
    out = run.ok("mask", "show", name, *example(name).split())
    assert out.startswith(f"{name}(")
    assert max(map(len, out.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in out.splitlines())
    parameters = json.loads(run("mask", "show", name, *example(name).split(), "--json").out)["parameters"]
    file = tmp_path / "spec.json"
    file.write_text(json.dumps({"name": name, "parameters": parameters}))
    assert run("mask", "show", str(file)).out == out


def test_picture_and_numbers(run: Callable) -> None:
    out = run("mask", "show", "sliding_window", "--n", "5", "--set", "window=2").out
    assert "\n3  · · ■ ■ ·\n" in out
    assert "allowed pairs       9 of 25" in out
    assert "depth               4 layers" in out
    assert "Hasse diagram       4 edges, 5 levels" in out


def test_json(run: Callable) -> None:
    out = run.ok("mask", "show", "butterfly", "--n", "5", "--block-size", "4", "--json")
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


def test_svg_and_html(run: Callable, tmp_path: Path) -> None:
    svg, html = (tmp_path / f"mask.{kind}" for kind in ("svg", "html"))
    out = run.ok("mask", "show", "causal", "-o", str(svg))
    assert f"written             {svg}" in out
    assert ElementTree.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert json.loads(run("mask", "show", "causal", "-o", str(html), "--json").out)["name"] == "causal"
    assert html.read_text().startswith("<!doctype html>")
    assert {path.name for path in tmp_path.iterdir()} == {"mask.svg", "mask.html"}


def test_the_masks_that_a_model_uses_for_a_text(run: Callable, tiny_model: str, tmp_path: Path) -> None:
    svg, png, html = (tmp_path / f"mask.{suffix}" for suffix in ("svg", "png", "html"))
    out = run.ok("mask", "show", tiny_model, "--text", "I the of thy", "-o", str(svg))
    first, _, named, *_ = out.splitlines()
    assert first == f"{tiny_model}, 4 tokens: 1 mask"
    assert named == "layers 0, 1 attention: causal(n=4)"
    assert "thy 3  ■ ■ ■ ■" in out
    assert f"written: {svg}" in out
    assert "thy" in svg.read_text()
    found = ModelMasks.from_json(run.ok("mask", "show", tiny_model, "--ids", "5,6,7", "--json", "-o", str(png)))
    assert [(part.mask, part.layers) for part in found.masks] == [(af.masks.causal(3), (0, 1))]
    assert png.read_bytes().startswith(b"\x89PNG")
    run.ok("mask", "show", tiny_model, "--text", "I the of thy", "-o", str(html), "--json")
    assert "layers 0, 1 attention" in html.read_text()


def test_a_mask_as_a_picture_for_a_paper(run: Callable, tmp_path: Path) -> None:
    for suffix, start in ((".png", b"\x89PNG"), (".pdf", b"%PDF")):
        run.ok("mask", "show", "causal", "--n", "5", "-o", str(tmp_path / f"mask{suffix}"))
        assert (tmp_path / f"mask{suffix}").read_bytes().startswith(start)


def write_task(folder: Path, spec: object) -> str:
    file = folder / "task.json"
    file.write_text(json.dumps(spec))
    return str(file)


def next_token(mask: object, n: int = 4) -> dict[str, object]:
    labels = [{"position": i, "target": {"id": 10 + i + 1, "position": i + 1}} for i in range(n - 1)]
    return {"inputs": [10 + i for i in range(n)], "labels": labels, "mask": mask}


def test_a_task_that_is_clean(run: Callable, tmp_path: Path) -> None:
    file = write_task(tmp_path, next_token({"name": "causal", "parameters": {"n": 4}}))
    out = run.ok("mask", "check", file)
    assert out.startswith("no label leaks within any number of layers\n")
    assert "dead positions: [3]" in out


def test_leak_with_its_path_and_its_layers(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two layers are needed: 0 reads 1 reads 2 ... but the label of 1 is token 2, one layer away.
    file = write_task(tmp_path, next_token({"edges": [[0, 2], [2, 1]], "num_queries": 4}))
    code, out, err = run("mask", "check", file)
    assert (code, err) == (1, "")
    assert "labels leak" in out or "label leaks" in out
    assert "layer 1: 1 -> 2, layer 2: 2 -> 0" in out
    assert "Traceback" not in err
    found = json.loads(run("mask", "check", file, "--json").out)
    assert found["attnflow"] == "LeakReport"
    assert not found["ok"]
    assert [leak["witness"] for leak in found["leaks"]] == [[1, 2, 0]]
    assert run("mask", "check", file, "--layers", "1").code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(Path(file).read_text()))
    assert run("mask", "check", "-", "--layers", "2").code == 1


def test_tasks_that_the_package_writes(run: Callable, tmp_path: Path) -> None:
    merged = af.tasks.merge(af.tasks.butterfly([5, 6, 7, 8]))
    file = write_task(tmp_path, merged.task.to_dict())
    assert run("mask", "check", file).code == 0
    out = run.ok("mask", "show", file, "--json")
    assert json.loads(out)["allowed_pairs"] == af.masks.butterfly(4).nnz


@pytest.mark.parametrize(
    ("arguments", "size", "nodes"),
    [
        (["causal_lm", "--tokens", "9"], 8, 8),
        (["multi_token_prediction", "--tokens", "9", "--set", "horizon=3"], 8, 8),
        (["block_two_stream", "--tokens", "12", "--set", "block=3"], 18, 6),
        (["block_two_stream", "--tokens", "12", "--set", "block=3", "--set", "predict_first=true"], 21, 7),
        (["butterfly", "--tokens", "7"], 19, 19),
        (["block_diffusion", "--tokens", "12", "--set", "block=3"], 21, 7),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_family_merges_to_its_closed_form(run: Callable, arguments: list[str], size: int, nodes: int) -> None:
    code, out, err = run("mask", "merge", *arguments, "--json")
    found = json.loads(out)
    assert (code, err, found["schema"], found["ok"]) == (0, "", "attnflow.mask.merge/1", True)
    assert (len(found["task"]["inputs"]), found["nodes"], found["is_minimal"]) == (size, nodes, True)
    assert (found["equals_closed_form"], found["check"]["ok"]) == (True, True)
    out = run.ok("mask", "merge", *arguments)
    assert "the least possible" in out
    assert "leaks           none: proved for any number of layers" in out
    assert f"closed form     equal to {found['closed_form']}" in out


def test_a_family_without_a_formula_and_its_picture(run: Callable, tmp_path: Path) -> None:
    arguments = ["block_diffusion", "--tokens", "12", "--set", "block=3", "--set", "masked=0,4"]
    code, out, _ = run("mask", "merge", *arguments, "--json")
    found = json.loads(out)
    assert (code, found["closed_form"], found["equals_closed_form"]) == (0, None, None)
    target = tmp_path / "merged.svg"
    out = run("mask", "merge", *arguments, "-o", str(target)).out
    assert "closed form     the paper gives none" in out
    assert f"written         {target}" in out
    assert target.read_text().startswith("<svg")


def test_a_difference_from_the_formula_is_a_finding(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = ("butterfly as printed", af.tasks.families.butterfly_as_printed(6))
    monkeypatch.setattr(derivation, "_closed_form", lambda *_: printed)
    code, out, _ = run("mask", "merge", "butterfly", "--tokens", "6")
    assert code == 1
    assert "closed form     DIFFERENT from butterfly as printed" in out


@pytest.mark.parametrize("to", sorted(af.masks.export.FORMATS))
def test_every_format(run: Callable, to: str, tmp_path: Path) -> None:
    mask = af.masks.causal(6)
    out = run.ok("mask", "export", "causal", "--n", "6", "--to", to, "--json")
    assert af.masks.from_json(out) == mask
    assert json.loads(out) == json.loads(af.masks.export.FORMATS[to](mask).to_json())
    file = tmp_path / "mask.json"
    file.write_text(out)
    assert json.loads(run("mask", "debug", str(file), "--json").out)["same_as"] == "causal(n=6)"


def test_a_refusal_is_a_finding(run: Callable) -> None:
    code, out, err = run("mask", "export", "butterfly", "--n", "6", "--to", "flashmask", "--json")
    assert (code, err) == (1, "")
    refusal = json.loads(out)
    query, key = refusal["pair"]
    assert refusal["schema"] == "attnflow.mask.export.refused/1"
    assert refusal["allowed"] == af.masks.butterfly(6).allows(query, key)


def test_a_mask_upside_down(run: Callable, tmp_path: Path) -> None:
    file = tmp_path / "mask.pt"
    torch.save(~af.masks.causal(8).dense(), file)
    code, out, err = run("mask", "debug", str(file))
    assert (code, err) == (1, "")
    assert "inverted        its complement is causal(n=8)" in out
    assert run("mask", "debug", str(file), "--masked-true").code == 0
