"""Runs a task on a model: input embeddings, position ids, an additive mask, and averaged tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow.models.subject import Loaded, Subject
from attnflow.tasks.task import Task

NO_ID = -100
"""Fills the places of an id table that hold no id, as everywhere in training code."""
_MODELS: Final[WeakSet[nn.Module]] = WeakSet()  # that once took averaged tokens, in this process


def id_table(task: Task) -> Int[Tensor, "n width"]:
    """The vocabulary ids of each input, int64 [n, width], filled with `NO_ID`; width is the most ids of a token."""
    return torch.from_numpy(task.sequence.table.ids.take(task.sequence.index).padded(NO_ID))


def embed(ids: Int[Tensor, "*batch n width"], embedding: nn.Module) -> Float[Tensor, "*batch n hidden"]:
    """The mean embedding of the ids of each token (hasse, eq. 46, on token embeddings alone; see order.md).

    It is differentiable in the embedding; `NO_ID` is skipped. An id outside the vocabulary raises `ValueError`.
    """
    there = ids >= 0
    size = getattr(embedding, "num_embeddings", None)
    if isinstance(size, int) and ids.numel() and int(ids.max()) >= size:
        raise ValueError(f"token ids must be below the {size} entries of the embedding, got {int(ids.max())}")
    vectors: Tensor = embedding(ids.clamp(min=0))
    if ids.shape[-1] == 1:
        return vectors.squeeze(-2)
    weight = there.to(vectors.dtype)
    return (vectors * weight[..., None]).sum(dim=-2) / weight.sum(dim=-1, keepdim=True).clamp(min=1)


def additive(allow: Bool[Tensor, "*batch q k"], dtype: torch.dtype) -> Float[Tensor, "*batch q k"]:
    """0 where allowed, else the lowest number of `dtype`. Eager attention adds a bool mask and so masks nothing."""
    return torch.zeros(allow.shape, dtype=dtype, device=allow.device).masked_fill_(~allow, torch.finfo(dtype).min)


def run(subject: Subject, task: Task, bias: Float[Tensor, "n n"] | None = None) -> Float[Tensor, "n vocabulary"]:
    """The logits of a model on a task, from embeddings, position ids and a 4D additive mask, without a cache.

    A bias is added to the scores of all layers and heads.
    """
    embedding = _embedding(subject.model)
    device = next(embedding.parameters()).device
    vectors = embed(id_table(task).to(device), embedding)
    scores = additive(task.mask.dense(device), vectors.dtype)
    scores = scores if bias is None else scores + bias.to(scores)
    output = subject.model(
        inputs_embeds=vectors[None],
        position_ids=task.position_ids.to(device)[None],
        attention_mask=scores[None, None],
        # Only where it is known: some models pass unknown arguments on, and fail deep inside.
        **({"use_cache": False} if "use_cache" in subject.parameters else {}),
    )
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[1] != task.size:
        raise UnsupportedArchitecture(
            f"{subject.kind} gives no logits per position; use a language-model head (ForCausalLM, ForMaskedLM)"
        )
    return logits[0]


def require_runnable(subject: Subject) -> None:
    """Raise `UnsupportedArchitecture` unless a model takes embeddings, position ids and a 4D additive mask."""
    _embedding(subject.model)
    missing = [part for part in ("inputs_embeds", "attention_mask", "position_ids") if part not in subject.parameters]
    if missing:
        raise UnsupportedArchitecture(
            f"a task needs a forward with {' and '.join(missing)}, which {subject.kind} does not take"
        )
    if subject.encodes_and_decodes:
        raise UnsupportedArchitecture(f"a task needs one stack, but {subject.kind} has an encoder and a decoder")
    implementation = getattr(subject.config, "_attn_implementation", None)
    if implementation not in (None, "eager", "sdpa"):
        raise UnsupportedArchitecture(
            f'{subject.kind} runs attention "{implementation}", which takes no 4D additive mask: call '
            'model.set_attn_implementation("sdpa") or "eager"'
        )


def require_targets(targets: Tensor, logits: Tensor) -> None:
    if len(targets) and int(targets.max()) >= logits.shape[-1]:
        raise ValueError(f"target ids must be below the vocabulary of {logits.shape[-1]}, got {int(targets.max())}")


def _embedding(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_input_embeddings", None)
    if not callable(get):
        raise UnsupportedArchitecture(f"{type(model).__name__} has no get_input_embeddings()")
    return cast(nn.Module, get())


class AveragedTokens(Handle):
    """The handle of `average_embeddings`: the model reads averaged tokens until it is removed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._hook = model.register_forward_pre_hook(_average, with_kwargs=True)
        _MODELS.add(model)

    def _restore(self) -> None:
        self._hook.remove()

    def _summary(self) -> str:
        return f"{self.kind} reads input_ids [batch, n, width] as mean embeddings"


def average_embeddings(model: nn.Module | Loaded) -> AveragedTokens:
    """Let a model read averaged tokens: `input_ids` of shape [batch, n, width] become mean embeddings.

    A forward pre-hook replaces three-dimensional `input_ids` (filled up with -100, as `Collator` does) by
    `inputs_embeds`; gradients reach the embedding. Other calls pass unchanged. Call it on the model that you give to
    `Trainer`. It raises `TypeError` if the model has no `get_input_embeddings`.
    """
    model = Subject.of(model).model
    if not callable(getattr(model, "get_input_embeddings", None)):
        raise TypeError(f"{type(model).__name__} has no get_input_embeddings(); expected a Hugging Face model")
    return AveragedTokens(model)


def averaging() -> bool:
    return any(_average in model._forward_pre_hooks.values() for model in _MODELS)


def _average(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    ids = kwargs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 3:
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name != "input_ids"}
    return args, {**rest, "inputs_embeds": embed(ids, _embedding(model))}
