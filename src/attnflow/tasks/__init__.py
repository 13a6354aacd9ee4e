"""What is trained: tasks, families of tasks, the one sequence that trains them all, and proofs that nothing leaks."""

from typing import TYPE_CHECKING

from attnflow._core.lazy import on_demand
from attnflow.tasks.collation import Collator, loss
from attnflow.tasks.embedding import average_embeddings
from attnflow.tasks.extra_tokens import gist, look_ahead
from attnflow.tasks.families import (
    block_diffusion,
    block_two_stream,
    butterfly,
    causal_lm,
    masked_lm,
    multi_token_prediction,
    permutation_lm,
)
from attnflow.tasks.leaks import check
from attnflow.tasks.merging import merge
from attnflow.tasks.plan import Decoder, decoder
from attnflow.tasks.rollout_groups import rollouts
from attnflow.tasks.task import Label, Task, Token
from attnflow.tasks.verification import verify

if TYPE_CHECKING:
    from attnflow.tasks.hf import generate, generate_blocks, infill, score, share_prefixes

__all__ = [
    "Collator",
    "Decoder",
    "Label",
    "Task",
    "Token",
    "average_embeddings",
    "block_diffusion",
    "block_two_stream",
    "butterfly",
    "causal_lm",
    "check",
    "decoder",
    "generate",
    "generate_blocks",
    "gist",
    "infill",
    "look_ahead",
    "loss",
    "masked_lm",
    "merge",
    "multi_token_prediction",
    "permutation_lm",
    "rollouts",
    "score",
    "share_prefixes",
    "verify",
]


def _home(_: str) -> object:
    from attnflow.tasks import hf

    return hf


__getattr__, __dir__ = on_demand(__name__, __all__, _home)
