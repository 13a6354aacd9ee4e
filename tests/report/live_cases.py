"""Sessions for the tests of what a page works on."""

from __future__ import annotations

import base64

import numpy as np

from attnflow.report.live.operations import design_of
from attnflow.report.live.session import Session


def session(values=None):
    return Session(design_of(values or {"name": "causal", "parameters": {"n": 8}}))


def do(session, op, **message):
    """The reply to an operation that must succeed."""
    reply = session.handle({"op": op, **message})
    assert reply["ok"], reply
    return reply


def refused(session, op, **message):
    """The error of an operation that must be refused, and that must change nothing."""
    before = session.design
    reply = session.handle({"op": op, **message})
    assert not reply["ok"]
    assert session.design is before
    return reply["error"]


def plane(reply, name="allowed"):
    """A plane of a tile as an array."""
    content = np.frombuffer(base64.b64decode(reply["planes"][name]), np.uint8)
    if reply["step"] > 1:
        return content.reshape(reply["rows"], reply["columns"])
    rows = content.reshape(reply["rows"], -(-reply["columns"] // 8))
    return np.unpackbits(rows, axis=1)[:, : reply["columns"]].astype(bool)
