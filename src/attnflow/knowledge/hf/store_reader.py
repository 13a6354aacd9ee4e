"""What lets a layer of any decoder read a store: cross-attention to its entries, added to the tokens behind a gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core.checks import integer
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.attention import GeneralizedCrossAttention, softmax_one
from attnflow.knowledge.hf.pooled_values import PooledValues
from attnflow.knowledge.index.arguments import Vectors
from attnflow.knowledge.layered import LayerReader
from attnflow.knowledge.memory_layer.reader import KnowledgeReader, Reading
from attnflow.knowledge.memory_layer.source import StoredKnowledge
from attnflow.knowledge.store import Store, StoreError
from attnflow.models.evaluation import REFUSALS, evaluating, refusal
from attnflow.models.inputs import ordinary_tokens, sparing
from attnflow.models.interception import AttentionCall, Output, Proceed, intercept
from attnflow.models.layers import Stack
from attnflow.models.sites import models_around

CHILD: Final = "knowledge_reader"  # of an attention module
_TRIES: Final = 100
_OWN: Final = 0.1  # weight of the token itself beside what all say together
_SHARE: Final = 2 / 3  # of the layers, above which readers stand by default


class FollowedStore(StoredKnowledge):
    """A store that the readers of one model read: its entries as one tensor, taken anew when they were edited.

    Attributes:
        encoder: that made them.
    """

    def __init__(self, store: Store, encoder: str) -> None:
        super().__init__(store)
        self.encoder = encoder
        self._revision: int | None = None
        self._ids = torch.zeros(0, dtype=torch.int64)
        self.cpu_rows = torch.zeros(0, store.dim)
        self.at: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def entries(self, like: Tensor) -> Float[Tensor, "entries entry_dim"]:
        """E on the device and in the precision of a tensor.

        Raises:
            StoreError: the store was closed, or cannot be read.
        """
        return _untraced(self, like)

    def ids(self) -> Int[Tensor, " entries"]:
        """The ids of the rows of `entries`."""
        self.follow()
        return self._ids

    def rows(self) -> Float[Tensor, "entries entry_dim"]:
        """E, as it is in the store."""
        self.follow()
        return self.cpu_rows

    def insert(
        self,
        embeddings: Vectors,
        *,
        layers: Sequence[int] | None = None,
        experts: Sequence[int | None] | None = None,
        **columns: Any,
    ) -> Int64[Tensor, " n"]:
        """`Store.insert`, by the encoder of the others unless another one is named."""
        if layers is not None or experts is not None:
            raise ValueError("all readers of a model read all entries: leave layers and experts out")
        return super().insert(embeddings, **{"encoder": self.encoder or None, **columns})

    def follow(self) -> None:
        """Take the entries anew if they were edited."""
        len(self.store)  # raises if it was closed
        for _ in range(_TRIES):
            revision = self.store.revision
            if revision == self._revision:
                return
            ids = self.store.ids()
            try:
                rows = self.store.vectors(ids)
            except KeyError:  # deleted by another thread between the two
                continue
            self._revision, self._ids, self.cpu_rows = revision, ids, rows
            self.at.clear()
            return
        raise StoreError(f"entries were deleted faster than they could be read {_TRIES} times")


@dataclass(frozen=True)
class Widths:
    """Of what a layer works on: its tokens, and the values of its attention."""

    model_dim: int
    value_dim: int  # of all heads, each set of shared values once


def _current(source: FollowedStore, like: Tensor) -> Tensor:
    """The entries of a store, in the precision and on the device of a tensor."""
    source.follow()
    key = like.device, like.dtype
    if key not in source.at:
        source.at[key] = source.cpu_rows.to(like)
    return source.at[key]


# No part of a compiled graph: anybody may edit the entries between two tokens.
_untraced: Final = cast("Callable[[FollowedStore, Tensor], Tensor]", torch.compiler.disable(_current))


class StoreReader(KnowledgeReader, LayerReader):
    """H' = H + gate sqrt(d) C(X, E) after a layer: reads a store, and adds what it reads to each token.

    What a token asks for stands in other tokens, "the colour of Balorin" in five; of the last one alone the right entry
    cannot be told. So X = own norm(H) + P W_P, where P is what all tokens that this one may attend to say together
    (`PooledValues`).

    C is generalized cross-attention (knowledge, eq. 1-9) with the weights of `softmax_one`: score = x W_Q W_K^T e /
    sqrt(d_k) + b; all entries compete with one of score 0, so that a token to which nothing in the store belongs gets
    next to nothing. The query goes to the entries: an edit is one row, whatever number of layers read it.

    Attributes:
        gate: one number; 0 at first, with which the model is as it was, bit for bit.
        source: the store, shared by all readers of a model.
        given: entries that are read instead of the store's, as in training; or a function of the reader and of what
            tokens ask by, which says what is read before the gate; or None.
    """

    def __init__(
        self, layer: int, model_dim: int, pooled: PooledValues, key_dim: int, num_heads: int, source: FollowedStore
    ) -> None:
        attention = GeneralizedCrossAttention(
            model_dim,
            key_dim,
            source.store.dim,
            num_heads=num_heads,
            activation=softmax_one,
            threshold="constant",
            bias=False,
        )
        nn.init.normal_(attention.key)  # entries have length 1: scores with standard deviation 1
        super().__init__(layer, attention)
        self.gate = nn.Parameter(torch.zeros(()))
        self.own = nn.Parameter(torch.full((), _OWN))
        self.pooled = pooled
        self.pooled_map = nn.Linear(pooled.width, model_dim, bias=False)
        nn.init.normal_(self.pooled_map.weight, std=pooled.width**-0.5)
        self.source = source
        self.given: Tensor | Callable[[StoreReader, Tensor], Tensor] | None = None

    def read(self, hidden: Float[Tensor, "batch tokens model_dim"]) -> Float[Tensor, "batch tokens model_dim"]:
        """What the store adds to tokens as they leave the layer."""
        kind = self.gate.dtype
        with torch.autocast(hidden.device.type, enabled=False):
            asked = self.asked(hidden.to(kind), self.pooled.read(self.layer, hidden, kind))
            return self(asked).to(hidden.dtype)

    def asked(
        self, hidden: Float[Tensor, "*tokens model_dim"], pooled: Float[Tensor, "*tokens width"]
    ) -> Float[Tensor, "*tokens model_dim"]:
        """X, what tokens ask by."""
        return self.own * functional.rms_norm(hidden, hidden.shape[-1:]) + self.pooled_map(pooled)

    def forward(self, hidden: Tensor, source: object = None) -> Float[Tensor, "*tokens model_dim"]:
        """What the store adds, by the queries of tokens."""
        if isinstance(self.given, Tensor):
            return self._scale * super().forward(hidden, self.given)
        if self.given is not None:
            return self._scale * self.given(self, hidden)
        read = self.source.entries(hidden) if self.retrieval is None else self.source
        return self._scale * super().forward(hidden, read)

    @property
    def num_entries(self) -> int:
        """Of the store."""
        return self.source.num_entries

    @property
    def output_bias(self) -> Tensor | None:
        """None."""
        return None

    def ids(self, positions: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """What a search gave are ids; of all entries, read in order, positions are turned into ids by `every`."""
        return positions

    def every(self) -> Int[Tensor, " entries"]:
        """The ids of all entries."""
        return self.source.ids()

    def values(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "heads entries model_dim"]:
        """gate sqrt(d) E W_V of entries with these ids."""
        rows = self.source.store.vectors(positions.cpu()).to(self.attention.value)
        return self._scale * torch.einsum("ne,hed->hnd", rows, self.attention.value)

    def thresholds(self, positions: Int[Tensor, " entries"]) -> Float[Tensor, "parts heads entries"]:
        """b, the same for all."""
        return self.attention.constant.unsqueeze(-1).expand(-1, -1, len(positions))

    def error_bound(self, reading: Reading, source: object = None) -> Float[Tensor, " tokens"]:
        """At most twice the weight that entries left out could have had, times the largest norm of a value.

        With Z = 1 + the sum of exp(score) over what was read, n entries left out and s the last score, that weight is
        n exp(s) / (Z + n exp(s)).
        """
        if reading.certificate is None:
            return reading.weights.new_zeros(reading.weights.shape[:-2].numel())
        certificate, heads = reading.certificate, self.attention.num_heads
        scores = reading.scores[0].double().flatten(0, -3)  # [tokens, heads, read]
        absent = cast(Tensor, reading.ids).view(scores.shape) < 0
        logit = torch.logaddexp(scores.masked_fill(absent, -math.inf).logsumexp(-1), scores.new_zeros(()))
        last = certificate.last.to(scores).view(-1, heads) + self.attention.constant[0].detach()
        left_out = certificate.left_out.to(scores).view(-1, heads)
        share = torch.sigmoid(left_out.log() + last - logit)
        if certificate.approximate:
            share = torch.full_like(share, math.inf)
        rows = self.source.entries(self.attention.value)
        values = torch.einsum("ne,hed->hnd", rows, self.attention.value.detach()).norm(dim=-1).amax(-1)
        return (2 * share * values.to(share) * self._scale.detach().abs()).sum(-1)

    @property
    def _scale(self) -> Tensor:
        return self.gate * math.sqrt(self.attention.model_dim)


def read_after(path: str, layer: nn.Module, _: object, output: Any) -> Any:
    """Forward hook of a layer: its output, with what its reader, below the attention module at `path`, reads."""
    reader = reader_of(layer.get_submodule(path))
    hidden = output[0] if isinstance(output, tuple) else output
    added = hidden + reader.read(hidden)
    return (added, *output[1:]) if isinstance(output, tuple) else added


def reader_of(module: nn.Module) -> StoreReader:
    """The reader of an attention module."""
    reader = getattr(module, CHILD)
    if not isinstance(reader, StoreReader):  # wrapped, and with it taken out of force
        raise RuntimeError(
            f"the reader of {type(module).__name__} was replaced by a {type(reader).__name__}; leave {CHILD!r} out of "
            "what an adapter wraps (modules_to_save): a reader is trained and saved by itself"
        )
    return reader


def store_readers(model: nn.Module) -> list[StoreReader]:
    """The readers that `attach` put into a model, in the order of layers."""
    return [module for module in model.modules() if isinstance(module, StoreReader)]


def checked_layers(layers: Sequence[int] | None, stack: Stack) -> list[int]:
    """The numbers of layers that get a reader, by default every second one of the last third but the last.

    Raises:
        ValueError: other layers than the model has.
        UnsupportedArchitecture: layers without attention.
    """
    number, able = len(stack.layers), sorted(stack.attention)
    if layers is None:
        few = [layer for layer in able if layer >= int(number * _SHARE)] or able[-1:]
        return few[:-1:2] or few
    if isinstance(cast(object, layers), str) or not layers:
        raise ValueError(f"layers must list numbers of layers, 0 to {number - 1}, got {layers!r}")
    chosen = [integer("layer", one, 0, number - 1) for one in layers]
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"layers must name each layer once, got {chosen}")
    without = [layer for layer in chosen if layer not in stack.attention]
    if without:
        raise UnsupportedArchitecture(f"layers {without} have no self-attention that a reader could ask by: {able} do")
    return sorted(chosen)


def measured(stack: Stack, chosen: Sequence[int]) -> dict[int, Widths]:
    """The widths that layers work on, measured by running the model on two tokens; it is as it was.

    Raises:
        UnsupportedArchitecture: a model that does not run on token ids, or a layer that does not return tokens.
    """
    names = {stack.attention[number].module: number for number in chosen}
    values: dict[int, int] = {}
    seen: dict[int, Any] = {}

    def look(call: AttentionCall, proceed: Proceed) -> Output:
        output, weights = proceed(call)
        values[names[call.module]] = call.key.shape[1] * output.shape[-1]
        return output, weights

    def keep(number: int, _: nn.Module, __: object, output: Any) -> None:
        seen[number] = output[0] if isinstance(output, tuple) else output

    around = models_around(list(stack.attention.values()))
    with ExitStack() as undo:
        interception = intercept(around, dict.fromkeys(names, look), role="pool")
        undo.callback(interception.remove)
        for number in chosen:
            undo.enter_context(stack.layers[number].register_forward_hook(partial(keep, number)))
        undo.enter_context(evaluating(around[0]))
        undo.enter_context(torch.no_grad())
        device = next(stack.layers[chosen[0]].parameters()).device
        try:
            ids = torch.tensor([ordinary_tokens(around[0], 2)], device=device)
            cast(Any, around[0])(input_ids=ids, **sparing(around[0]))
        except REFUSALS as error:
            raise UnsupportedArchitecture(
                f"{type(around[0]).__name__} does not run on two token ids, by which a reader sees its layers: "
                f"{refusal(error)}"
            ) from error
    result: dict[int, Widths] = {}
    for number in chosen:
        hidden = seen.get(number)
        if number not in values or not isinstance(hidden, Tensor) or hidden.shape[:2] != (1, 2) or hidden.ndim != 3:
            raise UnsupportedArchitecture(
                f"layer {number} ({type(stack.layers[number]).__name__}) does not return tokens [batch, tokens, width] "
                "to which a reader could add"
            )
        result[number] = Widths(hidden.shape[-1], values[number])
    return result
