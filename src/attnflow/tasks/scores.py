"""`log_probs`: the log-probability of every label of a family, from one pass over its merged task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow.models.evaluation import evaluating
from attnflow.models.loaded import Loaded, split
from attnflow.tasks.merging import MergedTask, merge
from attnflow.tasks.task import Task
from attnflow.tasks.verification import require_runnable, run


@torch.no_grad()
def log_probs(model: nn.Module | Loaded, family: Sequence[Task] | MergedTask) -> Float[Tensor, " labels"]:
    """How probable each label of a family is, all subtasks in one pass: log p(label | what its subtask reads), in nats.

    Of `butterfly(ids)` that is log p(x_k | all other tokens) for every k, and their sum the pseudo-log-likelihood of
    the text (Salazar et al., arXiv:1910.14659), in one pass where masking token by token takes n; of `causal_lm(ids)`
    the log-likelihood. Only what a model was trained for means something: a causal model has no two-sided scores.

    Args:
        model: a Hugging Face model with logits, eager or SDPA attention; or what `load_model` returned.
        family: the subtasks, or their merged task.

    Returns:
        One number for each label, by subtask and within it by position; weights are left out.

    Raises:
        UnsupportedArchitecture: the model cannot take embeddings, position ids and a 4D mask.
        ValueError: a label lies outside the vocabulary, or `merge` refuses the family.

    Cost: one forward pass over the merged task under a dense mask.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> af.tasks.log_probs(model, af.tasks.butterfly([5, 6, 7, 8])).shape
    torch.Size([4])
    """
    model = split(model)[0]
    task = (family if isinstance(family, MergedTask) else merge(family)).task
    require_runnable(model)
    labels = sorted(task.labels, key=lambda label: label.task)  # stable: within a subtask they stand by position
    with evaluating(model):
        logits = run(model, task)
    targets = torch.tensor([label.target_id for label in labels], dtype=torch.int64, device=logits.device)
    if len(targets) and int(targets.max()) >= logits.shape[-1]:
        raise ValueError(f"target ids must be below the vocabulary of {logits.shape[-1]}, got {int(targets.max())}")
    rows = logits[[label.position for label in labels]]
    precise = rows.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(dim=-1)
    return precise.gather(-1, targets[:, None])[:, 0]
