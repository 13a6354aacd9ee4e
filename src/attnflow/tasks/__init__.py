"""What is trained: tasks, families of tasks, the one sequence that trains them all, and proofs that nothing leaks."""

from attnflow.tasks.collator import Collator
from attnflow.tasks.embedding import average_embeddings, embed
from attnflow.tasks.families import (
    block_diffusion,
    block_generation,
    butterfly,
    causal_lm,
    masked_lm,
    multi_token,
    permutation_lm,
)
from attnflow.tasks.leaks import Leak, Report, check
from attnflow.tasks.merging import Embedding, MergedTask, MissingNode, embedded, merge
from attnflow.tasks.objective import loss
from attnflow.tasks.published import butterfly_as_printed
from attnflow.tasks.task import Label, Task, Token
from attnflow.tasks.verification import TaskDifference, Verification, verify

__all__ = [
    "Collator",
    "Embedding",
    "Label",
    "Leak",
    "MergedTask",
    "MissingNode",
    "Report",
    "Task",
    "TaskDifference",
    "Token",
    "Verification",
    "average_embeddings",
    "block_diffusion",
    "block_generation",
    "butterfly",
    "butterfly_as_printed",
    "causal_lm",
    "check",
    "embed",
    "embedded",
    "loss",
    "masked_lm",
    "merge",
    "multi_token",
    "permutation_lm",
    "verify",
]
