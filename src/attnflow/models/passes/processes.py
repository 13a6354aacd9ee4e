"""Several processes that look at one model: what each computes reaches all, and so does an error, with its rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from attnflow._core.errors import RankFailed
from attnflow._core.markup import plural

LIMIT: Final = timedelta(minutes=5)  # for all ranks to begin a look at a model
GRACE: Final = timedelta(seconds=15)  # for other ranks to arrive, after an error, before they are released
_LENGTH: Final = 300  # of an error's text
T = TypeVar("T")
_met: Counter[tuple[int, ...]] = Counter()


class _Answer(NamedTuple):
    error: str  # "" without one
    value: Any


def world() -> tuple[int, ...]:
    """Every rank of the launch; () on one process."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return tuple(range(dist.get_world_size())) if several else ()


def sharded_over(model: nn.Module) -> tuple[int, ...]:
    """The ranks that hold shards of a model's parameters (DTensor) and so must run it together; () on one process."""
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    ranks = {rank for mesh in meshes if mesh is not None for rank in mesh.mesh.flatten().tolist()}
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


def splits_features(model: nn.Module) -> bool:
    """Whether ranks compute parts of one activation (tensor or sequence parallelism); FSDP only stores in parts."""
    stored: set[int] = set()
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            stored.update(map(id, module.parameters()))
    for parameter in model.parameters():
        shards = sum(placement.is_shard() for placement in getattr(parameter, "placements", ()))
        if shards > (id(parameter) in stored):
            return True
    return False


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is sharded (DTensor), gathered by a collective that all its ranks must call."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


class Processes:
    """The ranks of one look at a model; every rank calls the same methods in the same order.

    Attributes:
        ranks: their global numbers.
        rank: the number of this one.
    """

    def __init__(self, ranks: Sequence[int], what: str) -> None:
        self.ranks, self.rank = tuple(ranks), dist.get_rank()
        _met[self.ranks] += 1
        place = f"attnflow/{hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]}/{_met[self.ranks]}"
        self._store = c10d.PrefixStore(place, c10d._get_default_store())
        self._runs = 0
        late = self._missing("here", LIMIT)
        if late:
            raise RankFailed(
                f"{plural(len(late), 'rank')} ({', '.join(map(str, late))}) did not call {what} within "
                f"{int(LIMIT.total_seconds())} s: call it on each of the {len(self.ranks)} processes, as they run the "
                "model together"
            )
        group = dist.new_group(list(self.ranks), backend="gloo", use_local_synchronization=True)
        self._group = cast("dist.ProcessGroup", group)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in the order of `ranks`; tensors arrive on the CPU."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, _on_cpu(value), group=self._group)
        return values

    def run(self, call: Callable[[], T]) -> list[T]:
        """Call on each rank, and return the values of all.

        An error on some ranks is raised on every one. Ranks that wait for them in a collective of the call's own are
        released by closing the process groups, as no other rank will ever join it.

        Raises:
            RankFailed: it failed on some ranks; the first of them is named. Where all fail alike, each raises its own.
        """
        self._runs += 1
        answer, error = _Answer("", None), None
        try:
            answer = _Answer("", call())
        except Exception as raised:
            error = raised
            answer = _Answer(_words(raised), None)
            self._store.compare_set("first", "", f"rank {self.rank}: {answer.error}")
        try:
            if error is not None and self._missing(f"at {self._runs}", GRACE):
                raise RuntimeError("other ranks wait in a collective of the call")
            self._store.set(f"at {self._runs}/{self.rank}", "")
            answers = self.gather(answer)
        except RuntimeError as closed:
            first = self._store.get("first").decode() if self._store.check(["first"]) else _words(closed)
            _release()
            why = "other ranks waited for it in a collective, so the process groups were closed"
            raise RankFailed(f"{first} ({why})") from (error or closed)
        failed = {rank: given.error for rank, given in zip(self.ranks, answers, strict=True) if given.error}
        if error is not None and len(failed) == len(answers) and len(set(failed.values())) == 1:
            raise error
        if failed:
            first, *others = failed
            more = f" (so did {plural(len(others), 'other rank')})" if others else ""
            raise RankFailed(f"rank {first}: {failed[first]}{more}") from error
        return [given.value for given in answers]

    def require_same(self, what: str, value: object) -> None:
        """Raise `ValueError` on every rank unless all of them have the same value: tensors by what they hold."""
        digests = self.gather(_digest(value))
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in zip(self.ranks, digests, strict=True) if digest != digests[0])
            raise ValueError(
                f"ranks {self.ranks[0]} and {other} have other {what}: the model runs on {len(self.ranks)} processes "
                f"together, so pass the same {what} on each"
            )

    def joined(self, values: Tensor) -> Tensor:
        """The parts [batch, n, features] that ranks computed, side by side; one of them where all are equal."""
        parts = self.gather(values)
        alike = all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts)
        fits = all(part.shape[:2] == values.shape[:2] for part in parts)
        return values if alike or not fits else torch.cat(parts, -1).to(values.device)

    def _missing(self, key: str, limit: timedelta) -> list[int]:
        """Tell the other ranks that this one came so far, and wait for them; the ranks that did not come."""
        self._store.set(f"{key}/{self.rank}", "")
        keys = {rank: f"{key}/{rank}" for rank in self.ranks}
        try:
            self._store.wait(list(keys.values()), limit)
        except RuntimeError:  # DistStoreError: the time is over
            return [rank for rank, name in keys.items() if not self._store.check([name])]
        return []


@contextmanager
def together(ranks: Sequence[int], what: str) -> Generator[Processes | None]:
    """Meet the other ranks for the time of a look at a model; None where there are no others."""
    if not ranks:
        yield None
        return
    processes = Processes(ranks, what)
    try:
        yield processes
    finally:
        processes.close()


def _release() -> None:
    """Close all process groups of this rank, so that ranks that wait for it inside a collective raise."""
    if dist.is_initialized():
        cast(Any, c10d)._abort_process_group()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:_LENGTH]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return whole(value.detach()).cpu()
    if isinstance(value, Mapping):
        return {name: _on_cpu(item) for name, item in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, _Answer):
        return _Answer(value.error, _on_cpu(value.value))
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    return value


def _digest(value: Any) -> str:
    """A fingerprint of nested tensors and plain values; other objects count by their class."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(numbers.numpy().tobytes()).hexdigest()}"
    if isinstance(value, Mapping):
        return str(sorted((str(name), _digest(item)) for name, item in cast("Mapping[Any, Any]", value).items()))
    if isinstance(value, list | tuple):
        return str([_digest(item) for item in cast("Sequence[Any]", value)])
    return repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
