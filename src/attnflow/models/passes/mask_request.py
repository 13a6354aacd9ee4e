"""What a model asked transformers for when it made a mask: a note kept beside the mask, found by its identity.

An interception notes the request of each mask that it sees made. `asking` also notes requests of models that are not
intercepted, and those that needed no mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, get_ident
from typing import Any, Final, cast
from weakref import ref

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask

from attnflow._core.version import warn_of_untried

AttentionMask = Tensor | BlockMask | None

FLEX: Final = "flex_attention"
NO_SKIPS: Final = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # a mask, never None for one
_REQUEST: Final = "_attnflow_request"  # of a mask
_recent: Final[deque[ref[Tensor]]] = deque(maxlen=16)  # masks that were made, to know copies of them by
_lock: Final = Lock()  # of the next two
_listeners: Final[list[tuple[int, Asked]]] = []  # with the thread that each listens to
_wrapped: Final[dict[str, tuple[Callable[..., AttentionMask], Callable[..., AttentionMask]]]] = {}  # (ours, theirs)
warn_of_untried()  # nearly every use of transformers comes by here; loading a model does not


@dataclass(frozen=True, eq=False)
class MaskRequest:
    batch_size: int
    num_queries: int  # new tokens
    num_keys: int  # those of a cache included
    first_query: int | Tensor = 0  # its position; a tensor only while a model with a static cache is compiled
    first_key: int = 0  # its position, above 0 where a sliding cache has dropped some
    padding: Tensor | None = None  # [batch, positions], False or 0 at pads
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of transformers' mask function, all of them
    derived: dict[object, Any] = field(default_factory=dict)  # what interceptors make of it, for all layers to share

    def pads(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (real [batch, first_key + num_keys], leading pads [batch]); None without pads, unless compiled."""
        if self.padding is None:
            return None, None
        if "pads" not in self.derived:
            self.derived["pads"] = self._pads(self.padding.bool(), not torch.compiler.is_compiling())
        return self.derived["pads"]

    def _pads(self, padding: Tensor, eager: bool) -> tuple[Tensor | None, Tensor | None]:
        slots = self.first_key + self.num_keys
        if padding.shape[1] < slots:
            padding = torch.nn.functional.pad(padding, (0, slots - padding.shape[1]))
        padding = padding[:, :slots]
        written = self.first_query + self.num_queries  # a static cache has written nothing behind
        if eager and bool(padding[:, :written].all()):
            return None, None
        left = (~padding).cumprod(dim=1).sum(dim=1)
        return padding, None if eager and not bool(left.any()) else left

    def own(self, implementation: str) -> AttentionMask:
        """Return the mask that the model would have had without us."""
        key = "own", implementation
        if key not in self.derived:
            self.derived[key] = ALL_MASK_ATTENTION_FUNCTIONS[implementation](**self.arguments)
        return self.derived[key]


def request_of(mask: object) -> MaskRequest | None:
    """Return the request behind a mask of transformers, or a copy of it; None if it is another's or was written to."""
    request = getattr(mask, _REQUEST, None)
    if isinstance(mask, Tensor) and request is not None and _version(mask) != request.derived.get("version"):
        return None  # the model has written into it
    if request is None and isinstance(mask, BlockMask):  # `BlockMask.to` keeps nothing but this function
        request = getattr(mask.mask_mod, _REQUEST, lambda: None)()
    if request is None and isinstance(mask, Tensor) and not torch.compiler.is_compiling():
        request = _request_of_copy(mask)
    return cast("MaskRequest | None", request)


def _request_of_copy(mask: Tensor) -> MaskRequest | None:
    alike = [
        made
        for made in (reference() for reference in tuple(_recent))
        if made is not None and made.shape == mask.shape and made.dtype == mask.dtype
    ]
    same = [made for made in alike if torch.equal(made, mask.detach().to(made.device))]
    requests = [cast(MaskRequest, getattr(made, _REQUEST)) for made in same]
    places = {(r.first_query, r.first_key, id(r.padding)) for r in requests}
    return requests[-1] if len(places) == 1 else None


def on_request(make: Callable[[MaskRequest], AttentionMask]) -> Callable[..., AttentionMask]:
    def function(
        batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, **others: Any
    ) -> AttentionMask:
        if isinstance(q_offset, Tensor):
            # A static cache hands out its live counter, which the first layer moves on before it attends.
            q_offset = q_offset.clone() if torch.compiler.is_compiling() else int(q_offset)
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        arguments = {**others, **sizes, "q_offset": q_offset, "kv_offset": kv_offset}
        padding = others.get("attention_mask")
        return make(MaskRequest(batch_size, q_length, kv_length, q_offset, kv_offset, padding, arguments))

    return function


def mask_function(implementation: str, replaced: bool) -> Callable[..., AttentionMask]:
    """Return the mask function to register: transformers' own, noting its request; if `replaced`, not used."""

    def make(request: MaskRequest) -> AttentionMask:
        if replaced and implementation == FLEX:
            mask: AttentionMask = _padding_alone(request)
        else:
            arguments = {**request.arguments, **(NO_SKIPS if replaced else {})}
            mask = cast(AttentionMask, ALL_MASK_ATTENTION_FUNCTIONS[implementation](**arguments))
        if isinstance(mask, Tensor) and replaced and not torch.is_grad_enabled():
            mask = mask.contiguous()  # as `generate` wants masks made in advance, which would copy it otherwise
        if mask is not None:
            _note(mask, request)
        return mask

    return on_request(make)


def _note(mask: Tensor | BlockMask, request: MaskRequest) -> None:
    setattr(mask, _REQUEST, request)
    if torch.compiler.is_compiling():
        return
    if isinstance(mask, BlockMask):
        setattr(mask.mask_mod, _REQUEST, ref(request))  # what is derived from a request may hold the function
    else:
        request.derived["version"] = _version(mask)
        _recent.append(ref(mask))


def _version(mask: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or mask.is_inference() else mask._version


def _padding_alone(request: MaskRequest) -> BlockMask:
    device = request.arguments.get("device", "cpu")
    real, _ = request.pads()
    if real is None:
        real = torch.ones(request.batch_size, request.first_key + request.num_keys, dtype=torch.bool)
    real = real[:, request.first_key :].to(device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return real[b, k]

    size = request.batch_size, 1, 1
    return BlockMask.from_kv_blocks(
        torch.ones(size, dtype=torch.int32, device=device),
        torch.zeros((*size, 1), dtype=torch.int32, device=device),
        BLOCK_SIZE=(max(request.num_queries, 1), max(request.num_keys, 1)),
        mask_mod=mask_mod,
        seq_lengths=(request.num_queries, request.num_keys),
    )


@dataclass(frozen=True, eq=False)
class Asked:
    """The masks that transformers made, in order; None where the kernel's `is_causal` stands for one."""

    made: list[tuple[AttentionMask, MaskRequest]] = field(default_factory=list[tuple[AttentionMask, MaskRequest]])

    def request(self, mask: object) -> MaskRequest | None:
        return next((request for made, request in reversed(self.made) if _same(made, mask)), None)


@contextmanager
def asking() -> Generator[Asked, None, None]:
    """Note what any model asks transformers for inside, in this thread, and requests that needed no mask."""
    listener = get_ident(), Asked()
    mapping = cast(dict[str, Callable[..., AttentionMask]], AttentionMaskInterface._global_mapping)
    with _lock:
        _listeners.append(listener)
        for name, function in tuple(mapping.items()):
            if mapping[name] is not _wrapped.get(name, (None, None))[0]:
                _wrapped[name] = on_request(partial(_heard, function)), function
                mapping[name] = _wrapped[name][0]
    try:
        yield listener[1]
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                for name, (wrapper, function) in _wrapped.items():
                    if mapping.get(name) is wrapper:  # what others have registered or removed meanwhile stays so
                        mapping[name] = function
                _wrapped.clear()


def _heard(function: Callable[..., AttentionMask], request: MaskRequest) -> AttentionMask:
    mask, here = function(**request.arguments), get_ident()
    for thread, requests in tuple(_listeners):
        if thread == here:
            requests.made.append((mask, request))
    return mask


def pairs_asked(request: MaskRequest) -> Tensor:
    """Return the requested pairs, bool [batch, queries, keys], padding applied, united over heads."""
    with torch.no_grad():
        arguments: dict[str, Any] = {**request.arguments, **NO_SKIPS}
        mask = cast(Tensor, sdpa_mask(**arguments))
    return mask.any(1).cpu()


def _same(made: AttentionMask, mask: object) -> bool:
    if made is mask:
        return made is not None
    if not isinstance(made, Tensor) or not isinstance(mask, Tensor):
        return False
    same = made.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()
    return same and made.shape[-2:] == mask.shape[-2:] and made.storage_offset() == mask.storage_offset()


def asks_causal(request: MaskRequest) -> bool:
    pending, known = [request.arguments.get("mask_function")], set[int]()
    while pending:
        function = pending.pop()
        if function is causal_mask_function:
            return True
        if id(function) in known:
            continue
        known.add(id(function))
        for cell in getattr(function, "__closure__", None) or ():
            content = cell.cell_contents
            pending += filter(callable, content if isinstance(content, tuple | list) else [content])
    return False


def has_causal_head(config: object) -> bool:
    """Whether transformers has a causal language model of this configuration, so that its base model is causal."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
