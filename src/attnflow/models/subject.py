"""The subject of every public verb: a model with its tokenizer, and facts about both, found once.

    subject = Subject.of(model)  # a module, what `load_model` returned, or a subject
    subject.device, subject.layers, subject.read("a text")

It wraps nothing and changes nothing. Its answers are cached, so it lives as long as one call: a verb makes it at its
door, and the functions behind the door take it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from attnflow._core.errors import UnsupportedArchitecture
from attnflow._core.wrappers import class_of
from attnflow._core.wrappers import own_name as own_name
from attnflow._core.wrappers import unwrapped as unwrapped
from attnflow.models.arguments import as_tensor, batched_ids, named_tensors, rows_of_ids, special_ids
from attnflow.models.loading.names import MODELS
from attnflow.models.placement import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from attnflow.models.anatomy.feed_forward import FeedForward, PackedExperts
    from attnflow.models.anatomy.sites import Site, Stack

ENCODER: Final = ("input_ids", "inputs_embeds")
_PRECISE: Final = (torch.float32, torch.float64)
DECODER: Final = ("decoder_input_ids", "decoder_inputs_embeds")
Text = str | Sequence[int] | Tensor | Mapping[str, Any]


class Loaded(NamedTuple):
    """A model and its tokenizer, as `af.load_model` returns them; the tokenizer is None if not requested."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


@dataclass(frozen=True, eq=False)
class Subject(Placement):
    """A model and its tokenizer; each property looks at the model once."""

    tokenizer: PreTrainedTokenizerBase | None = None

    @staticmethod
    def of(model: nn.Module | Loaded | Subject, tokenizer: PreTrainedTokenizerBase | None = None) -> Subject:
        """Make the subject of a call; a `tokenizer` that is given goes before the one that came with the model."""
        if isinstance(model, Subject):
            return model if tokenizer is None else replace(model, tokenizer=tokenizer)
        if isinstance(model, Loaded):
            return Subject(model.model, model.tokenizer if tokenizer is None else tokenizer)
        if not isinstance(cast(object, model), nn.Module):
            raise TypeError(
                f"expected a torch module or what af.load_model returns, got {type(model).__name__}; "
                "load a model by its name or folder with af.load_model(...)"
            )
        return Subject(model, tokenizer)

    @cached_property
    def inside(self) -> Subject:
        """The subject without the wrappers of `torch.compile`, of checkpointing and of data parallelism."""
        model = unwrapped(self.model)
        return self if model is self.model else Subject(model, self.tokenizer)

    @cached_property
    def transformer(self) -> nn.Module:
        """The outermost transformers model inside, or the model itself."""
        from transformers import PreTrainedModel

        return next((module for module in self.model.modules() if isinstance(module, PreTrainedModel)), self.model)

    @cached_property
    def name(self) -> str:
        """The name that the model was loaded by, without local folders, or its class."""
        inner = self.transformer
        name = str(getattr(getattr(inner, "config", None), "_name_or_path", "") or class_of(inner).__name__)
        if not Path(name).is_absolute() and not Path(name).is_dir():
            return name
        for short, packaged in MODELS.items():
            place = packaged.find()
            if place is not None and Path(name) in (place, place.parent):  # a GGUF file is known by its folder
                return short
        return Path(name).resolve().name

    @property
    def config(self) -> Any:
        return getattr(self.model, "config", None)

    @property
    def text_config(self) -> Any:
        """The configuration of the text model, if there is one."""
        return getattr(self.config, "text_config", None) or self.config

    @cached_property
    def encodes_and_decodes(self) -> bool:
        return getattr(self.config, "is_encoder_decoder", False) is True

    @cached_property
    def embedding(self) -> nn.Embedding | None:
        """The table of token embeddings, if there is one."""
        getter = getattr(self.model, "get_input_embeddings", None)
        if not callable(getter):
            return next((module for module in self.model.modules() if isinstance(module, nn.Embedding)), None)
        with suppress(NotImplementedError, AttributeError):  # what getters of classes without a table raise
            module = getter()
            return module if isinstance(module, nn.Embedding) else None
        return None

    @cached_property
    def layers(self) -> dict[str, int]:
        """{path: index in its list} of the layers: members of the outermost module lists that hold whole blocks."""
        layers: dict[str, int] = {}
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{f}.") for f in layers):
                continue
            alike = isinstance(module, nn.ModuleList) or (len(module) > 1 and len({type(m) for m in module}) == 1)
            members = cast("dict[str, nn.Module | None]", module._modules)  # Informer's convolutions may be None
            blocks = {index: block for index, block in enumerate(members.values()) if block is not None}
            if alike and all(next(block.children(), None) is not None for block in blocks.values()):
                layers |= {f"{name}.{index}": index for index in blocks}
        return layers

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The modules that call the attention interface of transformers; see `sites.find_sites` for what it raises."""
        from attnflow.models.anatomy.sites import find_sites

        return find_sites(self.model)

    @cached_property
    def stack(self) -> Stack:
        """The one list of layers whose self-attention calls the interface; see `sites.stack_of`."""
        from attnflow.models.anatomy.sites import stack_of

        return stack_of(self.model)

    @cached_property
    def feed_forward(self) -> list[FeedForward | PackedExperts]:
        """The feed-forward layers; see `feed_forward.find_feed_forward`."""
        from attnflow.models.anatomy.feed_forward import find_feed_forward

        return list(find_feed_forward(self.model))

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the arguments that forward takes."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = inspect.signature(self.model.forward).parameters.items()
        return tuple(name for name, parameter in named if parameter.kind in kinds)

    def accepts(self, name: str) -> bool:
        """Whether the forward of the transformers model takes an argument."""
        return name in inspect.signature(self.transformer.forward).parameters

    def accepted(self, *names: str) -> str | None:
        """The first of these names that forward takes, or a module that it hands unknown arguments on to."""
        modules = [self.model]
        for module in modules:
            parameters = inspect.signature(module.forward).parameters
            if (name := next((name for name in names if name in parameters), None)) is not None:
                return name
            if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                modules += module.children()
        return None

    @cached_property
    def takes_use_cache(self) -> bool:
        """Whether a call takes `use_cache`, also through the keywords that heads of transformers hand on."""
        named = inspect.signature(self.model.forward).parameters.values()
        hands_on = self.config is not None and any(each.kind is each.VAR_KEYWORD for each in named)
        return self.accepted("use_cache") is not None or hands_on

    @property
    def uncached(self) -> dict[str, object]:
        """The arguments of a pass that keeps no cache."""
        return {"use_cache": False} if self.accepts("use_cache") else {}

    @property
    def sparing(self) -> dict[str, object]:
        """The arguments of a pass that keeps no cache and computes the last logits alone."""
        return self.uncached | ({"logits_to_keep": 1} if self.accepts("logits_to_keep") else {})

    def named(self, inputs: object) -> dict[str, Any]:
        """Name what a model is called with: a text, token ids, vectors, or keyword arguments, which stay so."""
        if isinstance(inputs, str):
            return self._tokens_of(inputs)
        if isinstance(inputs, Sequence):
            inputs = rows_of_ids(cast(Sequence[Any], inputs))
        if isinstance(inputs, Tensor):
            usual = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
            return {usual if usual in self.parameters or not self.parameters else self.parameters[0]: inputs}
        if isinstance(inputs, Mapping):
            return dict(cast(Mapping[str, Any], inputs))
        raise TypeError(
            "expected a text, token ids or a dict of keyword arguments for the model's forward, got "
            f"{type(inputs).__name__}"
        )

    def _tokens_of(self, text: str) -> dict[str, Any]:
        if self.tokenizer is None:
            raise ValueError(
                "a text needs a tokenizer: pass what af.load_model returned in place of the model, token ids in place "
                "of the text, or tokenizer=... where a function has it"
            )
        named = dict(self.tokenizer(text, return_tensors="pt"))
        if not named["input_ids"].numel():
            raise ValueError(f"the text {text!r} has no tokens: pass a longer one")
        return named

    def read(self, inputs: object, *, ids: bool = False) -> dict[str, Tensor]:
        """Make the arguments of a whole forward pass: tensors with a batch axis, on the model's device.

        Unless `ids`, which named inputs must then hold, a model of two halves needs inputs for both: who names tokens
        would not know its own guess.
        """
        if isinstance(inputs, str):
            inputs = self._tokens_of(inputs)
        if isinstance(inputs, Mapping):
            named = named_tensors(cast("Mapping[str, object]", inputs))
        else:
            named = {"input_ids": batched_ids(as_tensor("inputs", inputs))}
            if len(named["input_ids"]) > 1:
                raise ValueError(
                    "token ids must be of one sequence: pass a batch as a mapping, with its attention_mask"
                )
        if "input_ids" in named:
            named["input_ids"] = self._in_vocabulary(batched_ids(named["input_ids"]))
        elif ids:
            raise ValueError(f"the inputs must hold input_ids, got {', '.join(named) or 'nothing'}")
        elif not named:
            raise ValueError("the inputs are empty: expected a text, token ids, or the model's named inputs")
        two = not ids and self.encodes_and_decodes and self.accepts(DECODER[0])
        if two and not any(name in named for name in DECODER):
            raise ValueError("expected inputs for both halves of the model: pass a mapping with decoder_input_ids")
        return {name: value.to(self.device) for name, value in named.items()}

    def read_one(self, inputs: object) -> dict[str, Tensor]:
        """Make the arguments of a pass of one sequence, whose sums are to be checked: of float32 or float64 weights.

        Raises:
            UnsupportedArchitecture: the weights are of half precision, on the meta device, or made in inference mode.
            ValueError: several sequences, or as for `read`.
        """
        self.require_whole("an explanation")
        if self.without_numbers or any(parameter.is_inference() for parameter in self.model.parameters()):
            raise UnsupportedArchitecture(
                "the weights are on the meta device, or were made in torch.inference_mode(): load the model outside of "
                "both"
            )
        half = (p.dtype for p in self.model.parameters() if p.is_floating_point() and p.dtype not in _PRECISE)
        if (kind := next(half, None)) is not None:
            raise UnsupportedArchitecture(
                f"the weights are {str(kind).removeprefix('torch.')}, whose residual sums are rounded to 2 or 3 "
                "digits, so that no attribution of a score can be checked; call model.float() first"
            )
        named = self.read(inputs)
        for name, value in named.items():
            if name.endswith("input_ids") and len(value) != 1:
                raise ValueError(f"expected one sequence, got a batch of {len(value)} in {name}: pass one row of it")
        return named

    def token(self, word: str) -> int:
        """The id of a text that is one token; `ValueError` for another, or without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("a token given as text needs a tokenizer: pass tokenizer=..., or the token's id")
        ids = cast("list[int]", cast(Any, self.tokenizer)(word, add_special_tokens=False)["input_ids"])
        if len(ids) != 1:
            raise ValueError(
                f"expected one token, but {word!r} is {len(ids)}: {self.texts(ids)}. Many vocabularies need a space "
                "before the word, as in ' Paris'"
            )
        return ids[0]

    def _in_vocabulary(self, ids: Tensor) -> Tensor:
        largest, tokens = int(ids.max()), ids.shape[1]
        size = None if self.embedding is None else self.embedding.num_embeddings
        if size is not None and (largest >= size or int(ids.min()) < 0):
            raise ValueError(f"token ids must lie in 0 to {size - 1}, the model's vocabulary, got up to {largest}")
        limit = self._positions(tokens)
        if limit is not None and tokens > limit:
            raise ValueError(f"the inputs have {tokens} tokens, and the model has positions for {limit}: shorten them")
        return ids

    def _positions(self, tokens: int) -> int | None:
        """How many positions the model has vectors for; None where it computes them, or allows these tokens."""
        config = getattr(self.transformer, "config", None)
        stated = None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(stated, int) or tokens <= stated:
            return None
        sizes = (
            module.num_embeddings
            for name, module in self.model.named_modules()
            if type(module) is nn.Embedding and name.rpartition(".")[2] in ("position_embeddings", "wpe")
        )
        return min((size for size in sizes if size >= stated), default=None)  # a smaller one is of an image's patches

    def sample(self, inputs: str | Sequence[int], limit: int | None = None) -> dict[str, Tensor]:
        """Make the arguments from at most `limit` tokens and, to see what crosses a batch, the tokens reversed."""
        if isinstance(inputs, str):
            tokenizer = cast(Any, self.tokenizer)
            inputs = tokenizer(inputs, truncation=limit is not None, max_length=limit)["input_ids"]
        ids = [int(token) for token in inputs][:limit]
        if len(ids) < 2:
            raise ValueError(f"expected at least 2 tokens, got {len(ids)}: nothing can flow")
        tokens = torch.tensor([ids, ids[::-1]])
        if self.encodes_and_decodes:
            return {"input_ids": tokens, "decoder_input_ids": tokens[:, :-1]}  # an audit tells them by their lengths
        return {"input_ids": tokens}

    def ordinary_tokens(self, count: int) -> list[int]:
        """Return ids that are not special, since models replace, mask or count those."""
        special = special_ids((self.config, self.config.get_text_config()), ("_id", "_index"))
        tokens = [index for index in range(3, 1000 + count) if index not in special][:count]
        last = None if self.embedding is None else self.embedding.num_embeddings - 1
        return tokens if last is None else [min(token, last - place) for place, token in enumerate(tokens)]

    def texts(self, ids: Iterable[int]) -> list[str]:
        """Decode every token by itself; without a tokenizer its id is its text."""
        return [str(token) if self.tokenizer is None else str(self.tokenizer.decode([token])) for token in ids]

    def texts_in_sequence(self, ids: Iterable[int]) -> list[str]:
        """Decode every token of a sequence with the space before it, so that joined they are the text.

        >>> "".join(Subject(nn.Identity()).texts_in_sequence([5, 6, 7]))
        '5 6 7'
        """
        texts: list[str] = []
        before: list[int] = []
        for token in ids:
            (text,) = self.texts([token])
            if before and self.tokenizer is None:
                text = f" {text}"
            elif before and self.tokenizer is not None:  # many tokenizers put the space only between two tokens
                start, both = (str(self.tokenizer.decode(listed)) for listed in (before, [*before, token]))
                text = both.removeprefix(start) if both.startswith(start) else text
            texts.append(text)
            before = [token]
        return texts
