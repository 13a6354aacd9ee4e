"""`activity`: counts the entries that are active for each token and layer, and those that never are."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from attnflow.knowledge.layered import ExpertEntries, LayerReader, numbering, observed, readers
from attnflow.knowledge.reader import LayerReading
from attnflow.knowledge.reading.results import ActivityReport, LayerActivity
from attnflow.models.passes.watching import Call, Watch
from attnflow.models.subject import DECODER, ENCODER


@contextmanager
def activity(model: nn.Module) -> Generator[Activity, None, None]:
    """Count which entries are active in every forward pass inside the block.

    With an attention mask [batch, tokens], padding does not count (in encoder-decoders it does).

    Args:
        model: a model converted by `from_ffn`, or a modular one.

    Yields:
        The counts so far; `.report()` returns them as a result.

    Raises:
        ValueError: the model does not read a base, or its readings are already being watched.

    Cost: one comparison for each score; memory for one count for each entry and layer, however many tokens.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from attnflow.knowledge import from_ffn
    >>> model = from_ffn(LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)))
    >>> with activity(model) as seen:
    ...     _ = model(torch.arange(8).view(2, 4))
    >>> [(layer.tokens, layer.entries) for layer in seen.report().layers]
    [(8, 24), (8, 24)]
    """
    layers = readers(model)
    numbers = numbering(model)
    busy = next((numbers[reader][0] for reader in layers if reader.observer is not None), None)
    if busy is not None:
        raise ValueError(f"the readings of layer {busy} are being watched already: end that block first")
    paths = {module: path for path, module in model.named_modules() if isinstance(module, LayerReader)}
    counts = Activity({reader.layer: (numbers[reader][0], paths[reader]) for reader in layers})
    mask: Tensor | None = None
    steps = 0  # tokens of each sequence in this forward pass, where the model was given ids or embeddings

    def take(call: Call) -> None:
        nonlocal mask, steps
        arguments = call.arguments()
        given = arguments.get("attention_mask", arguments.get("kwargs", {}).get("attention_mask"))
        inputs = (arguments.get(name) for name in ENCODER)
        steps = next((tokens.shape[1] for tokens in inputs if isinstance(tokens, Tensor) and tokens.ndim > 1), 0)
        two_sided = any(name in arguments for name in DECODER)
        mask = given.bool() if isinstance(given, Tensor) and given.ndim == 2 and not two_sided else None

    def see(reader: LayerReader, reading: LayerReading) -> None:
        tokens = reading.weights.shape[:-2]
        counted = None
        if mask is not None and len(tokens) == 2:  # with a cache, the mask has the tokens before these, too
            counted = mask[:, mask.shape[1] - tokens[1] :].expand(tokens)
        elif mask is not None and steps and tokens == (len(mask) * steps,):  # a batch that was flattened
            counted = mask[:, mask.shape[1] - steps :].flatten()
        # Another total means that entries were passed in place of the model's base.
        total = reader.num_entries if reading.certificate is None else reading.certificate.total
        every = reader.every().to(reading.weights.device)
        if reading.ids is not None and total == len(every):
            counts.may_read(reading.layer, reader.ids(every))
        listed = reading.ids is None and reading.weights.shape[-1] == len(every)

        def ids(places: Tensor) -> Tensor:
            return reader.ids(every[places] if listed else places)

        fires = reading.scores[0] > 0 if isinstance(reader, ExpertEntries) else None  # gates of any function
        counts.see(reading, ids, counted, fires)

    observers = [(reader, partial(see, reader)) for reader in layers]
    with Watch({"model": model}, take, everywhere=True), observed(observers):
        yield counts


class Activity:
    """Counts of active entries over any number of forward passes; `af.knowledge.activity(model)` fills it."""

    def __init__(self, places: Mapping[int, tuple[int, str]] | None = None) -> None:
        """`places`: for each reader, the number of the model's layer and its path; by default there is one a layer."""
        self._readers: dict[int, _Counts] = {}
        self._places = places or {}

    def see(
        self,
        reading: LayerReading,
        ids: Callable[[Tensor], Tensor],
        counted: Bool[Tensor, "*tokens"] | None = None,
        fires: Bool[Tensor, "*tokens heads read"] | None = None,
    ) -> None:
        """Count one reading; `ids` maps positions to ids, `counted` selects tokens (None: all).

        By default an entry fires if its weight is positive; in gated layers, if its activated gate is positive.
        """
        if fires is None:
            # Of gated layers, weight = act(gate) * up. Signs, because the product of two small numbers may be 0.
            gates = reading.weights if len(reading.scores) == 1 else reading.weights.sign() * reading.scores[1].sign()
            fires = gates > 0
        active_here = fires.flatten(0, -3) if counted is None else fires[counted.to(fires.device)]
        counts = self._readers.setdefault(reading.layer, _Counts())
        if reading.ids is None:
            everything = ids(torch.arange(active_here.shape[-1], device=active_here.device))
            counts.add(everything.cpu(), active_here.sum(dim=(0, 1)).cpu())
        else:
            counts.read_all &= reading.certificate is None
            positions = reading.ids.flatten(0, -3) if counted is None else reading.ids[counted.to(fires.device)]
            counts.add(*ids(positions[active_here]).cpu().unique(return_counts=True))
        per_token = active_here.sum(dim=(1, 2))
        counts.tokens += len(per_token)
        counts.active += int(per_token.sum())
        counts.most = max([counts.most, *per_token.tolist()])

    def may_read(self, reader: int, ids: Int[Tensor, " entries"]) -> None:
        """Register the entries that a reader may read, so that unused ones count as dead."""
        self._readers.setdefault(reader, _Counts()).add(ids.cpu(), torch.zeros(len(ids), dtype=torch.int64))

    def fired(self, layer: int) -> tuple[Int[Tensor, " entries"], Int[Tensor, " entries"]]:
        """Return (ids in ascending order, how often each was active in a layer of the model, over tokens and heads).

        Raises:
            ValueError: no reading of that layer was counted.
        """
        total, numbers = _Counts(), {reader: self._place(reader)[0] for reader in self._readers}
        if layer not in numbers.values():
            raise ValueError(f"layer must be one of {sorted({*numbers.values()})}, got {layer}")
        for reader, counts in self._readers.items():
            if numbers[reader] == layer:
                total.add(counts.ids, counts.fired)
        return total.ids, total.fired

    def report(self) -> ActivityReport:
        """Return the counts so far as a result.

        Raises:
            ValueError: no forward pass was counted.
        """
        layers = {reader: counts for reader, counts in sorted(self._readers.items()) if counts.tokens}
        if not layers:
            raise ValueError("run a forward pass of the model inside the block before report()")
        everything = torch.cat([counts.ids for counts in layers.values()]).unique()
        dead = everything[~torch.isin(everything, torch.cat([c.ids[c.fired > 0] for c in layers.values()]))]
        summaries = tuple(counts.summary(reader, *self._place(reader)) for reader, counts in layers.items())
        return ActivityReport(summaries, len(everything), tuple(dead.tolist()))

    def _place(self, reader: int) -> tuple[int, str]:
        return self._places.get(reader, (reader, ""))


class _Counts:
    """One reader's activity: how often each entry was active, and how many were active per token."""

    def __init__(self) -> None:
        self.ids = torch.zeros(0, dtype=torch.int64)  # ascending
        self.fired = torch.zeros(0, dtype=torch.int64)
        self.tokens = self.active = self.most = 0  # tokens, active entries of all tokens and of any one
        self.read_all = True

    def add(self, ids: Tensor, fired: Tensor) -> None:
        if torch.equal(ids, self.ids):
            self.fired += fired
            return
        self.ids, place = torch.cat([self.ids, ids]).unique(return_inverse=True)
        self.fired = torch.zeros_like(self.ids).index_add(0, place, torch.cat([self.fired, fired]))

    def summary(self, reader: int, layer: int, name: str) -> LayerActivity:
        entries, dead = len(self.ids), int((self.fired == 0).sum())
        numbers = self.tokens, entries, self.read_all, self.active / self.tokens, self.most, dead
        return LayerActivity(layer, reader, name, *numbers)
