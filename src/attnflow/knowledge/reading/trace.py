"""`trace`: runs a transformers model whose layers read entries, and records which entries fired in each layer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.convert import from_ffn
from attnflow.knowledge.layered import LayerReader, SharedReader, observed, readers, reads_entries, unobserved
from attnflow.knowledge.reader import LayerReading
from attnflow.knowledge.reading.ablation import LocatedEntry, logits_without
from attnflow.knowledge.reading.direct_effect import Directions, Kind, Stream, directions, wide
from attnflow.knowledge.reading.provenance import By, LayerTrace, Promoted, Trace
from attnflow.knowledge.store.source import EntrySource
from attnflow.models.passes.evaluation import evaluating
from attnflow.models.subject import Loaded, Subject, Text

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_PROMOTED: Final = 5  # tokens named for an entry
_LAST: Final = 40  # entries of the last position, as a page lists them, whose tokens are named first
_WEIGHTS: Final = 1 << 22  # weights that are worked on at once, of all entries and as many tokens as that allows
_BLOCK: Final = 1 << 13  # entries whose values are held at once


def trace(
    model: nn.Module | Loaded,
    inputs: Text,
    *,
    positions: int | Sequence[int] | None = None,
    top: int = 16,
    by: By | None = None,
    targets: str | int | Sequence[str | int] | None = None,
    promoted: int = 128,
    ablate: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Trace:
    """Record which entries fired for each token and layer of a text, and their effect on the next token's logit.

    Args:
        model: any model, or what `af.load_model` returned. If it is not converted, a converted copy is traced.
        inputs: a text; token ids [tokens] or [1, tokens]; or the model's named inputs for one sequence.
        positions: the tokens to trace, with negative positions counted from the end; by default all.
        top: how many entries are kept for each token and layer.
        by: which entries to keep: those with the largest absolute direct "effect", or with the largest contribution
            ("norm"); by default "effect" if the model has direct effects.
        targets: the tokens whose logits the effects refer to, one for all positions or one each; by default the next
            token of the text, and at its end the token that the model finds most likely.
        promoted: for how many entries to find the tokens that they promote and suppress most: the strongest 40 of the
            last position first, then the strongest of each.
        ablate: how many leading entries of each position, of all layers, to take out of the model one by one (0 to
            `top`), to measure what the target's logit and probability lose.
        tokenizer: needed for a text unless `model` has one; for token ids, it names the tokens.

    Returns:
        The trace of all layers that run, on the CPU, in float32 (float64 for a model in float64). The experts of a
        layer count as one layer, and shared experts as another. Entries of an attached store have their texts. Some
        models have no direct effects in closed form; `.without` then says why.

    Raises:
        ValueError: a position does not exist, or a target is not one token.
        UnsupportedArchitecture: an encoder-decoder model, or one with unknown feed-forward layers; to ablate, also a
            model without logits, or one whose sequences of a batch influence one another.

    Cost: two forward passes (the first finds the scale of the final norm), one more product with the values for each
    layer, and with `ablate` for each position one forward pass of a batch of `ablate` + 1 copies of the text. Memory:
    positions x top for each layer, and a few tables as large as one layer's weights, of at most 64 MiB; never tokens x
    entries x model_dim. In half precision small effects of an ablation are rounding: load the model in float32.

    >>> import attnflow as af
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = af.knowledge.from_ffn(LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)))
    >>> result = trace(model, [5, 6, 7], top=24)
    >>> result.layer(0).ids.shape
    torch.Size([3, 24])
    >>> bool((result.layer(0).explained - 1).abs().max() < 1e-5)
    True
    """
    subject = Subject.of(model, tokenizer)
    subject.require_weights("trace")
    if subject.encodes_and_decodes:
        raise UnsupportedArchitecture(
            f"trace needs a model with one residual stream, but {subject.kind} has an encoder and a decoder"
        )
    checks.integer("top", top, 1)
    checks.integer("promoted", promoted)
    checks.integer("ablate", ablate, 0, top)
    if by not in (None, "norm", "effect"):
        raise ValueError(f"by must be 'norm' or 'effect', got {by!r}")
    if not reads_entries(subject.model):
        subject = Subject(from_ffn(subject.model), subject.tokenizer)
    model, tokenizer = subject.model, subject.tokenizer
    every = readers(model)
    arguments = subject.read(inputs, ids=True)
    if len(arguments["input_ids"]) > 1:
        raise ValueError(f"trace takes one sequence, got {len(arguments['input_ids'])}: pass one row of the inputs")
    ids = arguments["input_ids"][0].tolist()
    rows = _positions(positions, len(ids))
    stream = Stream(model, rows)
    effects: dict[tuple[Kind, int], Tensor] = {}
    run = partial(cast(Any, model), **arguments, **subject.sparing)
    with evaluating(model), torch.no_grad(), unobserved(model):
        towards = directions(stream, run, partial(_targets, targets, ids, rows, tokenizer))
        if isinstance(towards, str) and (by == "effect" or (targets is not None and not ablate)):
            raise ValueError(f"this model has no direct effects, since {towards}: use by='norm' without targets")
        frozen = towards if isinstance(towards, Directions) else None
        order: By = by or ("norm" if frozen is None else "effect")
        watched = [LayerWatch(reader, stream, frozen, top, order) for reader in every]

        def add(kind: Kind, layer: int, value: Tensor) -> None:
            if frozen is not None:
                effect = (value * frozen.rows).sum(dim=-1).cpu()
                effects[kind, layer] = effect + effects.get((kind, layer), 0)

        with observed([(one.reader, one.see) for one in watched]), stream.watching(add):
            said = run()
        watched = [
            one for one in watched if one.pieces
        ] or watched  # layers of another stack, such as an image tower, do not run
        traced = tuple(one.finish(effects) for one in watched)
        words = () if frozen is None else _promoted(watched, frozen, promoted, subject)
        about: dict[str, Any] = {"without": towards}
        if frozen is not None:
            about = {
                "target_ids": tuple(frozen.targets.tolist()),
                "logits": frozen.logits.cpu(),
                "probabilities": frozen.probabilities.cpu(),
                "embedding_effect": next(effect for (kind, _), effect in effects.items() if kind == "embedding"),
                "constant_effect": frozen.constant.cpu(),
            }
        elif ablate:
            last = getattr(said, "logits", None)
            if not isinstance(last, Tensor):
                raise UnsupportedArchitecture(f"{type(model).__name__} returns no logits that an ablation could change")
            about["target_ids"] = tuple(_targets(targets, ids, rows, tokenizer, last[0, -1]))
        about["targets"] = tuple(subject.texts(about.get("target_ids", ())))
        texts, tokens = _texts(every[0], traced), tuple(subject.texts_in_sequence(ids))
        result = Trace(subject.name, tokens, tuple(rows), traced, texts=texts, promoted=words, by=order, **about)
        return _ablated(result, model, arguments, watched, ablate) if ablate else result


def _ablated(
    trace: Trace, model: nn.Module, arguments: Mapping[str, Tensor], watched: Sequence[LayerWatch], count: int
) -> Trace:
    columns = [one.ids.shape[1] for one in trace]
    layer_of = torch.repeat_interleave(torch.tensor(columns)).tolist()
    places = torch.cat([one.joined("places") for one in watched], dim=1).cpu()
    heads = torch.cat([one.joined("heads") for one in watched], dim=1).cpu()
    tables = [one.norms if trace.by == "norm" else cast(Tensor, one.effects).abs() for one in trace]
    sizes = torch.cat(tables, dim=1).masked_fill(places < 0, -1)
    lost = sizes.new_full((2, *sizes.shape), torch.nan)
    rounding = max(torch.finfo(one.dtype).eps for one in model.parameters() if one.is_floating_point())
    seen: list[tuple[float, float]] = []
    for row, (position, target) in enumerate(zip(trace.positions, trace.target_ids, strict=True)):
        leading = sizes[row].topk(min(count, sizes.shape[1])).indices
        leading = leading[sizes[row, leading] >= 0]
        removed = [
            LocatedEntry(watched[layer_of[at]].reader, int(places[row, at]), int(heads[row, at]))
            for at in leading.tolist()
        ]
        before, after = logits_without(model, arguments, removed, position)
        every = torch.cat([before[None], after])
        logits, chances = every[:, target] - every.mean(dim=-1), every.softmax(dim=-1)[:, target]
        lost[0, row, leading], lost[1, row, leading] = ((each[0] - each[1:]).to(lost) for each in (logits, chances))
        seen.append((float(logits[0]), float(chances[0])))
        apart = 0.0 if trace.logits is None else abs(seen[-1][0] - float(trace.logits[row]))
        if not apart <= rounding**0.5 * float(before.abs().max()):
            raise UnsupportedArchitecture(
                f"{type(model).__name__} answers otherwise in a batch of copies of a text (a logit is off by "
                f"{apart:.2g}), so entries cannot be taken out in one: trace it without ablate"
            )
    layers = [
        replace(one, ablated_effects=effects, probability_effects=probabilities)
        for one, effects, probabilities in zip(trace, *(each.split(columns, dim=1) for each in lost), strict=True)
    ]
    trace = replace(trace, layers=tuple(layers))
    if trace.logits is not None:
        return trace
    logits, chances = torch.tensor(seen, dtype=lost.dtype).T
    return replace(trace, logits=logits, probabilities=chances)


def _positions(positions: int | Sequence[int] | None, size: int) -> list[int]:
    chosen = range(size) if positions is None else [positions] if isinstance(positions, int) else list(positions)
    if not chosen or not all(-size <= position < size for position in chosen):
        raise ValueError(f"positions must be from {-size} to {size - 1} for {size} tokens, got {chosen}")
    return sorted({position % size for position in chosen})


def _targets(
    wanted: str | int | Sequence[str | int] | None,
    ids: Sequence[int],
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    logits: Tensor,
) -> list[int]:
    """Return the given target ids; by default the next token, and after the last token the most likely one."""
    if wanted is None:
        return [ids[row + 1] if row + 1 < len(ids) else int(logits.argmax()) for row in rows]
    listed = [wanted] * len(rows) if isinstance(wanted, str | int) else list(wanted)
    if len(listed) != len(rows):
        raise ValueError(f"expected one target, or one for each of the {len(rows)} positions, got {len(listed)}")
    targets = [_target(one, tokenizer) if isinstance(one, str) else int(one) for one in listed]
    checks.index_array("targets", targets, len(logits))
    return targets


def _target(word: str, tokenizer: PreTrainedTokenizerBase | None) -> int:
    if tokenizer is None:
        raise ValueError("a target given as text needs a tokenizer: pass tokenizer=..., or the token's id")
    ids = cast(list[int], tokenizer(word, add_special_tokens=False)["input_ids"])
    if len(ids) != 1:
        raise ValueError(
            f"a target must be one token, but {word!r} is {len(ids)}: {[tokenizer.decode([token]) for token in ids]}. "
            "Many vocabularies need a space before the word, as in ' Paris'"
        )
    return ids[0]


def _promoted(watched: Sequence[LayerWatch], frozen: Directions, count: int, subject: Subject) -> tuple[Promoted, ...]:
    places, heads, effects = (
        torch.cat([one.joined(name) for one in watched], dim=1).cpu() for name in ("places", "heads", "effects")
    )
    which = torch.repeat_interleave(torch.tensor([one.joined("places").shape[1] for one in watched]))
    order = effects.abs().masked_fill(places < 0, -1).argsort(dim=1, descending=True)
    columns = [table.gather(1, order) for table in (which.expand_as(places), places, heads)]
    ranked = [key for key in zip(*(table.T.flatten().tolist() for table in columns), strict=True) if key[1] >= 0]
    last = [key for key in zip(*(table[-1].tolist() for table in columns), strict=True) if key[1] >= 0]
    asked = list(dict.fromkeys(last[:_LAST] + ranked))[:count]
    words: list[Promoted] = []
    for index, one in enumerate(watched):
        mine = [(place, head) for place_of, place, head in asked if place_of == index]
        if mine:
            where, at = (torch.tensor(column, device=frozen.rows.device) for column in zip(*mine, strict=True))
            values = one.reader.values(where).detach().to(frozen.rows)[at, torch.arange(len(at), device=at.device)]
            ids = one.reader.ids(where).tolist()
            pushes = frozen.pushes(values)
            sides = [pushes.topk(min(_PROMOTED, pushes.shape[-1]), largest=up).indices.tolist() for up in (True, False)]
            for entry, (_, head), *moved in zip(ids, mine, *sides, strict=True):
                texts = (tuple(subject.texts(tokens)) for tokens in moved)
                words.append(Promoted(one.reader.layer, entry, head, *texts))
    return tuple(words)


def _texts(reader: LayerReader, layers: Sequence[LayerTrace]) -> dict[int, str]:
    source = reader.current() if isinstance(reader, SharedReader) else None
    if not isinstance(source, EntrySource):
        return {}
    ids = torch.cat([one.ids[one.ids >= 0] for one in layers]).unique().tolist()
    return {one.id: one.text for one in source.store.get([entry for entry in ids if entry in source.store]) if one.text}


class LayerWatch:
    """Watches one layer and keeps the `top` strongest entries for each position.

    `pieces` holds blocks of positions: "places" of entries in a reading (-1: none) and columns named as in
    `LayerTrace`.
    """

    def __init__(self, reader: LayerReader, stream: Stream, frozen: Directions | None, top: int, by: By) -> None:
        self.reader, self._stream, self._frozen, self._top, self._by = reader, stream, frozen, top, by
        self.pieces: list[dict[str, Tensor]] = []
        self._heads = 1

    def see(self, reading: LayerReading) -> None:
        """Keep the strongest entries of a reading; a second call of the layer replaces the first."""
        read = reading.scores.shape[-2:]  # heads, entries
        scores = reading.scores[0].flatten(0, -3)  # some families flatten a batch
        weights = reading.weights.flatten(0, -3)
        ids = None if reading.ids is None else reading.ids.flatten(0, -3)
        self._heads, self.pieces = read[0], []
        step = max(1, _WEIGHTS // max(1, read.numel()))
        for start in range(0, len(self._stream.positions), step):
            rows = self._stream.positions[start : start + step]
            towards = None if self._frozen is None else self._frozen.rows[start : start + step]
            kind = wide(weights.dtype)
            table = self._tabled(scores[rows].to(kind), weights[rows].to(kind), None if ids is None else ids[rows])
            self.pieces.append(self._strongest(*table, towards))

    def joined(self, name: str) -> Tensor:
        return torch.cat([piece[name] for piece in self.pieces])

    def finish(self, effects: Mapping[tuple[Kind, int], Tensor]) -> LayerTrace:
        layer = self.reader.layer
        if not self.pieces:
            raise ValueError(f"layer {layer} did not read its entries in the forward pass")
        places, heads, scores = self.joined("places"), self.joined("heads"), self.joined("scores")
        distinct, column = _distinct(places)
        thresholds = torch.zeros_like(scores)
        if len(distinct):
            thresholds = self.reader.thresholds(distinct).detach()[0, heads.clamp(min=0), column].to(scores)
        hide = partial(torch.masked_fill, mask=places < 0, value=0)
        return LayerTrace(
            layer,
            self._stream.paths[layer],
            self.reader.num_entries * self._heads,
            self.reader.ids(places).masked_fill(places < 0, -1).cpu(),
            heads.cpu(),
            hide(scores).cpu(),
            hide(thresholds).cpu(),
            hide(self.joined("weights")).cpu(),
            hide(self.joined("norms")).cpu(),
            None if self._frozen is None else hide(self.joined("effects")).cpu(),
            self.joined("active").cpu(),
            self.joined("output_norm").cpu(),
            self.joined("explained").cpu(),
            effects.get(("entries", layer)),
            effects.get(("attention", layer)),
        )

    def _tabled(self, scores: Tensor, weights: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Spread scores and weights to one column per entry that any token read; also return the entries' places."""
        if ids is None:
            return scores, weights, self.reader.every().to(scores.device)
        places, column = _distinct(ids)
        if not len(places):  # no token read an entry: make one column, with weight 0
            places = self.reader.every()[:1].to(ids.device)
        shape = (*ids.shape[:-1], len(places))
        spread = torch.where(ids >= 0, weights, 0)
        table = spread.new_zeros(shape).scatter_add(-1, column, spread)
        # An entry that was not read has no score; it counts as lower than all scores.
        absent = torch.finfo(scores.dtype).min
        read_scores = torch.where(ids >= 0, scores, absent)
        return scores.new_full(shape, absent).scatter_reduce(-1, column, read_scores, "amax"), table, places

    def _strongest(self, scores: Tensor, weights: Tensor, places: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
        norms = weights.new_empty(weights.shape[1:])
        effects = torch.full_like(weights, float("nan"))
        total = weights.new_zeros(())
        for block, values in self._values(torch.arange(len(places), device=places.device), places, weights):
            norms[:, block] = values.norm(dim=-1)
            total = total + torch.einsum("phe,hed->pd", weights[..., block], values)
            if rows is not None:
                effects[..., block] = weights[..., block] * torch.einsum("pd,hed->phe", rows, values)
        size = (weights.abs() * norms if self._by == "norm" else effects.abs()).masked_fill(weights == 0, -1)
        width = min(self._top, self._heads * self.reader.num_entries)
        flat = functional.pad(size.flatten(1), (0, max(0, width - size[0].numel())), value=-1)
        largest, order = flat.topk(width, dim=-1)
        fired = largest >= 0
        order = torch.where(fired, order, 0)
        kept = weights.new_zeros(weights.shape).flatten(1)
        kept = kept.scatter_add(-1, order, torch.where(fired, _pick(weights, order), 0)).view(weights.shape)
        written = weights.new_zeros(())
        for block, values in self._values((order % len(places)).unique(), places, weights):
            written = written + torch.einsum("phe,hed->pd", kept[..., block], values)
        output_norm = total.norm(dim=-1)
        return {
            "places": torch.where(fired, places[order % len(places)], -1),
            "heads": torch.where(fired, order // len(places), -1),
            "scores": _pick(scores, order),
            "weights": _pick(weights, order),
            "norms": _pick(weights.abs() * norms, order),
            "effects": _pick(effects, order),
            "active": (scores > 0).flatten(1).sum(dim=-1),
            "output_norm": output_norm,
            "explained": 1 - torch.where(output_norm > 0, (total - written).norm(dim=-1) / output_norm, 0),
        }

    def _values(self, columns: Tensor, places: Tensor, like: Tensor) -> Generator[tuple[Tensor, Tensor]]:
        """Yield blocks of columns with their entries' values [heads, columns, model_dim]."""
        for block in columns.split(max(1, _BLOCK // self._heads)):
            yield block, self.reader.values(places[block]).detach().to(like)


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct ids without -1, and each id's index among them (arbitrary for -1)."""
    distinct = ids[ids >= 0].unique()
    return distinct, torch.searchsorted(distinct, ids).clamp(max=max(len(distinct) - 1, 0))


def _pick(table: Tensor, order: Tensor) -> Tensor:
    """Gather from the flattened [heads, entries] of each position."""
    return table.flatten(1).gather(1, order)
