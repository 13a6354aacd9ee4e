"""Vector-Jacobian products: the exact support of the Jacobian from input embeddings to module outputs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow.audit.fields import Fields
from attnflow.audit.findings import Violation
from attnflow.audit.inputs import Call, embedding_modules
from attnflow.audit.passes import Runner
from attnflow.audit.trace import Event, Key


@dataclass(frozen=True)
class Graph:
    """One forward pass with its autograd graph: every event, and the embeddings it started from.

    Attributes:
        events: in order of execution; `values` are copies that later in-place changes do not touch.
        leaves: (joint position of the first one, vectors [batch, n, d]) each: embeddings, and what is added to them
            where they enter the layers.
    """

    events: list[Event]
    leaves: list[tuple[int, Tensor]]

    def pull(self, cotangents: Sequence[tuple[Event, Tensor]], size: int) -> Tensor:
        """Largest absolute gradient at each position [batch, n] of the sum of <cotangent, event>."""
        outputs = [event.values for event, _ in cotangents]
        leaves = [leaf for _, leaf in self.leaves]
        try:
            gradients = torch.autograd.grad(
                outputs, leaves, [c for _, c in cotangents], retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise UnsupportedArchitecture(
                f"the model cannot be differentiated ({error}): use mode='perturb'"
            ) from error
        result = torch.zeros(leaves[0].shape[0], size, dtype=torch.float64)
        for (offset, _), gradient in zip(self.leaves, cast(tuple[Tensor | None, ...], gradients), strict=True):
            if gradient is None:
                continue
            if gradient.isnan().any():
                raise UnsupportedArchitecture("the model's gradient holds NaN: use mode='perturb'")
            rows = result[:, offset : offset + gradient.shape[1]]
            torch.maximum(rows, gradient.detach().double().abs().amax(-1).cpu(), out=rows)
        return result


class Puller:
    """Pulls random cotangents back to the embeddings and looks which positions they reach.

    One backward pass tests all modules at once: a sum of random cotangents over rows that must not see the set S has
    no gradient in S, and any forbidden path gives one (exact cancellation has probability zero).
    """

    def __init__(self, runner: Runner, fields: Fields, seed: int) -> None:
        self.runner = runner
        self.fields = fields
        self.generator = torch.Generator().manual_seed(seed)
        self.backward_passes = 0
        self._noise: dict[Key, Tensor] = {}
        self.graph = record_graph(runner)
        self.layered = runner.layer_calls > 0
        self.dirty: set[str] = set()

    def probe(self, selected: Tensor) -> Violation | None:
        """The first event whose clean rows have a gradient in the `selected` positions, narrowed down to a pair."""
        cotangents = [(event, c) for event in self.graph.events if (c := self._cotangent(event, selected)) is not None]
        if not cotangents or not self._reaches(cotangents, selected):
            return None
        low, high = 0, len(cotangents)  # the first k for which events[:k] reach the set
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._reaches(cotangents[:middle], selected) else (middle, high)
        event, cotangent = cotangents[low]
        self.dirty |= self._carriers(cotangents[low:], selected)
        rows = [(row, position) for row, position in cotangent.abs().amax(-1).nonzero().tolist()]
        while len(rows) > 1:
            half = rows[: len(rows) // 2]
            rows = half if self._reaches([(event, _only(cotangent, half))], selected) else rows[len(half) :]
        reached = self._pull([(event, _only(cotangent, rows))]) * selected
        row, target = rows[0]
        # several inputs of the state that leaked may be forbidden: the last of them in the order is its own
        source_row, source = self.fields.ranked([(b, j) for b, j in reached.nonzero().tolist()], row)[-1]
        return Violation(
            "order" if source_row == row else "batch",
            event.layer,
            event.blame,
            source,
            target + event.offset,
            float(reached[source_row, source]),
            source_row,
            row,
        )

    def _carriers(self, cotangents: Sequence[tuple[Event, Tensor]], selected: Tensor) -> set[str]:
        """Modules whose output has a gradient in the set, one backward pass for each layer output and the model's."""
        names = {*self.runner.layer_names, ""}
        return {
            event.key.module
            for event, cotangent in cotangents
            if event.key.side == "out" and event.key.module in names and self._reaches([(event, cotangent)], selected)
        }

    def _cotangent(self, event: Event, selected: Tensor) -> Tensor | None:
        depth = max(event.depth, 1) if self.layered else -1
        clean = self.fields.clean(depth, selected)[:, event.offset : event.offset + event.values.shape[1]]
        if len(event.values) < len(clean):
            clean = clean.all(0, keepdim=True)
        if not clean.any():
            return None
        if event.key not in self._noise:
            noise = torch.randn(event.values.shape, generator=self.generator)
            self._noise[event.key] = noise.to(event.values)
        noise = self._noise[event.key]
        return noise * clean[:, :, None].to(noise)

    def _pull(self, cotangents: Sequence[tuple[Event, Tensor]]) -> Tensor:
        self.backward_passes += 1
        return self.graph.pull(cotangents, self.fields.size)

    def _reaches(self, cotangents: Sequence[tuple[Event, Tensor]], selected: Tensor) -> bool:
        return bool((self._pull(cotangents)[selected] != 0).any())


def record_graph(runner: Runner) -> Graph:
    """One forward pass from detached embeddings, with its graph."""
    with torch.enable_grad(), _leaves(runner) as (call, leaves):
        events = [event for event in runner.distinct(call, copy=True)[0].values() if event.values.requires_grad]
    if not events or not leaves:
        raise UnsupportedArchitecture(
            f"no output of {type(runner.model).__name__} depends differentiably on its input embeddings: use "
            "mode='perturb'"
        )
    return Graph(events, leaves)


@contextmanager
def _leaves(runner: Runner) -> Generator[tuple[Call, list[tuple[int, Tensor]]]]:
    """(call, leaves), some of the leaves filled in during the pass, where they come from an embedding module."""
    inputs = runner.inputs
    embedded: dict[int, Tensor] = {}
    kwargs = dict(inputs.kwargs)
    noise = {
        slot.offset: torch.zeros(inputs.batch, slot.length, slot.entry.width, dtype=runner.dtype, requires_grad=True)
        for slot in inputs.slots
        if slot.entry is not None
    }
    lengths = {slot.length: slot.offset for slot in inputs.slots}
    leaves: list[tuple[int, Tensor]] = list(noise.items())
    named = [slot for slot in inputs.slots if slot.name is not None]
    for slot in named:
        values = inputs.values(slot)
        if values.is_floating_point():
            embedded[slot.offset] = values.detach().clone().requires_grad_()
            kwargs[cast(str, slot.name)] = embedded[slot.offset] if inputs.batched else embedded[slot.offset][0]
            leaves.append((slot.offset, embedded[slot.offset]))

    def cut(module: nn.Module, args: object, output: Tensor) -> Tensor:
        leaf = (output if inputs.batched else output[None]).detach().requires_grad_()
        offset = lengths.get(leaf.shape[1])
        if offset is None or offset in embedded:
            return output
        embedded[offset] = leaf
        leaves.append((offset, leaf))
        return leaf if inputs.batched else leaf[0]

    with ExitStack() as hooks:
        if len(embedded) < len(named):
            for module in embedding_modules(runner.model):
                hooks.enter_context(module.register_forward_hook(cut))
        yield Call(kwargs, noise), leaves


def _only(cotangent: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    result = torch.zeros_like(cotangent)
    for row, position in rows:
        result[row, position] = cotangent[row, position]
    return result
