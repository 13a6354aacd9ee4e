"""A record holds what a session answers, and nothing that has no room."""

import base64
import json
import zlib

import numpy as np
import pytest

from attnflow import masks
from attnflow.order import analyze
from attnflow.report import page
from attnflow.report.live.design import design_for
from attnflow.report.live.session import Session, record
from attnflow.tasks import Task
from tests.report.live_cases import do, plane
from tests.report.reading import parse_page
from tests.report.test_page import leaking_task


def made(subject, labels=None):
    """The design and the record that a page of it holds."""
    [place] = [each for _, each in parse_page(page(subject, labels=labels).html).tags if "data-record" in each]
    flow = subject.flow if isinstance(subject, Task) else subject
    design = design_for(subject if isinstance(subject, Task) else flow, labels)
    return design, json.loads(zlib.decompress(base64.urlsafe_b64decode(place["data-record"])))


def arrivals(content):
    n = content["state"]["size"]
    return np.frombuffer(base64.b64decode(content["arrivals"]), np.uint8).reshape(n, n)


def test_it_answers_as_a_session_does():
    task = leaking_task()
    task = Task(task.inputs, task.labels, task.masks[0])
    design, content = made(task, labels=list("abcde"))
    session = Session(design)
    for op in ("flow", "diagram", "leaks"):
        assert content[op] == json.loads(json.dumps(do(session, op)))
    assert content["leaks"]["total"] == 1
    assert content["state"]["tokens"] == list("abcde")
    assert np.array_equal(plane(content["tile"][0]), task.masks[0].dense().numpy())
    for position in range(5):
        row = np.full(5, 255)
        for first, last, layer in do(session, "field", position=position)["runs"]:
            row[first:last] = layer
        assert np.array_equal(arrivals(content)[position], row)


def test_a_stack_holds_each_distinct_mask_once():
    first, second = masks.causal(9), masks.sliding_window(9, 2)
    _, content = made(analyze([first, second, first]))
    assert content["distinct"] == [0, 1, 0]
    for tile, mask in zip(content["tile"], (first, second), strict=True):
        assert np.array_equal(plane(tile), mask.dense().numpy())
    assert len(content["cost"]) == 2


@pytest.mark.parametrize("mask", [masks.causal(1024), masks.sliding_window(256, 16), masks.big_bird(1024)], ids=repr)
def test_records_are_short(mask):
    design, content = made(analyze(mask))
    assert len(record(design)) < 32_000
    assert ("arrivals" in content) == (mask.num_queries <= 512)
    assert content["tile"][0]["step"] == 1
