"""Fitting an adapter: masked rows learn what the frozen model itself will say at their places."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from attnflow._core.progress import Progress
from attnflow.models.evaluation import evaluating
from attnflow.tasks.hf.decoding_pass import CachedPasses
from attnflow.tasks.hf.lookahead_adapter import GatedAdapter, inputs, layout


def fit(
    model: PreTrainedModel,
    adapter: GatedAdapter,
    texts: Sequence[Sequence[int]],
    *,
    steps: int,
    length: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    progress: Progress | None,
) -> tuple[float, ...]:
    """The loss of each step; see `Lookahead.fit`."""
    drafts = len(adapter.masks)
    after = list(range(length - drafts))
    positions, allow = layout(0, length, after, drafts)
    # Mask j after token t predicts token t + j + 1, as the model's own row t + j does.
    target_rows = (torch.tensor(after)[:, None] + torch.arange(1, drafts + 1)).flatten()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=learning_rate)
    losses: list[float] = []
    with evaluating(model), _frozen(model):
        for step in range(steps):
            windows: list[list[int]] = []
            for number in torch.randint(len(texts), (batch_size,), generator=generator).tolist():
                start = int(torch.randint(len(texts[number]) - length + 1, (), generator=generator))
                windows.append(list(texts[number][start : start + length]))
            run = CachedPasses(model)
            embedded = inputs(model, adapter, torch.tensor(windows, device=run.device), len(after), drafts)
            rows = embedded.shape[1]
            with adapter.gate(rows, rows - length):
                logits = run.run(embedded, positions.expand(batch_size, -1), allow[None], rows)
            precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
            own = precise[:, target_rows].detach().log_softmax(dim=-1)
            ahead = precise[:, length:].log_softmax(dim=-1)
            loss = F.kl_div(ahead, own, reduction="none", log_target=True).sum(dim=-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            if progress is not None:
                progress(step + 1, steps, "steps")
    return tuple(losses)


@contextmanager
def _frozen(model: nn.Module) -> Generator[None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
