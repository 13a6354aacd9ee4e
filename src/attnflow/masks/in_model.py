"""What `af.masks.from_model` returns: the masks of a model's layers, each once, with the layers that use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from attnflow._core.lazy import renderer
from attnflow._core.markup import part_name, percent, plural, runs, shorten
from attnflow._core.plain import as_integer, as_list, as_object, as_text, only_keys
from attnflow._core.results import Result
from attnflow.masks.mask import Mask
from attnflow.masks.spec import mask_from_dict

_R = TypeVar("_R", bound="ModelMasks")


@dataclass(frozen=True)
class LayerMask:
    """One mask, and the layers that attend under it.

    Attributes:
        mask: which query attends to which key; `name` is that of the catalogue if it is one of its masks.
        layers: numbers of the layers.
        heads: numbers of the heads; empty for all.
        kind: "attention", or "cross-attention" of a decoder to its encoder.
        half: "encoder" for an encoder beside a decoder, else "".
        stack: path of the list of layers, where others have layers of the same kind; else "".
    """

    mask: Mask
    layers: tuple[int, ...]
    heads: tuple[int, ...] = ()
    kind: str = "attention"
    half: str = ""
    stack: str = ""

    @property
    def name(self) -> str:
        """The layers, such as "layer 3 attention" or "layers 0-5 attention"."""
        half = " ".join(filter(None, (self.stack, self.half)))
        if len(self.layers) == 1:
            named = part_name(self.layers[0], self.kind, half=half)
        else:
            named = f"{half} layers {runs(self.layers)} {self.kind}".strip()
        heads = f", {'head' if len(self.heads) == 1 else 'heads'} {runs(self.heads)}"
        return named + heads * bool(self.heads)


@dataclass(frozen=True)
class ModelMasks(Result):
    """The masks that a model attends under, for one input.

    Attributes:
        model: its name.
        tokens: the texts of the tokens; empty for inputs without tokens.
        encoder_tokens: those of an encoder beside a decoder.
        masks: each distinct mask with its layers.
        beside: modules that also move information between positions, which no mask controls, and layers that do not
            attend.
    """

    model: str
    tokens: tuple[str, ...]
    encoder_tokens: tuple[str, ...]
    masks: tuple[LayerMask, ...]
    beside: tuple[str, ...] = ()

    def labels(self, part: LayerMask) -> tuple[Sequence[str], Sequence[str]] | None:
        """The texts of a mask's queries and keys; None where positions are not those of the tokens."""
        queries = self.encoder_tokens if part.half else self.tokens
        keys = self.encoder_tokens if part.kind == "cross-attention" else queries
        return (queries, keys) if part.mask.shape == (len(queries), len(keys)) else None

    def rows(self) -> Sequence[Mapping[str, object]]:
        """A row for each mask."""
        return [
            {
                "layers": part.name, "mask": repr(part.mask), "queries": part.mask.num_queries,
                "keys": part.mask.num_keys, "allowed_pairs": part.mask.nnz, "density": part.mask.density,
            }
            for part in self.masks
        ]  # fmt: skip

    def to_dict(self) -> dict[str, object]:
        """All fields as plain values; masks in the format of `attnflow.masks.spec`."""
        plain = {"model": self.model, "tokens": list(self.tokens), "encoder_tokens": list(self.encoder_tokens)}
        masks = [{**vars(part), "mask": part.mask.to_dict()} for part in self.masks]
        listed = [{name: list(v) if isinstance(v, tuple) else v for name, v in part.items()} for part in masks]
        head: dict[str, object] = {"attnflow": type(self).__name__, "version": self.version}
        return {**head, **plain, "masks": listed, "beside": list(self.beside)}

    @classmethod
    def from_dict(cls: type[_R], values: Mapping[str, object]) -> _R:
        """Rebuild the result from what `to_dict` returned."""
        content = cls._content(values)
        parts: list[LayerMask] = []
        for place, value in enumerate(as_list(content["masks"], "masks")):
            part = as_object(value, f"masks[{place}]")
            only_keys(part, f"masks[{place}]", tuple(LayerMask.__dataclass_fields__))
            layers, heads = ([as_integer(n, name) for n in as_list(part[name], name)] for name in ("layers", "heads"))
            words = [as_text(part[name], name) for name in ("kind", "half", "stack")]
            mask = mask_from_dict(part["mask"], f"masks[{place}]")
            parts.append(LayerMask(mask, tuple(layers), tuple(heads), *words))
        tokens, encoder, beside = (
            tuple(str(text) for text in as_list(content[name], name)) for name in ("tokens", "encoder_tokens", "beside")
        )
        return cls(str(content["model"]), tokens, encoder, tuple(parts), beside)

    def __repr__(self) -> str:
        listed = [f"{part.name}: {part.mask!r}, {percent(part.mask.density)} allowed" for part in self.masks]
        return "\n".join([self._heading, *listed, *self._others])

    def __str__(self) -> str:
        parts = [f"{part.name}: {renderer().mask_text(part.mask, labels=self.labels(part))}" for part in self.masks]
        return "\n\n".join([self._heading, *parts, *self._others])

    @property
    def _heading(self) -> str:
        size = plural(len(self.tokens), "token") if self.tokens else "inputs without tokens"
        size += f", {plural(len(self.encoder_tokens), 'token')} in its encoder" if self.encoder_tokens else ""
        return f"{self.model}, {size}: {plural(len(self.masks), 'mask')}"

    @property
    def _others(self) -> list[str]:
        return [f"No mask controls {shorten(', '.join(self.beside), 300)}."] if self.beside else []
