import json
from collections.abc import Callable

from attnflow.masks.spec import named_masks


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
