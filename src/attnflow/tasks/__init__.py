"""What is trained: tasks, families of tasks, the one sequence that trains them all, and proofs that nothing leaks."""

from attnflow.tasks.collator import Collator, loss
from attnflow.tasks.derivation import Derivation, derive
from attnflow.tasks.embedding import average_embeddings
from attnflow.tasks.families import (
    block_diffusion,
    block_two_stream,
    butterfly,
    causal_lm,
    masked_lm,
    multi_token_prediction,
    permutation_lm,
)
from attnflow.tasks.leaks import LeakReport, check
from attnflow.tasks.merging import embedded, merge
from attnflow.tasks.task import Label, Task, Token
from attnflow.tasks.verification import Verification, verify

__all__ = [
    "Collator",
    "Derivation",
    "Label",
    "LeakReport",
    "Task",
    "Token",
    "Verification",
    "average_embeddings",
    "block_diffusion",
    "block_two_stream",
    "butterfly",
    "causal_lm",
    "check",
    "derive",
    "embedded",
    "loss",
    "masked_lm",
    "merge",
    "multi_token_prediction",
    "permutation_lm",
    "verify",
]


def __dir__() -> list[str]:
    return __all__
