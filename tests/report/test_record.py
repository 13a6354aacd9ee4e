"""A record holds what a session answers, and nothing that has no room."""

import base64
import json
import zlib

import numpy as np
import pytest

from attnflow import masks
from attnflow.order import analyze
from attnflow.report.live.session import Session, record, recorded_design
from attnflow.tasks import Task
from tests.report.live_cases import do, plane
from tests.report.test_page import leaking_task


def made(subject, task=None, labels=None):
    design = recorded_design(analyze(subject) if task is None else task.flow, task, labels)
    assert design is not None
    text = record(design)
    assert text is not None
    return design, json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))


def arrivals(content):
    n = content["state"]["size"]
    return np.frombuffer(base64.b64decode(content["arrivals"]), np.uint8).reshape(n, n)


def test_it_answers_as_a_session_does():
    task = leaking_task()
    task = Task(task.inputs, task.labels, task.masks[0])
    design, content = made(None, task, labels=list("abcde"))
    page = Session(design)
    for op in ("flow", "diagram", "leaks"):
        assert content[op] == json.loads(json.dumps(do(page, op)))
    assert content["leaks"]["total"] == 1
    assert content["state"]["tokens"] == list("abcde")
    assert np.array_equal(plane(content["tile"][0]), task.masks[0].dense().numpy())
    for position in range(5):
        row = np.full(5, 255)
        for first, last, layer in do(page, "field", position=position)["runs"]:
            row[first:last] = layer
        assert np.array_equal(arrivals(content)[position], row)


def test_a_stack_holds_each_distinct_mask_once():
    first, second = masks.causal(9), masks.sliding_window(9, 2)
    _, content = made([first, second, first])
    assert content["distinct"] == [0, 1, 0]
    for tile, mask in zip(content["tile"], (first, second), strict=True):
        assert np.array_equal(plane(tile), mask.dense().numpy())
    assert len(content["cost"]) == 2


@pytest.mark.parametrize("mask", [masks.causal(1024), masks.sliding_window(256, 16), masks.big_bird(1024)], ids=repr)
def test_records_are_short(mask):
    design, content = made(mask)
    assert len(record(design)) < 32_000
    assert ("arrivals" in content) == (mask.num_queries <= 512)
    assert content["tile"][0]["step"] == 1
