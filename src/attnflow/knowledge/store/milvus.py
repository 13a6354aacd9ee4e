"""Rows in Milvus: a file served by milvus-lite in this process, or a server or cluster, by the same client.

A store is a collection of one row, which says what there is (`attnflow_store`), and a collection of entries for the
present and for each snapshot (`attnflow_entries_<number>`). Changing that one row is what makes a snapshot count and
a restore happen. A call that writes is one request, and on a server it is as indivisible as Milvus makes a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np

from attnflow._core.checks import IntArray
from attnflow._core.errors import MissingExtra
from attnflow.knowledge.store import metadata
from attnflow.knowledge.store.arguments import refuse_unknown
from attnflow.knowledge.store.check import StoreCheck
from attnflow.knowledge.store.durable import SyncedTree, make_folders, sync
from attnflow.knowledge.store.entry import Flags, Floats, Rows, Summary, column
from attnflow.knowledge.store.errors import NotAStore, ReadOnly, StoreError, StoreLocked, failures
from attnflow.knowledge.store.lock import FileLock
from attnflow.knowledge.store.metadata import Metadata, Wanted

_STORE: Final = "attnflow_store"
_TEXTS: Final = ("text", "source", "encoder")
_FIELDS: Final = ("id", *_TEXTS, "version", "created", "updated", "vector")
_CHARACTERS: Final = 65_535  # Milvus' limit on a string, in bytes
_REQUEST: Final = 48 << 20  # bytes: Milvus takes messages of up to 64 MB
_READ: Final = 5_000  # rows in a response
_COPIED: Final = 1_000  # rows in a request of a snapshot
_AHEAD: Final = 1_000_000  # microseconds that the record of the clock runs ahead, so as not to be written every time
_SERVED: Counter[Path] = Counter()  # files, by how many stores of this process use them


class Connection:
    """A `pymilvus.MilvusClient`, and what has to be let go of with it: of a file that is served here, its server."""

    def __init__(self, address: str, read_only: bool) -> None:
        try:
            import pymilvus
        except ImportError:
            raise MissingExtra("pymilvus", "milvus", "a store in Milvus") from None
        self.types = pymilvus.DataType
        self.file = None if "://" in address else Path(address).absolute()
        self._tree = None if self.file is None else SyncedTree(self.file, of_lance=False)
        self._named = False  # in its folder, on the disk
        self._lock: FileLock | None = None
        if self.file is not None:
            address = self._serve(self.file, read_only)
            # milvus-lite keeps no time stamps, which the iterator says at every pass over a collection
            logging.getLogger("pymilvus.client.iterator.query_iterator").setLevel(logging.ERROR)
        try:
            self.client: Any = pymilvus.MilvusClient(uri=address)
        except Exception as error:
            self.close()
            hint = " (milvus-lite serves a file to one process at a time)" if self.file else ""
            raise StoreError(f"no connection to Milvus at {address}{hint}: {str(error).splitlines()[0]}") from error
        if self.file is not None:
            _SERVED[self.file] += 1

    def sync(self) -> None:
        """What was written to a file that is served here is on the disk: milvus-lite hands it to the system only."""
        if self._tree is not None and self.file is not None:
            self._tree.sync()
            if not self._named:
                sync(self.file.parent)
                self._named = True

    def close(self) -> None:
        """Once."""
        client, self.client = getattr(self, "client", None), None
        if client is not None:
            client.close()
            if self.file is not None:
                _SERVED[self.file] -= 1
                if not _SERVED[self.file]:
                    from milvus_lite.server_manager import server_manager_instance

                    server_manager_instance.release_server(str(self.file))
                    if self._lock is not None:
                        self.sync()
        if self._lock is not None:
            self._lock.release()

    def _serve(self, file: Path, read_only: bool) -> str:
        """The file as pymilvus wants it: with the ending .db, and with milvus-lite."""
        if find_spec("milvus_lite") is None:  # pymilvus imports it
            raise MissingExtra("milvus-lite", "milvus", "a store in a file of Milvus")
        if file.suffix != ".db":
            raise ValueError(f"a file of Milvus ends with .db, got {file}")
        if read_only and not file.exists():
            raise NotAStore(f"there is no store at {file}: there is nothing to read")
        try:
            make_folders(file.parent)
        except OSError as error:
            raise ReadOnly(f"a store at {file} cannot be made: {error.strerror}") from None
        if not read_only:
            self._lock = FileLock(file.with_name(f"{file.name}.lock"))
        return str(file)


@dataclass(frozen=True)
class Record(Metadata):
    """What the one row of `attnflow_store` says.

    Attributes:
        live: number of the collection of the present entries.
        copies: numbers of the collections of snapshots, by name, oldest first.
        lists: lists of the approximate index (IVF_FLAT); 0 where the index is exact (FLAT).
        probes: lists that an approximate search reads.
        writer: who may write: the one that was opened last, as a server knows no locks.
        clock: later than the times of all rows, by up to a second.
    """

    live: int = 1
    copies: Mapping[str, int] = field(default_factory=dict[str, int])
    lists: int = 0
    probes: int = 0
    writer: str = ""
    clock: int = 0


class MilvusRows:
    """The keeping half of a backend in Milvus: one collection, one row an entry; a write is one request."""

    def __init__(self, address: str, wanted: Wanted) -> None:
        self._place, self._read_only = f"milvus:{address}", wanted.read_only
        self._name = uuid4().hex
        self.clock = 0  # the latest time that a row was given
        self._connection = Connection(address, wanted.read_only)
        self.client = self._connection.client
        try:
            with failures(f"{address} cannot be opened"):
                if not self.client.has_collection(_STORE):
                    self._create(wanted.new(self._place, Record))
                self.refresh()
            wanted.check(self._place, self.record)
            if not wanted.read_only:
                with failures(f"{address} cannot be opened to be written"):
                    self.record, self.clock = replace(self.record, writer=self._name), self.record.clock
                    self._put(self.record)
        except BaseException:
            self.close()
            raise
        self.dim, self.num_thresholds = self.record.dim, self.record.num_thresholds

    @property
    def next_id(self) -> int:
        """On record before a row of that id is written."""
        return self.record.next_id

    @property
    def live(self) -> str:
        """The collection of the present entries."""
        return _entries(self.record.live)

    def write(self, rows: Rows) -> None:
        """One request of whole rows."""
        _refuse_too_large(rows)
        with failures("the entries were not written"):
            self._may_write()
            latest = int(rows.updated.max())
            clock = self.record.clock if latest <= self.record.clock else latest + _AHEAD
            self.save(next_id=max(self.next_id, int(rows.id.max()) + 1), clock=clock)
            self.client.upsert(self.live, rows.records())
            self._connection.sync()
            self.clock = latest

    def delete(self, ids: IntArray) -> None:
        """One request."""
        if len(ids) * 20 > _REQUEST:
            raise ValueError(f"{len(ids):,} ids are too many for one request to Milvus: delete fewer at a time")
        with failures("the entries were not deleted"):
            self._may_write()
            self.client.delete(self.live, ids=ids.tolist())
            self._connection.sync()

    def read(self, ids: IntArray) -> Rows:
        """By id."""
        return Rows.of(self._rows(_FIELDS, ids), self.dim + self.num_thresholds)

    def ids(self) -> IntArray:
        """A pass over all rows."""
        return column(self._rows(("id",)), "id")

    def holds(self, ids: IntArray) -> Flags:
        """A query by id."""
        return np.isin(ids, column(self._rows(("id",), ids), "id"))

    def vectors(self, ids: IntArray | None = None) -> Floats:
        """A query by id, or a pass over all rows."""
        rows = self._rows(("id", "vector"), ids)
        keys, order = column(rows, "id"), column(rows, "id").argsort()
        if ids is not None and len(keys) < len(ids):  # others may write to a server
            refuse_unknown(np.setdiff1d(ids, keys).tolist())
        where = order if ids is None else order[np.searchsorted(keys, ids, sorter=order)]
        return column(rows, "vector", np.float32).reshape(-1, self.dim + self.num_thresholds)[where]

    def snapshot(self, name: str) -> None:
        """A copy in a collection of its own, which counts once it is on record; O(rows) through this process."""
        with failures("the snapshot was not made"):
            self._may_write()
            number = self._copy(self.live)
            self.client.release_collection(_entries(number))  # it need not be in the server's memory
            self.save(copies={**self.record.copies, name: number})

    def snapshots(self) -> list[str]:
        """On record."""
        return list(self.record.copies)

    def restore(self, name: str) -> None:
        """A copy of the snapshot, which is present once it is on record; O(rows) through this process."""
        with failures("the snapshot was not restored"):
            self._may_write()
            copy, before = _entries(self.record.copies[name]), self.live
            number = self._copy(copy)
            self.save(live=number)
            self.client.release_collection(copy)
            self.client.drop_collection(before)

    def drop_snapshot(self, name: str) -> None:
        """First from the record, then the collection."""
        with failures("the snapshot was not dropped"):
            self._may_write()
            number = self.record.copies[name]
            self.save(copies={other: n for other, n in self.record.copies.items() if other != name})
            self.client.drop_collection(_entries(number))

    def refresh(self) -> None:
        """Another process may have restored a snapshot; single rows are read anew anyway."""
        with failures("the store cannot be refreshed"):
            self.client.load_collection(_STORE)
            self.record = self._recorded()
            if not self.client.list_indexes(self.live) and not self._read_only:
                self._load(self.live)  # killed while the index was built anew
            self.client.load_collection(self.live)

    def compact(self) -> None:
        """Refused: Milvus does it by itself."""
        raise StoreError(f"{self._place} is in Milvus, which compacts its files by itself")

    def verify(self, uri: str) -> StoreCheck:
        """Refused: rows carry no checksums here."""
        raise StoreError(f"{uri} is in Milvus, where entries have no checksums of ours: verify a store in a directory")

    def summary(self) -> Summary:
        """A pass over all rows."""
        rows, file = self._rows(("version", "encoder")), self._connection.file
        size = None if file is None else sum(path.stat().st_size for path in file.rglob("*") if path.is_file())
        return Summary(Counter(row["version"] for row in rows), Counter(row["encoder"] for row in rows), size)

    def build_index(self, lists: int) -> None:
        """An exact index (0 lists), or an approximate one, instead of the present one."""
        with failures("the index was not built"):
            self._may_write()
            self.client.release_collection(self.live)
            for name in self.client.list_indexes(self.live):
                self.client.drop_index(self.live, index_name=name)
            self.save(lists=lists, probes=lists)
            self._load(self.live)

    def save(self, **changes: Any) -> None:
        """Change the record: one row, written as a whole."""
        changed = replace(self.record, **changes)
        if changed != self.record:
            self._may_write()
            self._put(changed)
            self.record = changed

    def close(self) -> None:
        """Leave the server, or stop serving the file."""
        self._connection.close()

    def _may_write(self) -> None:
        if self._read_only:
            raise ReadOnly(f"the store {self._place} was opened with read_only=True, and its index is on the server")
        if self._recorded().writer != self._name:
            raise StoreLocked(
                f"another one has opened the store {self._place} to write since this one did, and one may write at a "
                "time: open it again to go on, or with read_only=True"
            )

    def _create(self, record: Record) -> None:
        """The entries first: there is a store once the record is written."""
        self.record = replace(record, live=self._unused())
        self.dim, self.num_thresholds = record.dim, record.num_thresholds
        self._new_entries(self.record.live)
        self._new_collection(_STORE, 2, texts=("record",))  # a collection must have vectors
        self._put(self.record)

    def _put(self, record: Record) -> None:
        self.client.upsert(_STORE, [{"id": 0, "record": metadata.encode(record), "vector": [0.0, 0.0]}])
        self._connection.sync()

    def _recorded(self) -> Record:
        rows = self.client.query(_STORE, filter="id == 0", output_fields=["record"])
        if not rows:
            raise NotAStore(f"the collection {_STORE} is empty: the store was not made to the end; drop the collection")
        return metadata.decode(_STORE, rows[0]["record"], Record)

    def _new_entries(self, number: int) -> None:
        width = self.dim + self.num_thresholds
        self._new_collection(_entries(number), width, _TEXTS, ("version", "created", "updated"), nullable=True)

    def _new_collection(
        self, name: str, width: int, texts: Sequence[str], numbers: Sequence[str] = (), nullable: bool = False
    ) -> None:
        """Read as it was last written (Strong), and in one shard, so that a batch is one message."""
        kind = self._connection.types
        schema = self.client.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", kind.INT64, is_primary=True)
        for text in texts:
            schema.add_field(text, kind.VARCHAR, max_length=_CHARACTERS, nullable=nullable)
        for number in numbers:
            schema.add_field(number, kind.INT64)
        schema.add_field("vector", kind.FLOAT_VECTOR, dim=width)
        self.client.create_collection(name, schema=schema, consistency_level="Strong", num_shards=1)
        self._load(name)

    def _load(self, name: str) -> None:
        """Index a collection, and serve it."""
        index, lists = self.client.prepare_index_params(), self.record.lists
        if lists and name != _STORE:
            index.add_index(field_name="vector", metric_type="IP", index_type="IVF_FLAT", params={"nlist": lists})
        else:
            index.add_index(field_name="vector", metric_type="IP", index_type="FLAT")
        self.client.create_index(name, index_params=index, sync=False)
        self.client.load_collection(name)  # waits for the index

    def _copy(self, source: str) -> int:
        number = self._unused()
        self._new_entries(number)
        self.client.load_collection(source)
        rows = self._all(source, _FIELDS)
        while part := list(islice(rows, _COPIED)):
            self.client.upsert(_entries(number), part)
        return number

    def _unused(self) -> int:
        """A number above those of all collections, whoever made them."""
        present = [name.removeprefix(_entries("")) for name in self.client.list_collections()]
        return max((int(name) for name in present if name.isdecimal()), default=0) + 1

    def _rows(self, fields: Sequence[str], ids: IntArray | None = None) -> list[dict[str, Any]]:
        """Those of the present entries, or of those of these that exist."""
        if ids is None:
            return list(self._all(self.live, fields))
        with failures("entries cannot be read"):
            rows: list[dict[str, Any]] = []
            for start in range(0, len(ids), _READ):
                wanted = ids[start : start + _READ].tolist()
                rows += self.client.query(self.live, filter=f"id in {wanted}", output_fields=list(fields))
            return rows

    def _all(self, collection: str, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
        with failures("entries cannot be read"):
            pages = self.client.query_iterator(collection, batch_size=_READ, output_fields=list(fields))
            while page := pages.next():
                yield from ({name: row[name] for name in fields} for row in page)
            pages.close()


def _entries(number: int | str) -> str:
    return f"attnflow_entries_{number}"


def _refuse_too_large(rows: Rows) -> None:
    """Raise where Milvus would not take rows, in one request or at all."""
    size = rows.vector.nbytes + 100 * len(rows)
    for name in _TEXTS:
        for i, value in enumerate(getattr(rows, name)):
            length = 0 if value is None else len(value.encode())
            size += length
            if length > _CHARACTERS:
                raise ValueError(f"the {name} of row {i} has {length:,} bytes, and Milvus keeps up to {_CHARACTERS:,}")
    if size > _REQUEST:
        raise ValueError(
            f"{len(rows):,} entries are {size >> 20} MB, and Milvus takes up to {_REQUEST >> 20} MB in one request: "
            f"give about {len(rows) * _REQUEST // size:,} at a time"
        )
