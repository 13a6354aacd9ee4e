"""How many heads a projection has, from what the model's config says and the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, cast

from attnflow._core.errors import UnsupportedArchitecture

_QUERY: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_attn_heads")
_KEY: Final = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_DIM: Final = ("head_dim", "d_kv", "kv_channels", "global_head_dim", "attention_head_size", "d_head", "dim_head")


class UnknownHeads(UnsupportedArchitecture):
    """Nothing says how many heads a projection has."""


class Heads(NamedTuple):
    """Heads of the query, heads of the key, width of a head."""

    query: int
    key: int
    dim: int


class Stated:
    """What is said about the heads of one tower, by the first of several configs that knows an answer.

    `side` is "encoder" or "decoder" where one config speaks for both.
    """

    def __init__(self, speakers: Sequence[Mapping[str, object]], side: str) -> None:
        self._speakers = speakers
        own = (f"{side}_attention_heads", f"num_{side}_attention_heads") if side else ()
        self.query_words = (*own, *_QUERY)

    def separate(self, name: str, stage: int, rows: int, key_rows: int, width: int | None = None) -> Heads:
        """Heads of two separate projections with so many output rows; `UnsupportedArchitecture` if they do not fit.

        `name` is for messages, `stage` counts where the config lists a number for each; `width` is what the heads must
        add up to where the config does not say how wide they are (None: anything).
        """
        query = self.query_heads(name, stage)
        dims = self.values(_DIM, stage)
        if width is not None and not dims and rows != width:
            raise _disagrees(name, f"{rows} query rows", f"{query} heads, but not of which width, on {width} channels")
        if rows % query or (dims and rows // query not in dims):
            raise _disagrees(name, f"{rows} query rows", f"{query} heads" + (f" of {_either(dims)}" if dims else ""))
        dim = rows // query
        stated = self.values(_KEY, stage)
        if key_rows % dim or (stated and key_rows // dim not in stated) or query % (key_rows // dim):
            raise _disagrees(
                name, f"{key_rows} key rows", f"{_either(stated) or 'whole'} KV heads of {dim} under {query} heads"
            )
        return Heads(query, key_rows // dim, dim)

    def fused(self, name: str, stage: int, rows: int) -> Heads:
        """Likewise of one tensor that holds query, key and value with so many rows together."""
        query = self.query_heads(name, stage)
        key = next(iter(self.values(_KEY, stage)), query)
        dim, rest = divmod(rows, query + 2 * key)
        dims = self.values(_DIM, stage)
        if rest or query % key or (dims and dim not in dims):
            raise _disagrees(name, f"{rows} rows", f"{query} query heads and twice {key} KV heads")
        return Heads(query, key, dim)

    def values(self, words: Sequence[str], stage: int) -> list[int]:
        """The whole numbers stated under these words; of a list, the one of the stage."""
        for speaker in self._speakers:
            numbers: list[int] = []
            for word in words:
                value = speaker.get(word)
                if isinstance(value, list | tuple):
                    items = cast(Sequence[object], value)
                    value = items[stage] if stage < len(items) else None
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    numbers.append(value)
            if numbers:
                return numbers
        return []

    def query_heads(self, name: str, stage: int) -> int:
        """Heads of the query; `UnknownHeads` if nothing says how many."""
        heads = self.values(self.query_words, stage)
        if not heads:
            raise UnknownHeads(
                f"{name}: nothing says how many heads there are; keep config.json beside the weights, or pass "
                'config={"num_attention_heads": 12}, --config num_attention_heads=12 on the command line'
            )
        return heads[0]


def _disagrees(name: str, got: str, said: str) -> UnsupportedArchitecture:
    return UnsupportedArchitecture(
        f"{name} has {got}, where the config says {said}: the layout of this model is not known, and a guess would "
        "give wrong scores"
    )


def _either(values: Sequence[int]) -> str:
    return " or ".join(str(value) for value in dict.fromkeys(values))
