"""Forward passes with a cache under a mask of their own, and masked places that are filled from their logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from attnflow._core.checks import index_array, integer, number
from attnflow._core.errors import UnsupportedArchitecture
from attnflow.masks.hf.selfcheck import check_stack
from attnflow.models.loaded import accepts
from attnflow.models.sites import find_sites, mixers_beside
from attnflow.tasks.embedding import additive, require_runnable


class CachedPasses:
    """A model and its cache of all that it has read, without a window: a pass's mask alone says what is read."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.passes = 0
        self.past = 0
        weight = next(model.get_input_embeddings().parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._cache = DynamicCache()
        self._keeps = accepts(model, "logits_to_keep")

    def run(
        self,
        ids: Int[Tensor, "batch q"],
        positions: Int[Tensor, "batch q"],
        allow: Bool[Tensor, "batch q k"],
        rows: int,
    ) -> Float[Tensor, "batch rows vocabulary"]:
        """Logits of the last `rows` rows of a pass; `allow` is over the rows of the cache, then those of the pass."""
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self.device),
            "position_ids": positions.to(self.device),
            "attention_mask": additive(allow.to(self.device), self.dtype)[:, None],
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if self._keeps:
            arguments["logits_to_keep"] = rows
        logits = cast(Tensor, self.model(**arguments).logits)
        self.passes += 1
        self.past += ids.shape[1]
        return logits[:, -rows:]

    def drop(self, rows: int) -> None:
        """Remove the last rows from the cache."""
        self._cache.crop(-rows)
        self.past -= rows


class Choice:
    """Chooses a token for each row of logits: the best, or one drawn on the CPU as transformers' `generate` does."""

    def __init__(self, temperature: float | None, top_k: int | None, top_p: float | None, seed: int) -> None:
        self._warpers = LogitsProcessorList()
        if temperature is not None:
            self._warpers.append(TemperatureLogitsWarper(number("temperature", temperature)))
        if top_k is not None:
            self._warpers.append(TopKLogitsWarper(integer("top_k", top_k, 1)))
        if top_p is not None:
            self._warpers.append(TopPLogitsWarper(number("top_p", top_p)))
        self._generator = torch.Generator().manual_seed(integer("seed", seed))

    def draw(
        self, logits: Float[Tensor, "*rows vocabulary"]
    ) -> tuple[Int[Tensor, "*rows"], Float[Tensor, "*rows vocabulary"]]:
        """(a token for each row, the probabilities that it was drawn from)."""
        flat = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
        read = torch.zeros(len(flat), 0, dtype=torch.int64, device=flat.device)  # none of the warpers looks at it
        chances = self._warpers(cast(torch.LongTensor, read), cast(torch.FloatTensor, flat)).softmax(dim=-1)
        drawn = torch.multinomial(chances, 1, generator=self._generator) if self._warpers else flat.argmax(dim=-1)
        return drawn.reshape(logits.shape[:-1]), chances.reshape(logits.shape)


class Fill:
    """The partly masked places of each sequence during decoding (MaskGIT's schedule, arXiv:2202.04200)."""

    def __init__(self, tokens: Int[Tensor, "batch places"], hidden: Bool[Tensor, "batch places"]) -> None:
        self.tokens, self.hidden = tokens, hidden

    @property
    def done(self) -> bool:
        """Whether every place holds a token."""
        return not bool(self.hidden.any())

    def reveal(
        self,
        logits: Float[Tensor, "batch places vocabulary"],
        choice: Choice,
        per_pass: int,
        threshold: float | None,
    ) -> None:
        """Fill the `per_pass` surest hidden places of each sequence, and all with at least probability `threshold`."""
        logits = logits.to(self.tokens.device)
        drawn, chances = choice.draw(logits)
        sure = chances.gather(-1, drawn[..., None])[..., 0].masked_fill(~self.hidden, -1.0)
        rank = sure.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        now = rank < per_pass
        if threshold is not None:
            now |= sure >= threshold
        now &= self.hidden
        self.tokens = torch.where(now, drawn, self.tokens)
        self.hidden = self.hidden & ~now


def schedule(per_pass: int | None, threshold: float | None, places: int) -> tuple[int, float | None]:
    """Check the schedule: (how many places a pass fills at least, how sure others must be)."""
    least = places if per_pass is None else integer("per_pass", per_pass, 1, max(places, 1))
    if threshold is None:
        return least, None
    value = number("threshold", threshold, 0.0)
    if per_pass is None:
        raise ValueError("threshold goes with per_pass, the number of places to fill at least; all are filled at once")
    return least, value


def decodable(model: nn.Module, positions: int) -> PreTrainedModel:
    """`model`, if cached passes give what its merged tasks do; refused otherwise, or for too many positions."""
    require_runnable(model)
    name = type(model).__name__
    sites = find_sites(model)
    if not isinstance(model, PreTrainedModel) or not accepts(model, "past_key_values"):
        raise UnsupportedArchitecture(f"{name} takes no cache of keys and values, which decoding goes on from")
    mixers = mixers_beside(model, sites)
    moved = next((site for site in sites if check_stack(model, site.owner, sites).moved), None)
    if mixers or moved is not None:
        where = ", ".join(mixers[:4]) or type(cast(Any, moved).owner).__name__
        raise UnsupportedArchitecture(
            f"{name} carries information between positions beside its attention ({where}): no mask keeps masked rows "
            "from what follows, and such a state cannot be cut back as a cache can. Decode with a model of attention "
            "alone, or by generate"
        )
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < positions:
        raise ValueError(f"{name} has {most} positions, but the text would take {positions}; ask for fewer tokens")
    return model


def prompts(name: str, ids: object) -> list[list[int]]:
    """The token ids of each sequence, from [n] or [batch, n] ids or from a list of sequences."""
    if isinstance(ids, Tensor):
        rows = list(ids.unbind()) if ids.ndim == 2 else [ids]
    elif isinstance(ids, Sequence) and len(ids) and isinstance(ids[0], Sequence | Tensor):
        rows = list(cast("Sequence[object]", ids))
    else:
        rows = [ids]
    return [index_array(name, row).tolist() for row in rows]


def require_in_vocabulary(model: PreTrainedModel, name: str, texts: Iterable[Iterable[int]]) -> None:
    """Raise `ValueError` unless the model has an embedding for every id."""
    size = len(cast(Tensor, next(model.get_input_embeddings().parameters())))
    wrong = next((token for text in texts for token in text if not 0 <= token < size), None)
    if wrong is not None:
        raise ValueError(f"{name} must hold ids of the {size} entries of the model's vocabulary, got {wrong}")


def end_tokens(model: PreTrainedModel, eos_token: int | Sequence[int] | None) -> frozenset[int]:
    """The ids that end a text, by default those of the model's generation config; -1 means none."""
    value = eos_token
    if value is None:
        value = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if value is None:
        return frozenset()
    several = cast("Sequence[object]", value if isinstance(value, list | tuple) else [value])
    return frozenset(integer("eos_token", one, -1) for one in several) - {-1}


def until_end(tokens: Sequence[int], ends: frozenset[int], most: int) -> tuple[int, ...]:
    """The tokens up to the first that ends the text, and at most `most`."""
    last = next((number for number, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: min(last + 1, most)])
