"""The operations of a page: each changes what it says, is undone, and comes back from plain data."""

import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow import masks
from attnflow.masks.registry import named_masks
from attnflow.report.live.design import Design
from attnflow.report.live.session import Session
from tests.report.live_cases import do, plane, refused, session


def test_the_blocks_are_those_of_the_layer():
    page = session()
    counted = mask_of(page).block_sparsity()
    reply = do(page, "blocks")
    assert {name: reply[name] for name in ("block", "full", "partial", "empty", "used", "total", "skipped")} == {
        **asdict(counted),
        "total": counted.total,
        "skipped": counted.skipped,
    }


def mask_of(session, layer=0):
    return session.design.layers[layer].mask


@pytest.mark.parametrize("name", sorted(named_masks()))
def test_every_mask_of_the_catalogue_is_picked_by_what_people_type(name):
    page = session({"name": "causal", "parameters": {"n": 16}})
    do(page, "pick", name=name, settings=dict(named_masks()[name].example))
    entry = named_masks()[name]
    values = entry.read(named_masks()[name].example)
    if "n" not in values and any(parameter.name == "n" for parameter in entry.parameters):
        values["n"] = 16
    assert mask_of(page) == entry.function(**values)


def test_the_algebra():
    page = session()
    causal = mask_of(page)
    do(page, "combine", sign="and", name="sliding_window", settings={"window": "3", "causal": "false"})
    assert mask_of(page) == causal & masks.sliding_window(8, 3, causal=False)
    do(page, "combine", sign="or", name="global_tokens", settings={"indices": "0"})
    expected = causal & masks.sliding_window(8, 3, causal=False) | masks.global_tokens(8, [0])
    assert mask_of(page) == expected
    do(page, "invert")
    assert mask_of(page) == ~expected
    do(page, "invert")
    assert mask_of(page) == expected
    assert "not" not in page.design.layers[0].spec


strokes = st.lists(
    st.tuples(*[st.integers(0, 7)] * 4, st.integers(0, 1)).map(
        lambda t: [min(t[:2]), max(t[:2]) + 1, min(t[2:4]), max(t[2:4]) + 1, t[4]]
    ),
    min_size=1,
    max_size=6,
)


@given(st.lists(strokes, min_size=1, max_size=4))
@settings(max_examples=40)
def test_painting_is_what_a_brush_does_to_a_table(batches):
    page, table = session(), masks.causal(8).dense().numpy().copy()
    for batch in batches:
        do(page, "paint", strokes=batch)
        for first_query, last_query, first_key, last_key, allow in batch:
            table[first_query:last_query, first_key:last_key] = allow
    assert np.array_equal(mask_of(page).dense().numpy(), table)
    again = Design.from_dict(json.loads(json.dumps(page.design.to_dict())))
    assert again.layers[0].mask == mask_of(page)


def test_a_stack_has_a_mask_for_each_layer_and_its_product_flows():
    page = session()
    do(page, "pick", name="sliding_window", settings={"window": "2"})
    reply = do(page, "stack")
    assert (reply["stacked"], len(reply["layers"])) == (True, 2)
    do(page, "pick", layer=1, name="full")
    flow = do(page, "flow")
    assert (flow["num_layers"], flow["depth"]) == (2, 2 if not page.design.flow.is_dense else 1)
    assert not do(page, "unstack", layer=1)["stacked"]
    assert refused(page, "unstack", layer=0) == "the only mask of a design cannot be removed"


def test_undo_and_redo_go_through_every_design():
    page = session()
    designs = [page.design]
    for name, typed in (("full", {}), ("sliding_window", {"window": "2"}), ("prefix_lm", {"prefix": "3"})):
        do(page, "pick", name=name, settings=typed)
        designs.append(page.design)
    for expected in reversed(designs[:-1]):
        reply = do(page, "undo")
        assert page.design is expected
    assert (reply["undo"], reply["redo"]) == (None, "pick")
    assert refused(page, "undo") == "there is nothing to undo"
    for expected in designs[1:]:
        do(page, "redo")
        assert page.design is expected
    do(page, "undo")
    do(page, "invert")
    assert refused(page, "redo") == "there is nothing to redo"


def test_labels_leak_with_a_witness_and_stop_when_the_input_is_masked():
    page = session()
    do(page, "labels", kind="own")
    found = do(page, "leaks")
    assert (found["labels"], found["total"]) == (8, 8)
    for position in range(8):
        do(page, "source", position=position, tokens=[])
    assert do(page, "leaks")["total"] == 0
    do(page, "labels", kind="next")
    do(page, "source", position=0, tokens=[1])
    found = do(page, "leaks")
    assert [(leak["position"], leak["token"], list(leak["witness"])) for leak in found["leaks"]] == [(0, 1, [0])]
    do(page, "label", position=0, token=1)
    assert do(page, "leaks")["total"] == 0
    do(page, "labels", kind="none")
    assert do(page, "leaks")["labels"] == 0


def test_a_file_of_a_mask_or_of_a_task_is_data():
    page = session()
    do(page, "load", text='{"dense": ["10", "11"]}')
    assert mask_of(page) == masks.causal(2)
    task = af.tasks.merge(af.tasks.butterfly([5, 6, 7])).task
    do(page, "load", text=json.dumps(task.to_dict()))
    assert do(page, "leaks")["total"] == len(af.tasks.check(task).leaks) == 0
    assert page.design.task.mask == task.mask
    assert do(page, "leaks")["labels"] == len(task.labels)


def test_a_design_comes_back_from_its_link():
    page = session()
    do(page, "pick", name="sliding_window", settings={"window": "3"})
    do(page, "paint", strokes=[[0, 2, 4, 6, 1]])
    do(page, "labels", kind="next")
    do(page, "source", position=2, tokens=[1, 3])
    state = do(page, "tokens", text="the cat sat on the mat and purred")
    other = session()
    do(other, "restore", design=json.loads(state["design"]))
    assert other.design == page.design
    assert mask_of(other) == mask_of(page)


@pytest.mark.parametrize("size", [1, 7, 8, 63, 200])
def test_tiles_are_the_pairs_of_their_window(size):
    page = session({"name": "sliding_window", "parameters": {"n": size, "window": 5}})
    table = mask_of(page).dense().numpy()
    whole = do(page, "tile", first_query=0, first_key=0, span=size, cells=size)
    assert np.array_equal(plane(whole), table)
    first = size // 3
    part = do(page, "tile", first_query=first, first_key=0, span=5, cells=16)
    assert np.array_equal(plane(part), table[first : first + 5, :5])


@pytest.mark.parametrize(("size", "cells"), [(200, 64), (63, 10), (1000, 128)])
def test_coarse_tiles_say_full_and_empty_exactly(size, cells):
    page = session({"name": "block_causal", "parameters": {"n": size, "block": 1}})
    do(page, "paint", strokes=[[0, 3, size - 3, size, 1]])
    reply = do(page, "tile", first_query=0, first_key=0, span=size, cells=cells)
    step, table = reply["step"], mask_of(page).dense().numpy()
    content = plane(reply)
    for row in range(reply["rows"]):
        for column in range(reply["columns"]):
            block = table[row * step : (row + 1) * step, column * step : (column + 1) * step]
            value = content[row, column]
            assert (value == 0, value == 255) == (not block.any(), block.all())


@pytest.mark.parametrize("spec", [
    {"name": "sliding_window", "parameters": {"n": 9, "window": 3}},
    {"name": "tree", "parameters": {"parents": [-1, 0, 0, 1, 1, 2]}},
    {"name": "permutation_lm", "parameters": {"permutation": [2, 0, 3, 1]}},
    {"dense": ["0100", "0010", "0001", "1000"]},
])  # fmt: skip
def test_arrivals_are_the_layers_of_receptive_fields(spec):
    page = session(spec)
    flow, n = page.design.flow, page.design.size
    for position in range(n):
        runs = do(page, "field", position=position)["runs"]
        first = {key: layers for start, end, layers in runs for key in range(start, end)}
        for layers in range(n + 1):
            expected = flow.receptive_field(position, layers).tolist()
            assert sorted(key for key, when in first.items() if when <= layers) == expected


@pytest.mark.parametrize("case", [
    {"name": "causal", "parameters": {"n": 5}},
    {"and": [{"name": "causal", "parameters": {"n": 5}}, {"not": {"name": "sliding_window",
     "parameters": {"n": 5, "window": 2}}}]},
    {"or": [{"dense": ["100", "110", "111"]}, {"name": "global_tokens", "parameters": {"n": 3, "indices": [0]}}]},
])  # fmt: skip
def test_the_code_makes_the_masks(case, capsys):
    page = session(case)
    do(page, "paint", strokes=[[0, 2, 1, 3, 1], [1, 2, 0, 1, 0]])
    do(page, "paint", strokes=[[2, 3, 2, 3, 0]])
    do(page, "labels", kind="next")
    do(page, "source", position=1, tokens=[])
    names: dict[str, object] = {}
    written = do(page, "code")
    exec(written["attnflow"], names)
    assert names["mask"] == mask_of(page)
    leaks = do(page, "leaks")["total"]
    assert re.search(r"no label leaks" if not leaks else r"labels? leaks?", capsys.readouterr().out)
    compile(written["flex"], "flex", "exec")
    do(page, "stack")
    do(page, "invert", layer=1)
    exec(do(page, "code")["attnflow"], names)
    assert [names["layer_0"], names["layer_1"]] == [layer.mask for layer in page.design.layers]


REFUSED = [
    ({"op": "eval", "code": "1"}, "unknown operation 'eval'"),
    ({"op": None}, "unknown operation"),
    ({"op": "__init__"}, "unknown operation"),
    ({"op": "_tile"}, "unknown operation"),
    ({"op": "pick", "name": "os.system"}, "unknown mask"),
    ({"op": "pick", "name": "__import__", "settings": {}}, "unknown mask"),
    ({"op": "pick", "name": "causal", "settings": {"n": "8; import os"}}, "must be an integer"),
    ({"op": "pick", "name": "causal", "settings": {"n": ["8"]}}, "n must be text"),
    ({"op": "pick", "name": "causal", "settings": {"n": "131073"}}, "expected 1 to 131,072 positions"),
    ({"op": "pick", "name": "causal", "settings": {"n": "999999999999"}}, "at most"),
    ({"op": "pick", "name": "causal", "settings": {"n": "0"}}, "expected 1 to 131,072 positions"),
    ({"op": "pick", "layer": 3, "name": "full"}, "layer must lie in"),
    ({"op": "pick", "layer": True, "name": "full"}, "layer: expected an integer"),
    ({"op": "paint", "strokes": [[0, 1, 0, 1, 2]]}, "0 or 1"),
    ({"op": "paint", "strokes": [[0, 9, 0, 1, 1]]}, "within 8 positions"),
    ({"op": "paint", "strokes": []}, "at least one stroke"),
    ({"op": "paint"}, "expected a list"),
    ({"op": "load", "text": "../../etc/passwd"}, "is not JSON"),
    ({"op": "load", "text": '{"name": "causal", "parameters": {"n": 1e400}}'}, "expected an integer"),
    ({"op": "load", "text": '{"edges": [], "num_queries": 2, "num_keys": 3}'}, "as many queries as keys"),
    ({"op": "load", "text": "[" * 100_000}, "nested too deeply"),
    ({"op": "restore", "design": {"layers": []}}, "expected one"),
    ({"op": "restore", "design": {"layers": [{"mask": {"dense": ["1"]}}], "tokens": [1]}}, "expected texts"),
    ({"op": "restore", "design": {"layers": [{"mask": {"dense": ["1"]}}], "labels": [[0, 1]]}}, "positions in"),
    ({"op": "tile", "first_query": 8, "first_key": 0, "span": 1, "cells": 1}, "at most 7"),
    ({"op": "tile", "first_query": 0, "first_key": 0, "span": 8, "cells": 100_000}, "cells must be at most"),
    ({"op": "field", "position": 8}, "at most 7"),
    ({"op": "source", "position": 0, "tokens": [8]}, "must lie in"),
    ({"op": "export", "format": "__class__"}, "unknown operation"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "error"), REFUSED, ids=[error for _, error in REFUSED])
def test_mistakes_are_answered_and_change_nothing(message, error):
    page = session()
    design = page.design
    reply = page.handle({"id": 7, **message})
    assert (reply["ok"], reply["id"]) == (False, 7)
    assert error in reply["error"]
    assert page.design is design


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
), st.sampled_from([*Session(session().design)._questions, "pick", "combine", "paint", "label", "source", "tokens",
                    "load", "restore", "stack", "unstack", "undo", "redo", "labels", "invert"]))  # fmt: skip
@settings(max_examples=300)
def test_whatever_a_page_sends_is_answered(value, op):
    page = session()
    for message in ({"op": op, **(value if isinstance(value, dict) else {"layer": value})},
                    {"op": op, "name": value, "text": value, "position": value, "strokes": value, "design": value},
                    {"op": op, "name": "causal", "settings": value}):  # fmt: skip
        reply = page.handle(message)
        json.dumps(reply, allow_nan=False)


def test_nothing_of_a_page_opens_a_file(tmp_path):
    """Whatever text stands where: no path is opened while a page is answered."""
    import sys

    opened: list[str] = []
    watching = [True]

    def hook(event, arguments):
        if watching[0] and event in ("open", "os.listdir", "os.scandir", "subprocess.Popen", "os.system", "compile"):
            opened.append(f"{event} {arguments[0]!r}")

    page, secret = session(), tmp_path / "secret.json"
    secret.write_text('{"dense": ["1"]}')
    for op in ("state", "catalogue", "flow", "diagram", "leaks", "blocks", "code"):
        do(page, op)  # what is imported on first use
    sys.addaudithook(hook)
    try:
        for text in (str(secret), f"file://{secret}", "@" + str(secret)):
            for message in ({"op": "pick", "name": text}, {"op": "load", "text": text}, {"op": "tokens", "text": text},
                            {"op": "restore", "design": text},
                            {"op": "load", "text": json.dumps({"name": text})},
                            {"op": "load", "text": json.dumps({"attnflow": text})},
                            {"op": "load", "text": json.dumps({"attnflow": "FlashMask", "path": text})}):  # fmt: skip
                page.handle(message)
    finally:
        watching[0] = False
    assert opened == []
