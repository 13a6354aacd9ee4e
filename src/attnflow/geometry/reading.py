"""`reading`: passes of a model kept for many explanations of its scores; `attribute` is one explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.handles import Handle
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.geometry.parts import parts_of
from attnflow.geometry.row import ScoreRow, row_of
from attnflow.geometry.terms import attribution_of, head_terms
from attnflow.models.passes.evaluation import still
from attnflow.models.subject import Loaded, Subject, Text

if TYPE_CHECKING:
    from attnflow.models.anatomy.sites import Site
    from attnflow.models.passes.interception import AttentionCall
    from attnflow.models.passes.stream import RecordedCall, ResidualStream

AttentionKind = Literal["self", "cross"]


def attribute(
    model: nn.Module | Loaded,
    inputs: Text | Mapping[str, Tensor],
    layer: int,
    head: int | None = None,
    query: int = -1,
    key: int | Sequence[int] | Tensor | None = None,
    *,
    against: int | Literal["strongest"] | None = None,
    attention: AttentionKind = "self",
    tokenizer: Any = None,
) -> ScoreAttribution:
    """Explain exactly why a query attended to its keys: which pairs of components made the scores.

    The residual stream before a layer is the sum of what the embedding and each earlier sublayer added, x = sum_c x^c.
    With the norms held at their scale in this pass, queries and keys are affine in these components, and so

        s_ij = sum_{c, c'} t_ij(c, c') + constant_j,   t_ij(c, c') = scaling * q_i^c . k_j^{c'}

    with rotations, norms of queries and keys, and norms after sublayers applied to each component. The constant holds
    the biases of projections and whatever is added to scores. Each call checks the sum against the score that the
    model's attention received. `reading` gives many explanations of the same inputs.

    Args:
        model: a transformers model, or what `af.load_model` returned. Float32 or float64.
        inputs: a text, token ids, or the model's named inputs, of one sequence.
        layer: number of the layer; negative numbers count from the last.
        head: number of the query head; None for all heads.
        query: position of the query; negative numbers count from the last.
        key: position of the key, or several; by default all that the query may attend to.
        against: position of another key with which `key` is compared: `contrast` of the result has the
            terms of both less each other. "strongest" is the one with most weight that is not the first token.
        attention: "self", or "cross" for a decoder's attention to its encoder, whose keys have the encoder's
            components. "self" means the decoder's, in a model of two halves; pass `model.get_encoder()` for the other.
        tokenizer: needed for a text unless `model` has one; for token ids, it names the tokens.

    Returns:
        The terms in float64, with the scores, weights and names.

    Raises:
        ValueError: a layer, head, query or key that is not there, or a batch of several sequences.
        UnsupportedArchitecture: the model is of half precision, or its scores are no such sum to 1e-5 of the row's
            range (to the rounding of nearly equal scores): the message names the layer and the difference.

    Cost: one forward pass up to the layer, and components x tokens x width x head_dim multiplications. Two more
    passes without the sublayers, and a backward pass for each entry of the head, if queries and keys are not a norm, a
    matrix and a rotation of a plain sum. So it is with norms after sublayers, latent attention and cross-attention.
    Memory: components x tokens x width. Beyond 4,096 tokens the outputs of sublayers are not kept, and the pass is made
    twice: components x tokens x head_dim in the plain case.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> result = attribute(model, [5, 6, 7, 8], layer=1, head=0)
    >>> print(*result.components, sep=", ")
    embedding, layer 0 attention, layer 0 feed-forward
    >>> bool((result.raw.sum((1, 2)) + result.constant - result.scores).abs().max() < 1e-5)
    True
    """
    with reading(model, inputs, tokenizer=tokenizer) as handle:
        return handle.explain(layer, head, query, key, against=against, attention=attention)


def reading(
    model: nn.Module | Loaded, inputs: Text | Mapping[str, Tensor], *, tokenizer: Any = None
) -> AttentionReading:
    """Read a model on inputs of one sequence, to explain several of its heads, queries and layers.

    The handle keeps the pass up to the layer that was explained last, so that other heads and queries of this layer
    need no other pass. The model itself is unchanged, and must not change while the handle is in use.

    Args:
        model: a transformers model, or what `af.load_model` returned. Float32 or float64.
        inputs: a text, token ids, or the model's named inputs, of one sequence.
        tokenizer: needed for a text unless `model` has one; for token ids, it names the tokens.

    Raises:
        ValueError: no transformers model, or a batch of several sequences.
        UnsupportedArchitecture: the model is of half precision, or does not use the attention interface.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> with reading(model, [5, 6, 7, 8]) as handle:
    ...     [handle.explain(layer=1, head=head, query=3).tokens for head in (0, 1)]
    [('5', '6', '7', '8'), ('5', '6', '7', '8')]
    """
    subject = Subject.of(model, tokenizer).inside
    return AttentionReading(subject, subject.read_one(inputs))


@dataclass(frozen=True, eq=False)
class _LayerPass:
    layer: int
    attention: AttentionKind
    stream: ResidualStream
    seen: RecordedCall

    @property
    def call(self) -> AttentionCall:
        return self.seen.call

    def row(self, head: int, query: int) -> ScoreRow:
        return row_of(self.call, self.seen.output, head, query, self.seen.added)


class AttentionReading(Handle):
    """The handle of `reading`: it explains scores of a model, and keeps a recorded pass until it is removed."""

    def __init__(self, subject: Subject, inputs: dict[str, Tensor]) -> None:
        super().__init__(subject.model)
        self._inputs = {name: value.clone() for name, value in inputs.items()}  # the caller may write to theirs
        self._subject = subject
        self._sites = subject.sites
        self._last: _LayerPass | None = None

    def explain(
        self,
        layer: int,
        head: int | None = None,
        query: int = -1,
        key: int | Sequence[int] | Tensor | None = None,
        *,
        against: int | Literal["strongest"] | None = None,
        attention: AttentionKind = "self",
    ) -> ScoreAttribution:
        """Explain why a query attended to its keys: what `attribute` returns for the same arguments.

        Raises:
            ValueError: a layer, head, query or key that is not there.
            UnsupportedArchitecture: the scores are no sum of terms, or the model has changed since it was read.
            RuntimeError: the handle was removed.
        """
        passed = self._pass(layer, attention)
        heads = list(range(passed.call.query.shape[1]))
        heads = heads if head is None else [_place("head", head, len(heads))]
        at = self._query(passed, query)
        rows = [passed.row(index, at) for index in heads]
        chosen = _keys(key, rows)
        if against is not None:
            chosen.append(_other(chosen, against, rows, attention))
        rows = [row.until(max(int(row.allowed.nonzero().amax()) for row in rows) + 1) for row in rows]
        parts = parts_of(passed.stream, passed.seen, heads, at, len(rows[0].allowed))
        where = f"layer {passed.layer} ({passed.stream.site.name}), head"
        terms = [
            head_terms(parts, number, index, row, passed.call, f"{where} {index}")
            for number, (index, row) in enumerate(zip(heads, rows, strict=True))
        ]
        query_texts, key_texts = self._texts(passed)
        return attribution_of(
            terms, parts, passed.stream, chosen, one_head=head is not None,
            against=None if against is None else chosen[-1], layer=passed.layer, heads=tuple(heads),
            attention=passed.attention, query=at, query_token=query_texts[at],
            tokens=tuple(key_texts[key] for key in chosen),
        )  # fmt: skip

    def telling_head(self, layer: int, query: int = -1, *, attention: AttentionKind = "self") -> int:
        """Return the head with the most weight on a token other than the first one and the query.

        The heads are only read, so that this takes no longer than an explanation of one.
        """
        passed = self._pass(layer, attention)
        at = _place("query", query, passed.call.query.shape[2])
        rows = [passed.row(head, at) for head in range(passed.call.query.shape[1])]
        weights = torch.stack([row.weights for row in rows])
        if attention == "self":  # the two decide only where there is no other token
            weights[:, [int(rows[0].allowed.int().argmax()), at]] *= 1e-9
        return int(weights.amax(1).argmax())

    def _pass(self, layer: int, attention: AttentionKind) -> _LayerPass:
        from attnflow.models.passes.stream import ResidualStream

        if not self.active:
            raise RuntimeError("this reading was removed: call af.geometry.reading again")
        number, site = _layer_site(self.model, self._sites, layer, attention)
        if self._last is None or (self._last.layer, self._last.attention) != (number, attention):
            self._last = None  # its memory is free before the next pass
            lists = {other.layers: "" for other in self._sites if other.owner is site.owner}
            if attention == "cross":
                lists |= {other.layers: "encoder" for other in self._sites if other.part == "encoder"}
            stream = ResidualStream(self.model, {**self._inputs, **self._subject.sparing}, site, self._sites, lists)
            with still(self.model):
                passed = _LayerPass(number, attention, stream, stream.record())
            queries, keys = passed.call.query.shape, passed.call.key.shape
            if queries[1] % keys[1] or queries[0] != 1 or keys[0] != 1:
                raise UnsupportedArchitecture(
                    f"{site.name} calls attention with queries {list(queries)} and keys {list(keys)}: expected one "
                    "sequence, and query heads that share the key heads evenly"
                )
            self._last = passed
        return self._last

    def _query(self, passed: _LayerPass, query: object) -> int:
        at = _place("query", query, passed.call.query.shape[2])
        name = "decoder_attention_mask" if self._subject.encodes_and_decodes else "attention_mask"
        mask = self._inputs.get(name)
        if mask is not None and mask.ndim == 2:
            added = max(0, passed.call.query.shape[2] - mask.shape[1])  # virtual tokens of a prompt, before the others
            if at >= added and not bool(mask[0, at - added : at - added + 1].all()):
                raise ValueError(f"query {at} is a pad by the {name}; choose a position whose mask is 1")
        return at

    def _texts(self, passed: _LayerPass) -> tuple[list[str], list[str]]:
        """The texts of queries and keys; numbers of positions where they are not tokens."""
        two = self._subject.encodes_and_decodes and "decoder_input_ids" in self._inputs
        name = "decoder_input_ids" if two else "input_ids"
        other = "input_ids" if passed.attention == "cross" else name

        def texts(name: str, count: int) -> list[str]:
            ids = self._inputs.get(name)
            if ids is None or ids.shape[-1] != count:
                return [str(position) for position in range(count)]
            return self._subject.texts(ids[0].tolist())

        return texts(name, passed.call.query.shape[2]), texts(other, passed.call.key.shape[2])

    def _restore(self) -> None:
        self._last = None  # the model was not changed

    def _summary(self) -> str:
        kept = "no pass yet" if self._last is None else f"the pass up to layer {self._last.layer} is kept"
        return f"reads the scores of {self.kind}; {kept}"


def _layer_site(model: nn.Module, every: Sequence[Site], layer: object, attention: object) -> tuple[int, Site]:
    from attnflow.models.anatomy.sites import one_owner

    if attention not in ("self", "cross"):
        raise ValueError(f'attention must be "self" or "cross", got {attention!r}')
    sites = [site for site in every if site.kind == attention]
    if not sites:
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no {attention}-attention on the attention interface: "
            f"pass attention={every[0].kind!r}"
        )
    sites = one_owner([site for site in sites if site.part == "decoder"] or sites)
    prefix = sites[0].layers
    in_list = [site for site in sites if site.layers == prefix]
    by_layer: dict[int, Site] = {}
    for site in in_list:
        if site.name != prefix:
            by_layer.setdefault(int(site.name[len(prefix) :].split(".")[1]), site)
    if not by_layer:
        raise UnsupportedArchitecture(f"the attention of {type(model).__name__} lies in no list of layers ({prefix})")
    count = len(cast(nn.ModuleList, model.get_submodule(prefix)))
    depth = getattr(sites[0].owner.config, "num_hidden_layers", None)
    shares = isinstance(depth, int) and not sites[0].part and max(count, len(in_list)) < depth
    number = _place("layer", layer, cast(int, depth) if shares else count)
    if number and shares:
        raise ValueError(
            f"layer {number} is a later call of weights that {depth} layers share; layers with it: [0]. If layers were "
            f"removed, set config.num_hidden_layers to {count}"
        )
    if number not in by_layer:
        raise ValueError(
            f"layer {number} has no {attention}-attention; layers with it: {checks.preview(sorted(by_layer))}"
        )
    return number, by_layer[number]


def _place(name: str, value: object, count: int) -> int:
    number = checks.integer(name, value, -count, count - 1, why=f": there are {count}, numbered from 0")
    return number % count


def _other(keys: Sequence[int], against: object, rows: Sequence[ScoreRow], attention: AttentionKind) -> int:
    """The key to compare one with: given, or the one with most weight beside it and the first token."""
    if len(keys) != 1:
        raise ValueError(f"against compares one key with another, got {len(keys)} keys: pass key=position")
    if against != "strongest":
        (other,) = _keys(against, rows)
        if other == keys[0]:
            raise ValueError(f"key {other} is compared with itself: choose another position for against")
        return other
    weights = torch.stack([row.weights for row in rows]).amax(0).where(rows[0].allowed, -1.0)
    if attention == "self":  # the first token decides only where there is no other
        weights[rows[0].allowed.int().argmax()] *= 1e-9
    weights[keys[0]] = -2.0
    if float(weights.max()) < 0:
        raise ValueError(f"the query may attend to no key but {keys[0]}, so nothing can be compared with it")
    return int(weights.argmax())


def _keys(given: object, rows: Sequence[ScoreRow]) -> list[int]:
    """The positions of the keys; the query may attend to all of them."""
    allowed = torch.stack([row.allowed for row in rows]).any(0)
    possible: list[int] = allowed.nonzero().flatten().tolist()
    if given is None:
        return possible
    single = isinstance(given, int) or getattr(given, "shape", None) == ()
    listed = [given] if single else checks.index_array("key", given).tolist()
    chosen = [_place("key", key, len(allowed)) for key in listed]
    forbidden = [key for key in chosen if key not in possible]
    if forbidden or not chosen:
        raise ValueError(
            f"key must list positions that the query may attend to, {checks.preview(possible)}, "
            f"got {forbidden or 'none'}"
        )
    return chosen
