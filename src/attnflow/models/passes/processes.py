"""Several processes that look at one model: what each computes reaches all, and so does an error, with its rank."""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

from attnflow._core.errors import RankFailed
from attnflow._core.markup import plural

LIMIT: Final = timedelta(minutes=5)  # for all ranks to begin a look at a model
BEGIN: Final = timedelta(minutes=1)  # for other ranks to take part
WAIT: Final = timedelta(minutes=30)  # for a rank that computes, as torch's own groups wait
GRACE: Final = timedelta(seconds=15)  # for other ranks to arrive, after an error, before they are released
_LENGTH: Final = 300  # of an error's text
T = TypeVar("T")
_met: Counter[tuple[int, ...]] = Counter()
_named: Counter[str] = Counter()


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


def stores_shards(module: nn.Module) -> bool:
    """Whether FSDP2 keeps the module's parameters in shards, and gathers them for each of its calls."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def stored_in_shards(model: nn.Module) -> set[int]:
    """The ids of the parameters that FSDP2 keeps in shards."""
    return {id(parameter) for module in filter(stores_shards, model.modules()) for parameter in module.parameters()}


def splits_features(model: nn.Module) -> bool:
    """Whether ranks compute parts of one activation (tensor or sequence parallelism); FSDP only stores in parts."""
    stored = stored_in_shards(model)
    for parameter in model.parameters():
        shards = sum(placement.is_shard() for placement in getattr(parameter, "placements", ()))
        if shards > (id(parameter) in stored):
            return True
    return False


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is sharded (DTensor), gathered by a collective that all its ranks must call."""
    gather = getattr(tensor, "full_tensor", None)
    tensor = tensor if gather is None else gather()
    wait = getattr(tensor, "trigger_wait", None)  # the result of a collective may still be on its way
    return tensor if wait is None else wait()


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
        if late:  # this was no meeting: the next one must not take it for one
            self._store.delete_key(f"here/{self.rank}")
            _met[self.ranks] -= 1
            raise RankFailed(
                f"{plural(len(late), 'rank')} ({', '.join(map(str, late))}) did not call {what} within "
                f"{int(LIMIT.total_seconds())} s: call it on each of the {len(self.ranks)} processes, as they run the "
                "model together"
            )
        # A group of its own, as names of new groups hang on how many a rank has, and a used name on old addresses.
        self._group: Any = dist.ProcessGroupGloo(
            c10d.PrefixStore("group", self._store), self.ranks.index(self.rank), len(self.ranks), WAIT
        )

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in the order of `ranks`; tensors arrive on the CPU."""
        try:
            sent = pickle.dumps(_Answer("", _on_cpu(value)))
        except Exception as error:  # what an object of the user's raises; other ranks wait, so they are told
            sent = pickle.dumps(_Answer(f"what it computed cannot be sent to other ranks ({_words(error)})", None))
        sizes = self._all(torch.tensor([len(sent)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        parts = zip(self._all(padded), sizes, strict=True)
        answers: list[_Answer] = [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in parts]
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer.error:
                raise RankFailed(f"rank {rank}: {answer.error}")
        return [answer.value for answer in answers]

    def _all(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in self.ranks]
        try:
            self._group.allgather([parts], [part]).wait()
        except RuntimeError as closed:
            if self._store.check(["left"]):
                raise RankFailed(self._store.get("left").decode()) from closed
            raise
        return parts

    def leave(self, error: BaseException | None) -> None:
        """End the look on this rank; an error reaches ranks that still gather, and those that wait in the step."""
        if error is None:
            self._store.set(f"gone/{self.rank}", "")
            return
        if not isinstance(error, RankFailed):
            self._store.compare_set("left", "", f"rank {self.rank}: {_words(error)}")
        self._group = None  # the last reference: its connections close, which ends what others wait for
        if self._missing("gone", GRACE):
            self._release()

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
            if self._store.check(["left"]):  # another rank ended the look, and released this one
                raise RankFailed(self._store.get("left").decode()) from raised
            error = raised
            answer = _Answer(_words(raised), None)
            self._store.compare_set(f"first {self._runs}", "", f"rank {self.rank}: {answer.error}")
        try:
            if error is not None and self._missing(f"at {self._runs}", GRACE):
                raise RuntimeError("other ranks wait in a collective of the call")
            self._store.set(f"at {self._runs}/{self.rank}", "")
            answers = self.gather(answer)
        except RankFailed:
            raise
        except RuntimeError as closed:
            known = [key for key in ("left", f"first {self._runs}") if self._store.check([key])]
            first = self._store.get(known[0]).decode() if known else _words(closed)
            self._release()
            limit = f"{GRACE.total_seconds():.0f} s"
            why = f"other ranks did not arrive within {limit}, so the process groups were closed to release them"
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
        digests = self.gather(digest(value))
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

    def _release(self) -> None:
        """Close all process groups of this rank, so that ranks that wait for it inside a collective raise."""
        self._group = None
        if dist.is_initialized():
            cast(Any, c10d)._abort_process_group()

    def _missing(self, key: str, limit: timedelta) -> list[int]:
        """Tell the other ranks that this one came so far, and wait for them; the ranks that did not come."""
        self._store.set(f"{key}/{self.rank}", "")
        return _absent(self._store, key, self.ranks, limit)


class Peers:
    """What looks at models of their own found on each rank, told through the store: no rank waits in a collective."""

    def __init__(self, name: str) -> None:
        self.rank, self.absent, self.slow = dist.get_rank(), tuple[int, ...](), tuple[int, ...]()
        _named[name] += 1
        place = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._store = c10d.PrefixStore(f"attnflow/peers/{place}/{_named[name]}", c10d._get_default_store())
        self._ranks = world()
        self._store.set(f"here/{self.rank}", "")

    def exchange(self, what: str, words: str) -> dict[int, str]:
        """{rank: words} of all ranks that take part; `absent` never began, and `slow` did not come so far."""
        late = _absent(self._store, "here", self._ranks, BEGIN)
        self._ranks = tuple(rank for rank in self._ranks if rank not in late)
        self._store.set(f"{what}/{self.rank}", words)
        slow = _absent(self._store, what, self._ranks, LIMIT)
        self._ranks = tuple(rank for rank in self._ranks if rank not in slow)  # they are waited for once
        self.absent, self.slow = (*self.absent, *late), (*self.slow, *slow)
        return {rank: self._store.get(f"{what}/{rank}").decode() for rank in self._ranks}


def _absent(store: Any, what: str, ranks: Sequence[int], limit: timedelta) -> list[int]:
    """The ranks that set no key `what`/rank in time."""
    keys = {rank: f"{what}/{rank}" for rank in ranks}
    try:
        store.wait(list(keys.values()), limit)
    except RuntimeError:  # DistStoreError: the time is over
        return [rank for rank, key in keys.items() if not store.check([key])]
    return []


class Communication(TorchDispatchMode):
    """Notes whether a call sends anything to other processes: each of its passes must then run on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""  # the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and not self.seen:
            self.seen = str(func)
        return func(*args, **(kwargs or {}))


def by_rank(processes: Processes | None, call: Callable[[], T]) -> dict[int, T]:
    """{rank: what the call gives there}; of rank 0 alone on one process."""
    return {0: call()} if processes is None else dict(zip(processes.ranks, processes.run(call), strict=True))


def on_every_rank(ranks: Sequence[int], what: str, call: Callable[[bool], T]) -> T:
    """What a call gives this rank, which may gather; it is told whether it is the first, which writes files."""
    with together(ranks, what) as processes:
        if processes is None:
            return call(True)
        results: list[T] = []  # these may hold models, so they are not sent
        processes.run(lambda: results.append(call(processes.rank == ranks[0])))
        return results[0]


@contextmanager
def together(ranks: Sequence[int], what: str) -> Generator[Processes | None]:
    """Meet the other ranks for the time of a look at a model; None where there are no others."""
    if not ranks:
        yield None
        return
    processes = Processes(ranks, what)
    try:
        yield processes
    except BaseException as error:
        processes.leave(error)
        raise
    processes.leave(None)


@contextmanager
def shared(model: nn.Module, what: str, inputs: object) -> Generator[Processes | None]:
    """Meet the ranks that hold shards of the model, which all pass the same inputs; None for a model of one rank."""
    with together(sharded_over(model), what) as processes:
        if processes is not None:
            processes.require_same("inputs", inputs)
        yield processes


def on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: on_device(item, device) for name, item in cast("Mapping[Any, Any]", value).items()}
    return type(value)(on_device(item, device) for item in value) if type(value) in (list, tuple) else value


def _words(error: BaseException) -> str:
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


def digest(value: Any) -> str:
    """A fingerprint of nested tensors and plain values; what cannot be pickled counts by its class."""
    if isinstance(value, Tensor):
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(numbers.numpy().tobytes()).hexdigest()}"
    if isinstance(value, Mapping):
        return str(sorted((str(name), digest(item)) for name, item in cast("Mapping[Any, Any]", value).items()))
    if isinstance(value, list | tuple):
        return str([digest(item) for item in cast("Sequence[Any]", value)])
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    except Exception:  # what an object of the user's raises
        return type(value).__name__
