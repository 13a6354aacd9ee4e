"""Where a model is edited: tokens of prompts, the weights of entries there, and their second moments on other text."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from attnflow._core.progress import Progress
from attnflow.knowledge.answers import batch, token_ids
from attnflow.knowledge.facts import Fact
from attnflow.knowledge.layered import EntryValues
from attnflow.models.inputs import sparing

Layers = Mapping[int, EntryValues]

_WINDOW: Final = 256  # tokens of a piece of text
_LEAD: Final = 5  # words before a prompt
_RIDGE: Final = 1e-3  # of the mean of the diagonal: what is added to a moment


@dataclass(frozen=True)
class Place:
    """A token of a prompt at which something is to be added.

    Attributes:
        ids: of the prompt.
        position: of the token.
        answer: ids of what is to follow the prompt; none where the prompt is there for its weights alone.
    """

    ids: tuple[int, ...]
    position: int
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Moments:
    """Second moments E[k k^T] of the weights of layers' entries on a text, float64, with a little of the identity.

    Attributes:
        layers: one matrix [entries, entries] for each.
        tokens: that were read.
    """

    layers: Mapping[int, Tensor]
    tokens: int


def places_of(fact: Fact, tokenizer: PreTrainedTokenizerBase, leads: Sequence[str], limit: int | None) -> list[Place]:
    """Where a fact is edited: its prompts, alone and after leads, and with a subject the subject after leads.

    Raises:
        ValueError: a tokenizer that cannot tell where a subject ends; a prompt with its answer over the limit.
    """
    answer = tuple(token_ids(tokenizer, fact.answer, answer=True))
    places: list[Place] = []
    for prompt in fact.prompts:
        for lead in ("", *leads):
            place = _place(tokenizer, f"{lead}{prompt}", len(lead) + prompt.rfind(fact.subject), fact.subject, answer)
            if limit is not None and len(place.ids) + len(answer) > limit:
                said = f"{len(place.ids)} tokens and an answer of {len(answer)}, and the model reads {limit}"
                if not lead:
                    raise ValueError(f"the prompt {prompt[:40]!r} has {said}")
                continue
            places.append(place)
    if fact.subject:
        places += [_place(tokenizer, f"{lead}{fact.subject}", len(lead), fact.subject, ()) for lead in leads]
    return places


def _place(tokenizer: PreTrainedTokenizerBase, text: str, start: int, subject: str, answer: tuple[int, ...]) -> Place:
    """The last token of a subject in a text, or of the text."""
    if not subject:
        ids = token_ids(tokenizer, text)
        return Place(tuple(ids), len(ids) - 1, answer)
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters its tokens are of, so that the subject "
            f"{subject!r} cannot be told from the rest: load a fast tokenizer, or leave the subject out"
        )
    encoded = tokenizer(text, return_offsets_mapping=True)
    spans = cast("list[tuple[int, int]]", encoded["offset_mapping"])
    last = start + len(subject) - 1
    position = next(index for index, (first, end) in enumerate(spans) if first <= last < end)
    return Place(tuple(cast("list[int]", encoded["input_ids"])), position, answer)


def leads_of(text: str, count: int) -> list[str]:
    """Beginnings of sentences from all over a text, to stand before prompts."""
    words = text.split()
    starts = [len(words) * place // count for place in range(count)] if words else []
    return [" ".join(words[start : start + _LEAD]).rstrip(".,;:!?") + ". " for start in starts]


@torch.no_grad()
def weights_at(model: nn.Module, layers: Layers, places: Sequence[Place]) -> dict[int, Tensor]:
    """The weights of each layer's entries at one token of each prompt, [places, entries], float64."""
    positions = [place.position for place in places]
    rows = torch.arange(len(places))
    seen: dict[int, Tensor] = {}

    def see(layer: int, weights: Tensor) -> None:
        seen[layer] = weights[rows, positions].double().cpu()

    with _watched(layers, see):
        cast(Any, model)(**batch(model, [place.ids for place in places]))
    return seen


@torch.no_grad()
def weights_everywhere(model: nn.Module, layers: Layers, texts: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """The weights of each layer's entries at all tokens of some texts, [tokens, entries], float64."""
    seen: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def see(layer: int, weights: Tensor) -> None:
        seen[layer].append(weights[0].double().cpu())

    with _watched(layers, see):
        for ids in texts:
            cast(Any, model)(**batch(model, [ids]))
    return {layer: torch.cat(parts) for layer, parts in seen.items() if parts}


@torch.no_grad()
def moments_of(
    model: nn.Module, layers: Layers, ids: Sequence[int], limit: int | None, progress: Progress | None = None
) -> Moments:
    """Second moments on a text, read in windows; memory of the moments and of one window."""
    sums = {layer: torch.zeros(one.num_entries, one.num_entries, dtype=torch.float64) for layer, one in layers.items()}
    window = min(_WINDOW, limit or _WINDOW)

    def add(layer: int, weights: Tensor) -> None:
        rows = weights[0].float()
        sums[layer].add_((rows.T @ rows).double().cpu())

    with _watched(layers, add):
        for start in range(0, len(ids), window):
            piece = ids[start : start + window]
            cast(Any, model)(**{**batch(model, [piece]), **sparing(model)})
            if progress is not None:
                progress(start + len(piece), len(ids), "tokens of text")
    for moment in sums.values():
        moment /= max(len(ids), 1)
        moment.diagonal().add_(max(_RIDGE * float(moment.diagonal().mean()), torch.finfo(torch.float64).tiny))
    return Moments(sums, len(ids))


@contextmanager
def adding(layers: Layers, added: Mapping[int, Tensor], places: Sequence[Place]) -> Generator[None]:
    """Layers add a vector at one token of each row of a batch."""
    rows, positions = torch.arange(len(places)), torch.tensor([place.position for place in places])

    def hook(layer: int) -> Any:
        def add(module: nn.Module, args: object, output: Tensor) -> Tensor:
            where = torch.zeros(output.shape[:2], dtype=output.dtype, device=output.device)
            where[rows, positions] = 1
            return output + where[..., None] * added[layer].to(output.dtype)

        return add

    with ExitStack() as hooks:
        for layer, one in layers.items():
            hooks.enter_context(one.register_forward_hook(hook(layer)))
        yield


@contextmanager
def _watched(layers: Layers, see: Any) -> Generator[None]:
    def hook(layer: int) -> Any:
        def watch(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            see(layer, args[0].detach())

        return watch

    with ExitStack() as hooks:
        for layer, one in layers.items():
            hooks.enter_context(one.register_forward_pre_hook(hook(layer)))
        yield
