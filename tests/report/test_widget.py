"""The widget of notebooks, asked as its page asks it; the page itself is run in tests/studio/test_widget_browser.py."""

import json
import sys

import pytest
import torch

import attnflow as af
from attnflow import masks
from attnflow.report.live.design import MAX_POSITIONS
from attnflow.report.live.session import Session
from attnflow.studio.process import Limits
from tests.refused import refused

pytest.importorskip("anywidget")

from attnflow.report.live.notebook import MESSAGE_BYTES


class View:
    """A view of a widget: says messages as the page does, and hears what is sent to it."""

    def __init__(self, widget, name="a"):
        self.widget, self.name, self.heard = widget, name, []
        self.number = 0

    def ask(self, op, **message):
        self.number += 1
        heard = self.say({"view": self.name, "message": {"id": self.number, "op": op, **message}})
        assert [content["view"] for content in heard] == [self.name]
        assert heard[0]["reply"]["id"] == self.number
        return heard[0]["reply"]

    def say(self, content):
        """What the widget sends after this content has come over its comm."""
        sent = []
        send, self.widget.send = self.widget.send, lambda content, buffers=None: sent.append(content)
        try:
            self.widget._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
        finally:
            self.widget.send = send
        json.dumps(sent, allow_nan=False)
        return sent


def test_what_was_painted_is_read_back():
    widget = af.report.widget(masks.causal(8))
    view = View(widget)
    assert widget.mask == masks.causal(8)
    assert view.ask("paint", strokes=[[0, 2, 6, 8, 1], [7, 8, 0, 1, 0]])["ok"]
    expected = masks.causal(8).dense().clone()
    expected[0:2, 6:8], expected[7, 0] = True, False
    assert torch.equal(widget.mask.dense(), expected)
    assert view.ask("undo")["ok"]
    assert widget.mask == masks.causal(8)
    assert "causal(n=8)" in repr(widget)


def test_a_mask_that_is_assigned_is_shown_and_can_be_undone():
    widget = af.report.widget(masks.causal(8), labels=list("abcdefgh"))
    view = View(widget)
    assert view.ask("state")["tokens"] == list("abcdefgh")
    widget.mask = masks.butterfly(4)
    state = view.ask("state")
    assert (state["size"], widget.revision) == (masks.butterfly(4).num_queries, 1)
    assert view.ask("undo")["ok"]
    assert widget.mask == masks.causal(8)
    with refused(TypeError, "expected a mask, got int"):
        widget.mask = 3
    with pytest.raises(ValueError, match="as many queries as keys"):
        widget.mask = masks.full(2, 3)


def test_a_stack_has_a_mask_for_each_layer():
    stack = [masks.causal(8), masks.sliding_window(8, 2)]
    for subject in (stack, af.order.analyze(stack)):
        widget = af.report.widget(subject)
        assert list(widget.masks) == stack
        with pytest.raises(ValueError, match=r"stack of 2: see \.masks"):
            _ = widget.mask
        assert repr(widget).startswith("Widget([")


def test_a_task_comes_with_its_labels_and_goes_with_those_that_were_set():
    merged = af.tasks.merge(af.tasks.butterfly([5, 6, 7, 8]))
    for subject in (merged, merged.task):
        widget = af.report.widget(subject)
        report = View(widget).ask("leaks")
        assert (report["total"], report["labels"]) == (0, len(merged.task.labels))
    widget = af.report.widget(masks.causal(4))
    assert View(widget).ask("labels", kind="own")["ok"]
    assert not af.tasks.check(widget.task).ok
    assert len(widget.task.labels) == 4


@pytest.mark.parametrize(
    "content",
    [None, "state", 3, [], {}, {"view": "a"}, {"message": {"op": "invert"}}, {"view": 3, "message": {"op": "invert"}},
     {"view": "a" * 41, "message": {"op": "invert"}}, {"view": "a", "message": "invert"},
     {"view": "a", "message": None}],
    ids=repr,
)  # fmt: skip
def test_what_is_no_message_is_not_answered_and_changes_nothing(content):
    widget = af.report.widget(masks.causal(8))
    assert View(widget).say(content) == []
    assert (widget.revision, widget.mask) == (0, masks.causal(8))


@pytest.mark.parametrize(
    "message",
    [{"op": "__init__"}, {"op": "import", "text": "os"}, {"op": ["pick"]}, {"op": "pick", "name": "__class__"}, {},
     {"op": "load", "text": "__import__('os').system('true')"}, {"op": "paint", "strokes": [[0, 9, 0, 1, 1]]},
     {"op": "field", "position": 10**9}, {"op": "pick", "name": "causal", "settings": {"n": str(MAX_POSITIONS + 1)}}],
    ids=repr,
)  # fmt: skip
def test_it_takes_structured_operations_within_the_limits_and_nothing_else(message):
    widget = af.report.widget(masks.causal(8))
    heard = View(widget).say({"view": "a", "message": {"id": 7, **message}})
    assert [content["reply"]["ok"] for content in heard] == [False]
    assert heard[0]["reply"]["id"] == 7
    assert (widget.revision, widget.mask) == (0, masks.causal(8))


def test_messages_are_as_long_as_those_of_a_page():
    assert Limits().message_bytes == MESSAGE_BYTES
    reply = View(af.report.widget(masks.causal(8))).ask("load", text="x" * MESSAGE_BYTES)
    assert reply == {"id": 1, "ok": False, "error": "a message has at most 2,097,152 bytes"}


def test_an_interrupted_kernel_says_so_and_goes_on(monkeypatch):
    widget = af.report.widget(masks.causal(8))
    view = View(widget)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "handle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert view.ask("leaks") == {"id": 1, "ok": False, "error": "interrupted"}
    assert view.ask("leaks")["total"] == 0


def test_without_anywidget_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "attnflow.report.live.notebook")
    with pytest.raises(af.MissingExtra, match=r"the studio in a notebook needs anywidget.*attnflow\[widget\]"):
        af.report.widget(masks.causal(8))
