"""Audits of real models: does an output change with an input that the declared order forbids it to read?

A leak can come through a scan, a normalisation over the sequence, a cache or a custom kernel. No mask shows these, so
the audit runs the model: it changes inputs and watches every module.

Read `audit` first (`check`), then `perturb`, which finds what moves, and `passes`, which runs and watches the model.
`declared` says what may move, `measurement` what does, `guards` watches a training. The folder `batch` reads one batch:
its labels and documents, the loss that it trains, and its rows alone.
`functions` lets `check` take any function of token ids; `scores` asks whether a score per token is a probability.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attnflow._core.errors import MissingExtra
from attnflow._core.lazy import on_demand
from attnflow.audit.audit import check
from attnflow.audit.batch.alone import check_alone
from attnflow.audit.batch.check import check_batch, check_loss
from attnflow.audit.declared import declared_order
from attnflow.audit.measurement import measure
from attnflow.audit.report import AuditReport
from attnflow.audit.scores import check_scores

if TYPE_CHECKING:
    from attnflow.audit.callback import GuardCallback
    from attnflow.audit.guards import guard

__all__ = [
    "AuditReport",
    "GuardCallback",
    "check",
    "check_alone",
    "check_batch",
    "check_loss",
    "check_scores",
    "declared_order",
    "guard",
    "measure",
]


def _home(name: str) -> object:
    if name == "guard":  # it loads the compiler, which is kept out of what it does
        from attnflow.audit import guards

        return guards
    if find_spec("transformers") is None:
        raise MissingExtra("transformers", "hf", "an audit inside a Trainer")
    from attnflow.audit import callback

    return callback


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
