"""Watches code that trains: no label of a labelled forward pass may be readable at its own position.

As a program it runs an example under the watch: `python -m tests.training_watch EXAMPLE.py [ARGUMENTS]`.
"""

from __future__ import annotations

import contextlib
import inspect
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import attnflow as af
from attnflow.masks.flex import allowed_of_rows, is_row_intervals
from attnflow.models.passes.evaluation import examined
from attnflow.tasks import Collator, Label, Task, Token
from attnflow.tasks.embedding import embed

MEASURED = 64  # positions up to which every pair is measured; beyond, the declared order is audited, once
CALLS = 4  # labelled calls that are proved; the others of a training run are like them


@dataclass
class TrainingWatch:
    """How many labelled calls were proved free of leaks."""

    proofs: int = 0
    order: af.masks.Mask | None = None  # of the last collated batch's first sample
    busy: bool = False

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prove one call of a model, if something is to be trained by it."""
        if self.proofs >= CALLS:
            return
        call = dict(inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments)
        call |= call.pop("kwargs", {})
        labels = call.pop("labels", None)
        for name in ("num_items_in_batch", "fused_lm_head"):  # without labels they have no meaning
            call.pop(name, None)
        row = {k: v[:1] if isinstance(v, Tensor) and v.ndim else v for k, v in call.items() if v is not None}
        if labels is not None:
            assert "input_ids" in row, "a labelled call without input_ids: teach the watch what it predicts"
            if self.proofs and row["input_ids"].shape[1] > MEASURED:
                return
            task = labelled_task(model, row, labels[0])
            af.tasks.check(task, layers=1).raise_if_leaks()
        elif self.order is not None and row["input_ids"].shape[1] == self.order.num_queries:
            if row["input_ids"].ndim == 3:
                ids = row.pop("input_ids")
                row["inputs_embeds"] = embed(ids, model.get_input_embeddings()).detach()
            af.audit.check(model, row, order=self.order).raise_if_leaks()
        else:
            return
        self.proofs += 1

    def collated(self, collator: Collator, features: Any, batch: dict[str, Tensor]) -> None:
        """Prove the tasks of a collated batch, and remember what may flow in it."""
        for feature in features[:4]:
            made = collator.tasks_of(feature)
            af.tasks.check(made if isinstance(made, Task) else af.tasks.merge(made)).raise_if_leaks()
        mask = batch["attention_mask"][:1]
        allow = allowed_of_rows(mask, mask.shape[-1]) if is_row_intervals(mask) else mask == 0
        self.order = af.masks.from_dense(allow[0, 0])


def labelled_task(model: nn.Module, call: dict[str, Any], labels: Tensor) -> Task:
    """What the labels of one sequence ask of each position, over what the model really lets flow there."""
    name, ids = type(model).__name__, call["input_ids"][0].tolist()
    shift = next((s for kind, s in (("ForCausalLM", 1), ("LMHead", 1), ("ForMaskedLM", 0)) if kind in name), None)
    assert shift is not None, f"does {name} shift its labels? Teach the watch"
    places = call["position_ids"][0].tolist() if "position_ids" in call else list(range(len(ids)))
    wanted = labels.tolist()
    hidden = [shift == 0 and w not in (-100, token) for w, token in zip(wanted, ids, strict=True)]
    tokens = [Token(t, p, () if h else None) for t, p, h in zip(ids, places, hidden, strict=True)]
    targets = [Label(i - shift, Token(wanted[i], places[i])) for i in range(shift, len(ids)) if wanted[i] != -100]
    return Task(tokens, targets, flowing(model, call, len(ids)))


def flowing(model: nn.Module, call: dict[str, Any], size: int) -> af.masks.Mask:
    """From which inputs to which outputs anything flows."""
    if size <= MEASURED:
        return af.audit.measure(model, call, by="output").masks[0]
    order = af.audit.declared_order(model, call)
    af.audit.check(model, call, order=order, passes=3, watch="layers").raise_if_leaks()
    return af.masks.from_dense(order.reachability())


@contextlib.contextmanager
def watching_training() -> Iterator[TrainingWatch]:
    """Raises `LeakFound` at the first call that trains on a label that its own position can read."""
    watch, plain, collate = TrainingWatch(), PreTrainedModel.__call__, Collator.__call__

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if watch.busy or not torch.is_grad_enabled():
            return plain(model, *args, **kwargs)
        watch.busy = True
        try:
            output = plain(model, *args, **kwargs)
            if not examined():  # else `check_loss` looks at a loss, which may well be wrong
                watch.call(model, args, kwargs)  # afterwards: hooks of the user's see the user's call first
            return output
        finally:
            watch.busy = False

    def collated(collator: Collator, features: Any) -> Any:
        batch = collate(collator, features)
        watch.collated(collator, features, batch)
        return batch

    PreTrainedModel.__call__ = call
    Collator.__call__ = collated
    try:
        yield watch
    finally:
        del PreTrainedModel.__call__
        Collator.__call__ = collate


if __name__ == "__main__":
    with watching_training() as seen:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    print(f"{seen.proofs} labelled calls proved", file=sys.stderr)
