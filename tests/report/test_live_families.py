"""What pages show of a family of tasks: its subtasks, the merged task, the proof; each compared with what it says."""

import re

import numpy as np
import pytest

import attnflow as af
from attnflow.report.live.families import MAX_CHARACTERS, MAX_WORDS
from attnflow.tasks.derivation import named_families, with_mask
from tests.report.live_cases import do, plane, refused, session

TEXT = "the cat sat on the mat"
MERGED = {"block_two_stream": "block_two_stream(3, 2), eq. 45", "butterfly": "butterfly(6), eq. 58 corrected"}


def family(name="butterfly", text=TEXT, page=None, **message):
    return do(page or session(), "family", name=name, text=text, **message)


def derived(name, size):
    """The family and its merged task, without the page."""
    values = named_families()[name].read(family(name)["settings"])
    tasks = named_families()[name].function(
        tokens=list(range(1, size + 1)), **with_mask(named_families()[name], values)
    )
    return tasks, af.tasks.merge(tasks)


@pytest.mark.parametrize("name", sorted(named_families()))
def test_every_family_of_the_library_is_shown_as_it_is(name):
    shown = family(name)
    tasks, merged = derived(name, 6)
    assert [cell["column"] for cell in shown["merged"]] == merged.position_ids.tolist()
    assert [cell["node"] for cell in shown["merged"]] == merged.node.tolist()
    assert np.array_equal(plane(shown["tile"]), merged.task.mask.dense().numpy())
    assert len(shown["subtasks"]) == len(tasks)
    for row, task, positions in zip(shown["subtasks"], tasks, merged.positions, strict=True):
        assert [cell["position"] for cell in row["cells"]] == positions.tolist()
        assert np.array_equal(plane(row["tile"]), task.mask.dense().numpy())
        assert row["labels"] == [[label.position, label.data_index] for label in task.labels]
    assert (shown["total"], shown["leaks"], shown["pairs"]) == (0, [], [])
    assert shown["labels"] == sum(len(task.labels) for task in tasks)
    assert dict(shown["facts"])["closed form"].endswith(MERGED.get(name, ""))


@pytest.mark.parametrize("name", sorted(named_families()))
def test_the_proof_says_of_each_node_what_it_stands_for_and_what_flows_into_it(name):
    shown = family(name)
    _, merged = derived(name, 6)
    reachable = merged.task.flow.reachability()
    for number, node in enumerate(shown["nodes"]):
        assert tuple(node["positions"]) == merged.nodes[number]
        assert node["members"] == [
            [task, position]
            for task, places in enumerate(merged.positions)
            for position, of in enumerate(merged.node[places])
            if of == number
        ]
        assert node["reads"] == reachable[node["positions"]].any(dim=0).nonzero().flatten().tolist()
        made = set().union(*(merged.task.inputs[i].provenance for i in node["reads"]))
        assert set(node["data"]) == made
        assert not made & {token for _, token, _ in node["labels"]}, "a label that its node can read"
    assert sorted(label for node in shown["nodes"] for label in node["labels"]) == sorted(
        [label.position, label.data_index, label.task] for label in merged.task.labels
    )


def test_a_pair_too_many_leaks_and_the_page_says_how():
    page = session()
    merged = derived("butterfly", 6)[1].task
    shown = family(pairs=[[1, 7], [0, 0]], page=page)
    assert shown["pairs"] == [[1, 7]], "the other one was allowed already"
    mask = merged.mask | af.masks.from_edges([(1, 7)], merged.size)
    report = af.tasks.check(af.tasks.Task(merged.inputs, merged.labels, mask))
    assert shown["total"] == len(report.leaks) > 0
    for leak, said in zip(report.leaks, shown["leaks"], strict=True):
        assert (tuple(said["witness"]), said["route"]) == (leak.witness, leak.route)
        assert said["word"] == TEXT.split()[leak.label.data_index]
    for node in shown["nodes"]:
        assert [shown["leaks"][i]["position"] in node["positions"] for i in node["leaks"]] == [True] * len(
            node["leaks"]
        )
    assert plane(shown["tile"], "extra").nonzero()[0].tolist() == [1]
    assert family(page=page)["total"] == 0


def test_the_code_and_the_task_that_are_taken_away_are_what_is_shown():
    page = session()
    for name in sorted(named_families()):
        shown = family(name, page=page, pairs=[[0, 1]])
        names: dict = {}
        exec(shown["code"].replace("print(", "("), names)
        assert np.array_equal(plane(shown["tile"]), (names.get("mask") or names["merged"].task.mask).dense().numpy())
        do(page, "restore", design=shown["design"])
        assert np.array_equal(page.design.layers[0].mask.dense().numpy(), plane(shown["tile"]))
        assert page.design.tokens == tuple(cell["short"] for cell in shown["merged"])
        leaks = {(leak["position"], leak["token"]) for leak in shown["leaks"]}
        assert {(leak["position"], leak["token"]) for leak in do(page, "leaks")["leaks"]} == leaks


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"name": "os.system"}, "unknown family"),
        ({"name": 3}, "name must be text"),
        ({"text": ["a"]}, "text must be text"),
        ({"text": ""}, "1 to 32 words here, got 0"),
        ({"text": "a " * (MAX_WORDS + 1)}, "1 to 32 words here, got 33"),
        ({"text": "a" * (MAX_CHARACTERS + 1)}, "at most 2,000 characters"),
        ({"text": "a"}, "tokens"),
        ({"name": "block_two_stream", "settings": {"block": "4"}}, "block"),
        ({"name": "block_two_stream", "settings": {"block": "2; import os"}}, "must be an integer"),
        ({"name": "block_two_stream", "settings": {"depth": "2"}}, "no parameter 'depth'"),
        ({"name": "block_diffusion", "settings": {"block": "2", "masked": "random"}}, "must be integers"),
        ({"name": "permutation_lm", "settings": {"permutation": "0,1"}}, "permutation"),
        ({"settings": {"block": 2}}, "block must be text"),
        ({"settings": []}, "expected a JSON object"),
        ({"pairs": [[0]]}, "pairs[0]"),
        ({"pairs": [[0, 99]]}, "within 16 positions"),
        ({"pairs": [[0, True]]}, "expected an integer"),
        ({"pairs": [[0, 0]] * 65}, "at most 64 pairs"),
        ({"pairs": "all"}, "expected a list"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:40],
)
def test_what_cannot_be_a_family_is_refused_in_words(message, error):
    assert re.search(re.escape(error), refused(session(), "family", **{"name": "butterfly", "text": TEXT, **message}))
