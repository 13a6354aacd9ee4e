"""`trace`: run a transformers model whose layers read entries, and keep which of them fired, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core import checks
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.knowledge.hf.attach import attached_store
from attnflow.knowledge.hf.convert import from_ffn
from attnflow.knowledge.hf.direct_effect import Directions, Kind, Stream, directions
from attnflow.knowledge.hf.layer_trace import LayerWatch
from attnflow.knowledge.layered import observed, readers, reads_entries
from attnflow.knowledge.provenance import By, LayerTrace, Promoted, Trace
from attnflow.knowledge.store import Store
from attnflow.models.evaluation import evaluating
from attnflow.models.feed_forward import find_feed_forward
from attnflow.models.inputs import Text, model_inputs, model_name, sparing
from attnflow.models.loaded import Loaded, split

_PROMOTED: Final = 5  # tokens named for an entry


def trace(
    model: nn.Module | Loaded,
    inputs: Text,
    *,
    layers: Sequence[int] | None = None,
    positions: int | Sequence[int] | None = None,
    top: int = 16,
    by: By | None = None,
    targets: str | int | Sequence[str | int] | None = None,
    texts: Mapping[int, str] | Store | None = None,
    promoted: int = 128,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sequence: int = 0,
) -> Trace:
    """Which entries fired for each token and layer of a text, and what they did to the logit of the next token.

    Args:
        model: any model, or what `af.load_model` returned. The feed-forward layers of one that was not converted by
            `from_ffn` are opened as entries in a copy.
        inputs: a text; token ids [tokens] or [1, tokens]; or the model's inputs by name.
        layers: numbers of layers; by default all that run. The experts of a layer are one, and shared ones another.
        positions: of the tokens, negative ones from the end; by default all.
        top: how many entries are kept for each token and layer.
        by: which, of all entries: those with the largest direct "effect" in size, or with the largest contribution
            ("norm"); by default the effect where there is one.
        targets: tokens whose logits the effects are about, one for all positions or one each; by default the next
            token of the text, and at its end the token that the model deems most likely.
        texts: id -> text of entries, or a store; by default the store that is attached to the model.
        promoted: for how many entries to find the tokens that they promote most, the strongest of each position first.
        tokenizer: needed for a text unless `model` brings one; else it names the tokens.
        sequence: which one of a batch.

    Returns:
        The trace, on the CPU, in float32 (float64 for a model in float64). Without direct effects where a
        contribution has none in closed form; `.without` then says why.

    Raises:
        ValueError: layers or positions that do not exist, a target that is not one token.
        UnsupportedArchitecture: an encoder-decoder model, or one whose feed-forward layers are not known.

    Cost: two forward passes (the first finds the scale of the final norm), and for each layer as much again as its
        product with the values. Memory: positions x top for each layer, and a few tables as large as one layer's
        weights, of 64 MiB at most; never tokens x entries x model_dim.

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
    model, own_tokenizer = split(model)
    tokenizer = tokenizer or own_tokenizer
    _refuse_two_streams(model)
    checks.integer("top", top, 1)
    checks.integer("promoted", promoted)
    if by not in (None, "norm", "effect"):
        raise ValueError(f"by must be 'norm' or 'effect', got {by!r}")
    if not reads_entries(model):
        model = from_ffn(model)
    every = readers(model)
    numbers = _chosen([reader.layer for reader in every], layers)
    chosen = [reader for reader in every if reader.layer in numbers]
    arguments = model_inputs(model, inputs, tokenizer, sequence)
    ids = arguments["input_ids"][sequence].tolist()
    rows = _positions(positions, len(ids))
    stream = Stream(model, len(arguments["input_ids"]), sequence, rows)
    effects: dict[tuple[Kind, int], Tensor] = {}
    run = partial(cast(Any, model), **arguments, **sparing(model))
    with evaluating(model), torch.no_grad(), observed([(reader, None) for reader in every]):
        towards = directions(stream, run, partial(_targets, targets, ids, rows, tokenizer))
        if isinstance(towards, str) and (by == "effect" or targets is not None):
            raise ValueError(f"there are no direct effects: {towards}")
        frozen = towards if isinstance(towards, Directions) else None
        order: By = by or ("norm" if frozen is None else "effect")
        watched = [LayerWatch(reader, stream, frozen, top, order) for reader in chosen]

        def add(kind: Kind, layer: int, value: Tensor) -> None:
            if frozen is not None:
                effect = (value * frozen.rows).sum(dim=-1).cpu()
                effects[kind, layer] = effect + effects.get((kind, layer), 0)

        with observed([(one.reader, one.see) for one in watched]), stream.watching(add):
            run()
        if layers is None:  # those of another stack, of images, do not run on a text
            watched = [one for one in watched if one.pieces] or watched
        traced = tuple(one.finish(effects) for one in watched)
        words = () if frozen is None else _promoted(watched, frozen, promoted, tokenizer)
    named = attached_store(model) if texts is None else texts
    result = Trace(
        model_name(model),
        _names(tokenizer, ids),
        tuple(rows),
        traced,
        texts={} if named is None else _texts(named, traced),
        promoted=words,
        by=order,
    )
    if frozen is None:
        return replace(result, without=cast(str, towards))
    logits = frozen.logits.cpu()
    rest = [effect for (kind, layer), effect in effects.items() if kind != "embedding" and layer not in numbers]
    return replace(
        result,
        targets=_names(tokenizer, frozen.targets.tolist()),
        target_ids=tuple(frozen.targets.tolist()),
        logits=logits,
        embedding_effect=next(effect for (kind, _), effect in effects.items() if kind == "embedding"),
        constant_effect=frozen.constant.cpu(),
        rest_effect=torch.stack([torch.zeros_like(logits), *rest]).sum(dim=0),
    )


def check_request(model: nn.Module | Loaded, layers: Sequence[int] | None, target: str | int | None) -> None:
    """Refuse, as `trace` would, a model, layers or a target that cannot be; the model needs no weights for it."""
    module, tokenizer = split(model)
    _refuse_two_streams(module)
    _chosen(range(len(readers(module) if reads_entries(module) else find_feed_forward(module))), layers)
    if isinstance(target, str):
        _target(target, tokenizer)
    elif target is not None:
        checks.index_array("targets", [target], cast(Any, module).get_input_embeddings().num_embeddings)


def _refuse_two_streams(model: nn.Module) -> None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedArchitecture(f"{type(model).__name__} has two streams, an encoder's and a decoder's")


def _chosen(every: Sequence[int], layers: Sequence[int] | None) -> set[int]:
    """The layers that are asked for, by default all."""
    if layers is None:
        return set(every)
    if not layers or not set(layers) <= set(every):
        raise ValueError(f"layers must list some of the layers with entries, 0 to {max(every)}, got {list(layers)}")
    return set(layers)


def _positions(positions: int | Sequence[int] | None, size: int) -> list[int]:
    chosen = range(size) if positions is None else [positions] if isinstance(positions, int) else list(positions)
    if not chosen or not all(-size <= position < size for position in chosen):
        raise ValueError(f"positions must be of {size} tokens, {-size} to {size - 1}, got {chosen}")
    return sorted({position % size for position in chosen})


def _targets(
    wanted: str | int | Sequence[str | int] | None,
    ids: Sequence[int],
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    logits: Tensor,
) -> list[int]:
    """Ids of the targets: as given, or the next token of the text and at its end the most likely one."""
    if wanted is None:
        return [ids[row + 1] if row + 1 < len(ids) else int(logits.argmax()) for row in rows]
    listed = [wanted] * len(rows) if isinstance(wanted, str | int) else list(wanted)
    if len(listed) != len(rows):
        raise ValueError(f"expected one target, or one for each of {len(rows)} positions, got {len(listed)}")
    targets = [_target(one, tokenizer) if isinstance(one, str) else int(one) for one in listed]
    checks.index_array("targets", targets, len(logits))
    return targets


def _target(word: str, tokenizer: PreTrainedTokenizerBase | None) -> int:
    if tokenizer is None:
        raise ValueError("a target that is a text needs a tokenizer: pass tokenizer=..., or the token's id")
    ids = cast(list[int], tokenizer(word, add_special_tokens=False)["input_ids"])
    if len(ids) != 1:
        raise ValueError(
            f"a target must be one token, {word!r} is {len(ids)}: {[tokenizer.decode([token]) for token in ids]}; many "
            "vocabularies want the space before a word, as in ' Paris'"
        )
    return ids[0]


def _promoted(
    watched: Sequence[LayerWatch], frozen: Directions, count: int, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Promoted, ...]:
    """Tokens of the strongest entry of each position, then of the second of each, and so on, `count` in all."""
    places, heads, effects = (
        torch.cat([one.joined(name) for one in watched], dim=1).cpu() for name in ("places", "heads", "effects")
    )
    which = torch.repeat_interleave(torch.tensor([one.joined("places").shape[1] for one in watched]))
    order = effects.abs().masked_fill(places < 0, -1).argsort(dim=1, descending=True)
    tables = (table.gather(1, order).T.flatten() for table in (which.expand_as(places), places, heads))
    ranked = [key for key in zip(*(table.tolist() for table in tables), strict=True) if key[1] >= 0]
    asked = list(dict.fromkeys(ranked))[:count]
    words: list[Promoted] = []
    for index, one in enumerate(watched):
        mine = [(place, head) for place_of, place, head in asked if place_of == index]
        if mine:
            where, at = (torch.tensor(column, device=frozen.rows.device) for column in zip(*mine, strict=True))
            values = one.reader.values(where).detach().to(frozen.rows)[at, torch.arange(len(at), device=at.device)]
            ids = one.reader.ids(where).tolist()
            for entry, (_, head), tokens in zip(ids, mine, frozen.promoted(values, _PROMOTED), strict=True):
                words.append(Promoted(one.reader.layer, entry, head, _names(tokenizer, tokens)))
    return tuple(words)


def _texts(names: Mapping[int, str] | Store, layers: Sequence[LayerTrace]) -> dict[int, str]:
    ids = torch.cat([one.ids.flatten() for one in layers]).unique().tolist()
    named = [entry for entry in ids if entry >= 0 and entry in names]
    if isinstance(names, Mapping):
        return {entry: names[entry] for entry in named}
    return {one.id: one.text for one in names.get(named) if one.text}


def _names(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int]) -> tuple[str, ...]:
    return tuple(str(token) if tokenizer is None else str(tokenizer.decode([token])) for token in ids)
