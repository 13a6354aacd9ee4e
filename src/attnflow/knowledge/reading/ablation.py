"""Taking entries out: each sequence of a batch is computed as if the values of some entries were zero."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.markup import KINDS, part_name
from attnflow.knowledge.layered import LayerReader, observed
from attnflow.knowledge.reader import LayerReading
from attnflow.models.passes.watching import Call, Watch
from attnflow.models.subject import Subject

_TOKENS: Final = 1 << 14  # of all sequences of one batch


class LocatedEntry(NamedTuple):
    reader: LayerReader
    place: int  # as `LayerReader.every` lists it
    head: int | None = None  # the head that reads it; None for all heads

    def numbered(self, numbers: Mapping[LayerReader, tuple[int, int]]) -> tuple[str, int, int]:
        """Its name, the model's layer, and its number there, by `layered.numbering`."""
        layer, offset = numbers[self.reader]
        neuron = offset + (self.head or 0) * self.reader.span + self.place
        return part_name(layer, KINDS[self.reader.letter], neuron, brief=True), layer, neuron

    @property
    def heads(self) -> slice:
        return slice(None) if self.head is None else slice(self.head, self.head + 1)

    def column(self, reading: LayerReading, table: Tensor) -> Float[Tensor, "tokens heads"]:
        """Select the entry from a table of a reading, such as its weights; 0 where it was not read."""
        table = table.flatten(0, -3)  # some models flatten a batch
        if reading.ids is None:
            return table[..., int((self.reader.every() == self.place).nonzero()[0])]
        return torch.where(reading.ids.flatten(0, -3) == self.place, table, 0).sum(dim=-1)

    def written(self, reading: LayerReading) -> Float[Tensor, "tokens model_dim"]:
        weights = self.column(reading, reading.weights)[:, self.heads]
        values = self.reader.values(torch.tensor([self.place], device=weights.device))[self.heads, 0]
        kind = torch.promote_types(weights.dtype, torch.float32)
        return weights.to(kind) @ values.detach().to(kind)


@contextmanager
def without(removed: Sequence[LocatedEntry | None]) -> Generator[None]:
    """Compute sequence i of each batch without the value of entry `removed[i]`, at all tokens; None takes out nothing.

    The rest of the layer is unchanged: an entry without a value keeps its score, so a search finds the same entries.
    What the entry wrote is subtracted from the layer's output, so later layers see the output of a layer without it.
    """
    rows: dict[LayerReader, list[tuple[int, LocatedEntry]]] = {}
    for row, one in enumerate(removed):
        if one is not None:
            rows.setdefault(one.reader, []).append((row, one))
    written: dict[LayerReader, list[tuple[slice, Tensor]]] = {}

    def see(reader: LayerReader, reading: LayerReading) -> None:
        total = reading.weights.shape[:-2].numel()
        if total % len(removed):
            raise UnsupportedArchitecture(
                f"a layer reads entries for {total} tokens of {len(removed)} sequences together, so they cannot be "
                "taken out of single sequences"
            )
        each = total // len(removed)
        places = [(slice(row * each, (row + 1) * each), one) for row, one in rows[reader]]
        written[reader] = [(tokens, one.written(reading)[tokens]) for tokens, one in places]

    def leave(call: Call, output: Tensor) -> Tensor:
        left = output.clone(memory_format=torch.contiguous_format)
        # Some modules return the outputs of their experts one below another, to be summed afterwards: what is taken
        # from the first expert's rows is taken from the sum.
        flat = left.view(-1, left.shape[-1])
        for tokens, one in written.pop(call.name):
            flat[tokens] = (flat[tokens].to(one) - one).to(left.dtype)
        return left

    modules = {reader: cast(nn.Module, reader) for reader in rows}
    with observed([(reader, partial(see, reader)) for reader in rows]), Watch(modules, leave=leave):
        yield


def logits_without(
    model: nn.Module, arguments: Mapping[str, Tensor], removed: Sequence[LocatedEntry], position: int
) -> tuple[Float[Tensor, " vocabulary"], Float[Tensor, "removed vocabulary"]]:
    """Return a token's logits, and its logits without each of the entries alone; `arguments` are of one sequence.

    The sequence runs as one batch with a copy for each entry and an untouched one, or as several if it is long.
    """
    tokens = arguments["input_ids"].shape[1]
    odd = [name for name, value in arguments.items() if value.ndim == 0 or len(value) != 1]
    if odd:
        raise ValueError(f"entries are taken out in a batch of copies, but the first axis of {odd[0]} is not the batch")
    options = Subject(model).sparing
    if "logits_to_keep" in options:
        options["logits_to_keep"] = tokens - position
    untouched: list[Tensor] = []
    changed: list[Tensor] = []
    size = max(1, _TOKENS // tokens - 1)
    for start in range(0, max(1, len(removed)), size):
        some: list[LocatedEntry | None] = [None, *removed[start : start + size]]
        batch = {name: value.expand(len(some), *value.shape[1:]) for name, value in arguments.items()}
        with torch.no_grad(), without(some):
            logits = getattr(cast(Callable[..., Any], model)(**batch, **options), "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise UnsupportedArchitecture(f"{type(model).__name__} returns no logits of tokens to compare")
        mine = logits[:, position - tokens].to(torch.promote_types(logits.dtype, torch.float32))
        untouched.append(mine[0])
        changed.append(mine[1:] - mine[:1] + untouched[0])  # differences are those within one batch
    return untouched[0], torch.cat(changed)
