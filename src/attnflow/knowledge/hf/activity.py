"""`activity`: count the active entries of a model's forward passes."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnflow.knowledge.hf.readers import LayerReader, readers
from attnflow.knowledge.memory_layer.reader import Reading
from attnflow.knowledge.monitor.activity import Activity


@contextmanager
def activity(model: nn.Module) -> Generator[Activity, None, None]:
    """Count which entries are active in every forward pass inside the block.

    Where the model is given an attention mask [batch, tokens], padding does not count (in encoder-decoders it does).

    Args:
        model: converted by `from_ffn`, or a modular one.

    Yields:
        The counts so far; `.report()` puts them into tables.

    Raises:
        ValueError: a model that reads no base, or whose readings are being watched already.

    Cost: one comparison for each score; memory of one count for each entry and layer, however many tokens.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from attnflow.knowledge.hf.convert import from_ffn
    >>> model = from_ffn(LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)))
    >>> with activity(model) as seen:
    ...     _ = model(torch.arange(8).view(2, 4))
    >>> [(layer.tokens, layer.entries) for layer in seen.report().layers]
    [(8, 24), (8, 24)]
    """
    layers = readers(model)
    busy = next((reader.layer for reader in layers if reader.observer is not None), None)
    if busy is not None:
        raise ValueError(f"the readings of layer {busy} are being watched already; end that block first")
    seen, mask = Activity(), _PaddingMask()
    hook = model.register_forward_pre_hook(mask.take, with_kwargs=True)
    try:
        for reader in layers:
            reader.observer = partial(_see, seen, mask, reader)
        yield seen
    finally:
        hook.remove()
        for reader in layers:
            reader.observer = None


class _PaddingMask:
    """The attention mask of the forward pass that runs now."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None

    def take(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward pass."""
        arguments = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        mask = arguments.get("attention_mask", arguments.get("kwargs", {}).get("attention_mask"))
        two_sided = "decoder_input_ids" in arguments or "decoder_inputs_embeds" in arguments
        self._mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 and not two_sided else None

    def of(self, reading: Reading) -> Tensor | None:
        """Which tokens of a reading are no padding; with a cache, the mask has those before them, too."""
        tokens = reading.weights.shape[:-2]
        if self._mask is None or len(tokens) != 2:
            return None
        return self._mask[:, self._mask.shape[1] - tokens[1] :].expand(tokens)


def _see(seen: Activity, mask: _PaddingMask, reader: LayerReader, reading: Reading) -> None:
    # Another total is that of entries that were given in place of the model's base.
    if reading.certificate is not None and reading.certificate.total == reader.num_entries:
        seen.may_read(reading.layer, reader.ids(torch.arange(reader.num_entries)))
    seen.see(reading, reader.ids, mask.of(reading))
