"""Audits inside a transformers `Trainer`."""

from importlib.util import find_spec

from attnflow._core.errors import MissingExtra

if find_spec("transformers") is None:
    raise MissingExtra("transformers", "hf", "an audit inside a Trainer")

from attnflow.audit.hf.callback import GuardCallback

__all__ = ["GuardCallback"]
