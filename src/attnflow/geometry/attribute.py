"""`attribute`: reads a model's stream and one attention call of it, and sets the terms of its scores apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.geometry.attribution import ScoreAttribution
from attnflow.geometry.parts import Parts, parts_of
from attnflow.geometry.row import Row, row_of
from attnflow.models.loaded import Loaded, Text, any_inputs, model_name, sparing, split, token_texts
from attnflow.models.offload import without_numbers

if TYPE_CHECKING:
    from attnflow.models.sites import Site
    from attnflow.models.stream import RecordedCall, ResidualStream

Attention = Literal["self", "cross"]
CLOSE: Final = 1e-5  # of the range of a row: how far a sum of terms may be from the score


def attribute(
    model: nn.Module | Loaded,
    inputs: Text | Mapping[str, Tensor],
    layer: int,
    head: int | None = None,
    query: int = -1,
    keys: int | Sequence[int] | None = None,
    *,
    attention: Attention = "self",
    tokenizer: Any = None,
) -> ScoreAttribution:
    """Explain exactly why a query attended to its keys: which pairs of components made the scores.

    The residual stream before a layer is the sum of what the embedding and each earlier sublayer added, x = sum_c x^c.
    With the norms held at their scale in this pass, queries and keys are affine in these components, and so

        s_ij = sum_{c, c'} t_ij(c, c') + constant_j,   t_ij(c, c') = scaling * q_i^c . k_j^{c'}

    with rotations, norms of queries and keys, and norms after sublayers applied to each component. The constant holds
    the biases of projections and whatever is added to scores. Each call checks the sum against the score that the
    model's attention received.

    Args:
        model: a transformers model, or what `af.load_model` returned. Float32 or float64.
        inputs: a text, token ids, or the model's named inputs, of one sequence.
        layer: number of the layer; negative numbers count from the last.
        head: number of the query head; None for all heads.
        query: position of the query; negative numbers count from the last.
        keys: positions of the keys; by default all that the query may attend to.
        attention: "self", or "cross" for a decoder's attention to its encoder, whose keys have the encoder's
            components. "self" means the decoder's, in a model of two halves; pass `model.get_encoder()` for the other.
        tokenizer: needed for a text unless `model` has one; for token ids, it names the tokens.

    Returns:
        The terms in float64, with the scores, weights and names.

    Raises:
        ValueError: a layer, head, query or key that is not there, or a batch of several sequences.
        UnsupportedArchitecture: the model is of half precision, or its scores are no such sum to 1e-5 of the row's
            range (to the rounding of nearly equal scores): the message names the layer and the difference.

    Cost: one forward pass up to the layer, and components x tokens x width x head_dim multiplications. Where queries
    and keys are not a norm, a matrix and a rotation of a plain sum (as with norms after sublayers, latent attention and
    cross-attention), two more passes without the sublayers, and a backward pass for each entry of the head.
    Memory: components x tokens x width. Beyond 4,096 tokens the outputs of sublayers are not kept, and the pass is made
    twice: components x tokens x head_dim in the plain case.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2))
    >>> result = attribute(model, [5, 6, 7, 8], layer=1, head=0)
    >>> result.components
    ('embedding', 'layer 0 attention', 'layer 0 feed-forward')
    >>> bool((result.raw.sum((1, 2)) + result.constant - result.scores).abs().max() < 1e-5)
    True
    """
    module, brought = split(model)
    named = _inputs(module, inputs, tokenizer or brought)
    reading = Reading.of(module, named, layer, attention)
    return reading.explain(head, query, keys, tokenizer or brought)


def attribute_one(
    model: nn.Module | Loaded,
    inputs: Text | Mapping[str, Tensor],
    layer: int,
    query: int = -1,
    *,
    attention: Attention = "self",
    tokenizer: Any = None,
) -> ScoreAttribution:
    """Explain the head of a layer that has the most weight on a token other than the first one and the query.

    The other heads are only read, so that this takes as long as `attribute` with one head.
    """
    module, brought = split(model)
    reading = Reading.of(module, _inputs(module, inputs, tokenizer or brought), layer, attention)
    call = reading.seen.call
    at = _place("query", query, call.query.shape[2])
    rows = [row_of(call, reading.seen.output, head, at, reading.seen.added) for head in range(call.query.shape[1])]
    weights = torch.stack([row.weights for row in rows])
    if attention == "self":
        weights[:, [int(rows[0].allowed.int().argmax()), at]] *= 1e-9  # they decide only where there is no other token
    return reading.explain(int(weights.amax(1).argmax()), at, None, tokenizer or brought)


@dataclass(frozen=True, eq=False)
class Reading:
    stream: ResidualStream
    seen: RecordedCall
    layer: int
    attention: Attention

    @classmethod
    def of(cls, model: nn.Module, inputs: Mapping[str, Tensor], layer: int, attention: Attention) -> Reading:
        from attnflow.models.stream import ResidualStream

        number, site, sites, lists = _site(model, layer, attention)
        stream = ResidualStream(model, {**inputs, **sparing(model)}, site, sites, lists)
        with stream.still():
            return cls(stream, stream.record(), number, attention)

    def explain(self, head: int | None, query: int, keys: object, tokenizer: Any) -> ScoreAttribution:
        call, output = self.seen.call, self.seen.output
        num_heads, kv_heads = call.query.shape[1], call.key.shape[1]
        if num_heads % kv_heads or call.query.shape[0] != 1 or call.key.shape[0] != 1:
            raise UnsupportedArchitecture(
                f"{self.stream.site.name} calls attention with queries {list(call.query.shape)} and keys "
                f"{list(call.key.shape)}: expected one sequence, and query heads that share the key heads evenly"
            )
        heads = list(range(num_heads)) if head is None else [_place("head", head, num_heads)]
        at = _place("query", query, call.query.shape[2])
        self._refuse_pad(at)
        rows = [row_of(call, output, one, at, self.seen.added) for one in heads]
        chosen = _keys(keys, rows)
        rows = [row.until(max(int(one.allowed.nonzero().amax()) for one in rows) + 1) for row in rows]
        parts = parts_of(self.stream, self.seen, heads, at, len(rows[0].allowed))
        terms = [self._head(parts, row, n, one) for n, (row, one) in enumerate(zip(rows, heads, strict=True))]
        error = max(one["error"] for one in terms)

        def stack(name: str) -> Tensor:
            return torch.stack([one[name] for one in terms]) if head is None else terms[0][name]

        names = dict.fromkeys(name for row in rows for name in ("biases", *row.added))
        constants = {
            name: torch.stack([one["constants"].get(name, torch.zeros_like(one["scores"])) for one in terms])[:, chosen]
            for name in names
        }
        means = {name: torch.stack([one["expected_constants"].get(name, _ZERO) for one in terms]) for name in names}
        titles = self.stream.names(sorted({*parts.query_components, *parts.key_components}))
        query_texts, key_texts = self._texts(tokenizer)
        return ScoreAttribution(
            model_name(self.stream.model),
            self.layer,
            None if head is None else heads[0],
            tuple(heads),
            self.attention,
            at,
            query_texts[at],
            tuple(chosen),
            tuple(key_texts[key] for key in chosen),
            tuple(titles[c] for c in parts.query_components),
            tuple(titles[c] for c in parts.key_components),
            stack("raw")[..., chosen, :, :],
            {name: value if head is None else value[0] for name, value in constants.items()},
            stack("scores")[..., chosen],
            stack("weights")[..., chosen],
            stack("slope")[..., chosen],
            stack("expected"),
            {name: expected if head is None else expected[0] for name, expected in means.items()},
            error,
        )

    def _head(self, parts: Parts, row: Row, number: int, head: int) -> dict[str, Any]:
        """The terms of one head, over all keys, after the check."""
        group = self.seen.call.query.shape[1] // self.seen.call.key.shape[1]
        q, q0 = parts.query[number], parts.query_constant[number]  # [components, head_dim], [head_dim]
        k, k0 = parts.key[head // group], parts.key_constant[head // group]  # [components, keys, head_dim]
        raw = torch.einsum("ch,djh->jcd", row.scaling * q, k)
        biases = row.scaling * (k0 @ (q.sum(0) + q0) + k.sum(0) @ q0)
        scores = row.product
        total = raw.sum((1, 2)) + biases
        seen = scores[row.allowed]
        size = float(seen.abs().amax())
        rounded = 16 * torch.finfo(self.seen.call.query.dtype).eps * size  # of scores that may be nearly equal
        span = max(float(seen.amax() - seen.amin()), rounded / CLOSE) if len(seen) > 1 else size
        error = float((total - scores)[row.allowed].abs().amax()) / (span or 1.0)
        if not error <= CLOSE:
            raise UnsupportedArchitecture(
                f"layer {self.layer} ({self.stream.site.name}), head {head}: the terms do not add up to the score that "
                f"attention received (they differ by {error:.2g} of the row's range, {CLOSE:g} is allowed), so that no "
                "attribution of it is given. In float32, model.double() tells rounding from an unknown part"
            )
        for added in row.added.values():
            scores = scores + added
        weights, slope = row.weights, row.slope
        return {
            "raw": raw,
            "constants": {"biases": biases, **row.added},
            "scores": scores,
            "weights": weights,
            "slope": slope,
            "expected": torch.einsum("j,jcd->cd", weights * slope, raw),
            "expected_constants": {"biases": weights * slope @ biases} | {n: weights @ v for n, v in row.added.items()},
            "error": error,
        }

    def _refuse_pad(self, query: int) -> None:
        name = "decoder_attention_mask" if self._two else "attention_mask"
        mask = self.stream.inputs.get(name)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return
        added = max(0, self.seen.call.query.shape[2] - mask.shape[1])  # virtual tokens of a prompt, before the others
        if query >= added and not bool(mask[0, query - added : query - added + 1].all()):
            raise ValueError(f"query {query} is a pad by the {name}; choose a position whose mask is 1")

    @property
    def _two(self) -> bool:
        return getattr(getattr(self.stream.model, "config", None), "is_encoder_decoder", False) is True

    def _texts(self, tokenizer: Any) -> tuple[list[str], list[str]]:
        """The texts of queries and keys; numbers of positions where they are no tokens."""
        inputs, call = self.stream.inputs, self.seen.call
        name = "decoder_input_ids" if self._two and "decoder_input_ids" in inputs else "input_ids"
        other = "input_ids" if self.attention == "cross" else name

        def texts(name: str, count: int) -> list[str]:
            ids = inputs.get(name)
            if not isinstance(ids, Tensor) or ids.shape[-1] != count:
                return [str(position) for position in range(count)]
            return token_texts(ids[0].tolist(), tokenizer)

        return texts(name, call.query.shape[2]), texts(other, call.key.shape[2])


def _inputs(model: nn.Module, inputs: object, tokenizer: Any) -> dict[str, Tensor]:
    if without_numbers(model) or any(parameter.is_inference() for parameter in model.parameters()):
        raise UnsupportedArchitecture(
            "the weights are on the meta device, or were made in torch.inference_mode(): load the model outside of both"
        )
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype not in _PRECISE), None)
    if kind is not None:
        raise UnsupportedArchitecture(
            f"the weights are {str(kind).removeprefix('torch.')}, whose residual sums are rounded to 2 or 3 digits, so "
            "that no attribution of a score can be checked; call model.float() first"
        )
    named = any_inputs(model, inputs, tokenizer)
    for name, value in named.items():
        if name.endswith("input_ids") and len(value) != 1:
            raise ValueError(f"attribute takes one sequence, got a batch of {len(value)} in {name}: pass one row of it")
    return named


_ZERO: Final = torch.zeros((), dtype=torch.float64, device="cpu")
_PRECISE: Final = (torch.float32, torch.float64)


def _site(model: nn.Module, layer: object, attention: object) -> tuple[int, Site, Sequence[Site], dict[str, str]]:
    from attnflow.models.sites import find_sites, one_owner

    if attention not in ("self", "cross"):
        raise ValueError(f'attention must be "self" or "cross", got {attention!r}')
    every = find_sites(model)
    sites = [site for site in every if site.kind == attention]
    if not sites:
        others = "" if not every else f": pass attention={every[0].kind!r}"
        raise UnsupportedArchitecture(
            f"{type(model).__name__} has no {attention}-attention on the attention interface{others}"
        )
    decoders = [site for site in sites if site.part == "decoder"]
    sites = one_owner(decoders or sites)
    prefix = sites[0].layers
    by_layer: dict[int, Site] = {}
    for site in sites:
        if site.name != prefix and site.layers == prefix:
            by_layer.setdefault(int(site.name[len(prefix) :].split(".")[1]), site)
    if not by_layer:
        raise UnsupportedArchitecture(f"the attention of {type(model).__name__} lies in no list of layers ({prefix})")
    count = len(cast(nn.ModuleList, model.get_submodule(prefix)))
    depth = getattr(sites[0].owner.config, "num_hidden_layers", None)
    held = max(count, sum(site.layers == prefix for site in sites))
    calls = depth if isinstance(depth, int) and not sites[0].part and held < depth else count
    number = _place("layer", layer, calls)
    if number and calls > count:
        raise ValueError(
            f"layer {number} is a later call of weights that {depth} layers share; layers with it: [0]. If layers were "
            f"removed, set config.num_hidden_layers to {count}"
        )
    if number not in by_layer:
        raise ValueError(
            f"layer {number} has no {attention}-attention; layers with it: {checks.preview(sorted(by_layer))}"
        )
    lists = {site.layers: "" for site in every if site.owner is by_layer[number].owner}
    if attention == "cross":
        lists |= {site.layers: "encoder" for site in every if site.part == "encoder"}
    return number, by_layer[number], every, lists


def _place(name: str, value: object, count: int) -> int:
    number = checks.integer(name, value, -count, count - 1, why=f": there are {count}, numbered from 0")
    return number % count


def _keys(keys: object, rows: Sequence[Row]) -> list[int]:
    """The positions of the keys, all of which the query may attend to."""
    allowed = torch.stack([row.allowed for row in rows]).any(0)
    possible: list[int] = allowed.nonzero().flatten().tolist()
    if keys is None:
        return possible
    one = isinstance(keys, int) or getattr(keys, "shape", None) == ()
    listed = [keys] if one else checks.index_array("keys", keys).tolist()
    count = len(allowed)
    chosen = [_place("each of keys", key, count) for key in listed]
    forbidden = [key for key in chosen if key not in possible]
    if forbidden or not chosen:
        raise ValueError(
            f"keys must list positions that the query may attend to, {checks.preview(possible)}, "
            f"got {forbidden or 'none'}"
        )
    return chosen
