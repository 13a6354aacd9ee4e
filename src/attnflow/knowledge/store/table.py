"""The LanceDB table of a store: where it is, how rows look in it, and what a change of it is."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import sleep
from typing import Any, Final, NoReturn

import numpy as np

from attnflow._core.checks import IntArray
from attnflow._core.errors import MissingExtra
from attnflow.knowledge.store.entry import Floats
from attnflow.knowledge.store.rows import EntryRows
from attnflow.knowledge.store.writer import LOCK, MEMORY, WRITERS, Claim, StoreError, VersionGone, failures, locked

_LOG = logging.getLogger(__name__)
_TABLE: Final = "entries"
_RETIRED: Final = "retired"  # a second table: ids that were the highest when their entries went
_KEY: Final = {b"lance-schema:unenforced-primary-key": b"true"}  # concurrent writes of one id conflict in Lance
_FORMAT: Final = b"attnflow.store"
_REMOTE: Final = "s3://"
_FILES: Final = (".jsonl", ".ndjson", ".json", ".txt", ".md", ".csv", ".tsv", ".db")
_COMPACT: Final = 100  # commits after which files are written together
_KEPT: Final = 10.0  # minutes that readers of an old version have before its files may go
_TRIES: Final = 10  # to read the newest version, whose files another process may delete meanwhile
_FEW: Final = 1000  # ids that are looked up one by one; for more, the columns are read whole
_TEXTS: Final = ("text", "source", "encoder")


def check_uri(uri: str) -> None:
    if not uri or ("://" in uri and not uri.startswith(_REMOTE)):
        raise ValueError(
            f'uri must be a directory, "memory" or "s3://bucket/path", got {uri!r}; give another '
            'object storage by its S3 interface: storage_options={"endpoint": ...}'
        )
    if is_directory(uri) and Path(uri).suffix.lower() in _FILES and not Path(uri).is_dir():
        raise ValueError(f"a store is a folder, and {uri} is named like a file: give the name of a folder")


def is_directory(uri: str) -> bool:
    return uri != MEMORY and "://" not in uri


class EntryTable:
    """The rows of a store in LanceDB, at the newest version read; each change is one commit.

    Methods that change rows return whether nobody else has committed in between. `highest` is the highest id ever given
    out, -1 before the first.
    """

    def __init__(
        self, uri: str, dim: int | None, num_thresholds: int | None, read_only: bool, storage_options: Any
    ) -> None:
        try:
            import lancedb
            import pyarrow
        except ImportError as error:
            raise MissingExtra("lancedb", "knowledge", "a store of entries") from error
        self._arrow: Any = pyarrow
        self.uri = uri
        self.highest = self._retired = self._version = -1
        self._commits = 0  # since files were written together
        self._close: Callable[[], object] = lambda: None
        self.require_writer: Callable[[], None] = lambda: None  # raises if another took over
        here = Path(uri).absolute() if is_directory(uri) else None
        if here is not None:
            names = [path.name for path in here.iterdir() if path.name != LOCK] if here.is_dir() else []
            if names and f"{_TABLE}.lance" not in names:
                raise StoreError(f"{here} is not a store of attnflow: it holds other files")
            if not names and (read_only or dim is None):
                raise _nothing(uri, read_only)
        if here is not None and not read_only:
            self._close = weakref.finalize(self, locked(here))
        try:
            with failures(f"the store {uri} cannot be opened"):
                place = "memory://" if uri == MEMORY else uri if here is None else str(here)
                options = None if storage_options is None else dict(storage_options)
                self._database = lancedb.connect(place, storage_options=options)
                table = self._open(_TABLE)
                self._table: Any = self._create(dim, num_thresholds, read_only) if table is None else table
            self._describe(dim, num_thresholds)
            if uri.startswith(_REMOTE) and not read_only:
                row = pyarrow.table({"opened": [datetime.now(UTC)]})
                self.require_writer = Claim(uri, self._database, self._open(WRITERS), row).require
        except BaseException:
            self.close()
            raise

    def refresh(self) -> bool:
        """Check out the newest version; return whether it differs from the last one."""
        with failures(f"the store {self.uri} cannot be read"):
            self._table.checkout_latest()
            return self._table.version != self._version

    def newest(self) -> EntryRows:
        """Check out the newest version and read its rows; anew if it was compacted away meanwhile."""
        for left in reversed(range(_TRIES)):
            try:
                self.refresh()
                return self._load()
            except VersionGone:
                if not left:
                    raise
        raise AssertionError("a try returns or raises")

    def _load(self) -> EntryRows:
        with failures(f"the store {self.uri} cannot be read"):
            self._version, count, done = self._table.version, self._table.count_rows(), 0
            ids, vectors = np.empty(count, np.int64), np.empty((count, self.dim + self.num_thresholds), np.float32)
            for batch in self._table.search().select(["id", "vector"]).to_batches():
                place = slice(done, done + len(batch))
                ids[place] = batch["id"].to_numpy()
                vectors[place] = batch["vector"].flatten().to_numpy().reshape(len(batch), -1)
                done += len(batch)
            gone = self._open(_RETIRED)
            retired = () if gone is None else gone.to_arrow()["id"]
        self._retired = max((row.as_py() for row in retired), default=-1)
        self.highest = max(int(ids.max(initial=-1)), self._retired)
        return EntryRows.sorted(ids, vectors, self.dim)

    @property
    def indexed(self) -> bool:
        with failures(f"the store {self.uri} cannot be read"):
            return bool(self._table.list_indices())

    def make_index(self) -> bool:
        from lancedb.index import IvfFlat

        if self.indexed:
            return True
        with failures(f"no index of the store {self.uri} was made"):
            config = IvfFlat(distance_type="dot", num_partitions=_lists(self._table.count_rows()))
            self._table.create_index("vector", config=config)
            return self._committed(self._table.version)

    def lists(self) -> int:
        """About how many lists the index has, 0 without an index: LanceDB does not say it."""
        with failures(f"the store {self.uri} cannot be read"):
            names = [index.name for index in self._table.list_indices()]
            return sum(_lists(self._table.index_stats(name).num_indexed_rows) for name in names)

    def nearest(self, queries: Floats, k: int, lists: int) -> tuple[IntArray, IntArray]:
        """Find the k largest inner products of each query with rows, by the index: (queries' numbers, ids)."""
        with failures(f"the store {self.uri} cannot be searched"):
            search = self._table.search(queries).distance_type("dot").limit(k)
            near = (search.nprobes(lists) if lists else search).select(["id", "_distance"]).to_arrow()
        ids = near["id"].to_numpy()
        # LanceDB numbers the queries, in int32, only where there are several.
        owners = near["query_index"].to_numpy() if len(queries) > 1 else np.zeros(len(ids))
        return owners.astype(np.int64), ids

    def records(self, ids: IntArray) -> dict[int, dict[str, Any]]:
        """Return all columns but the vector, by id; unknown ids are left out."""
        names = [field.name for field in self._table.schema if field.name != "vector"]
        few = len(ids) <= _FEW
        with failures(f"the store {self.uri} cannot be read"):
            query = self._table.search().select(names)
            rows = (query.where(_among(ids)) if few else query).to_arrow()
        if not few:
            rows = rows.filter(self._arrow.array(np.isin(rows["id"].to_numpy(), ids)))
        return {row["id"]: row for row in rows.to_pylist()}

    def counts(self, name: str) -> dict[Any, int]:
        with failures(f"the store {self.uri} cannot be read"):
            values = self._table.search().select([name]).to_arrow()[name]
        return {pair["values"]: pair["counts"] for pair in values.value_counts().to_pylist()}

    @property
    def schema(self) -> Any:
        return self._table.schema

    def batches(self) -> Generator[Any]:
        """All columns of all rows, in batches."""
        with failures(f"the store {self.uri} cannot be read"):
            yield from self._table.search().to_batches()

    def next_ids(self, count: int) -> IntArray:
        first = self.highest + 1
        if first + count > 2**63:
            raise ValueError("the largest id of this store is the largest integer, so pass ids yourself")
        return np.arange(first, first + count)

    def about(self) -> dict[str, Any]:
        """What `StoreStats` says of the table itself."""
        return {
            "uri": self.uri,
            "backend": MEMORY if self.uri == MEMORY else "lancedb",
            "dim": self.dim,
            "num_thresholds": self.num_thresholds,
            "bytes_on_disk": self.bytes_on_disk(),
            "versions": self.counts("version"),
            "encoders": {name or "": count for name, count in self.counts("encoder").items()},
            "snapshots": tuple(self.snapshots()),
        }

    def put(self, columns: Mapping[str, Any], vectors: Floats, replaces: bool) -> bool:
        arrow, schema = self._arrow, self._table.schema
        vector = arrow.FixedSizeListArray.from_arrays(np.ascontiguousarray(vectors).ravel(), vectors.shape[1])
        arrays = [arrow.array(columns[field.name], field.type) for field in schema if field.name != "vector"]
        merge = self._table.merge_insert("id").when_not_matched_insert_all()
        if replaces:
            merge = merge.when_matched_update_all()
        with failures(f"nothing was written to the store {self.uri}"):
            done = merge.execute(arrow.table([*arrays, vector], schema=schema))
            if done.num_inserted_rows + done.num_updated_rows < len(vectors):
                self._take_back(columns)
        self.highest = max(self.highest, *(int(key) for key in columns["id"]))
        return self._committed(done.version)

    def _take_back(self, columns: Mapping[str, Any]) -> NoReturn:
        """Another writer has inserted some of these ids at the same moment: delete the rest of this insert."""
        written = columns["updated"][0].isoformat()  # differs between the two
        self._table.delete(
            f"{_among(np.asarray(columns['id']))} AND updated = arrow_cast('{written}', 'Timestamp(us, \"UTC\")')"
        )
        raise StoreError(f"another process has written some of these ids to {self.uri} at the same moment")

    def delete(self, ids: IntArray) -> bool:
        with failures(f"nothing was deleted from the store {self.uri}"):
            if self.highest in ids:
                self._retire()
            return self._committed(self._table.delete(_among(ids)).version)

    def snapshots(self) -> list[str]:
        with failures(f"the snapshots of {self.uri} cannot be read"):
            tags = self._table.tags.list()
        return sorted(tags, key=lambda name: (tags[name]["version"], name))

    def snapshot(self, name: str) -> None:
        with failures(f"no snapshot of {self.uri} was taken"):
            self._table.tags.create(name, self._table.version)

    def drop_snapshot(self, name: str) -> None:
        self._find(name)
        with failures(f"the snapshot {name!r} of {self.uri} was not dropped"):
            self._table.tags.delete(name)

    def restore(self, name: str) -> None:
        self._find(name)
        with failures(f"the snapshot {name!r} of {self.uri} was not restored"):
            self._retire()
            self._table.restore(name)

    def compact(self, minutes: float) -> None:
        """Merge files and drop older versions, except snapshots and all versions since the first of them."""
        with failures(f"the files of {self.uri} were not compacted"):
            tagged = {tag["version"] for tag in self._table.tags.list().values()}
            dates = [old["timestamp"] for old in self._table.list_versions() if old["version"] in tagged]
            ages = [datetime.now(date.tzinfo) - date + timedelta(minutes=1) for date in dates]
            for _ in range(2):  # it first makes a version itself, which is then too young to be dropped
                self._table.optimize(cleanup_older_than=max([timedelta(minutes=minutes, milliseconds=1), *ages]))
                sleep(0.002)
            self._version, self._commits = self._table.version, 0

    def bytes_on_disk(self) -> int | None:
        if not is_directory(self.uri):
            return None
        return sum(path.stat().st_size for path in Path(self.uri).rglob("*") if path.is_file())

    def close(self) -> None:
        self._close()

    def _committed(self, version: int) -> bool:
        """Record our own commit, and compact after `_COMPACT` of them."""
        alone, self._version = version == self._version + 1, version
        self._commits += 1
        if alone and self._commits >= _COMPACT:
            try:
                self.compact(_KEPT)
            except StoreError as error:  # the write has happened
                _LOG.warning("%s; it is tried again after %d writes", error, _COMPACT)
                self._commits = 0
        return alone

    def _retire(self) -> None:
        """Record the highest id before its entry is deleted, so that it is never given out again."""
        if self.highest > self._retired:
            row = self._arrow.table({"id": [self.highest]})
            if (table := self._open(_RETIRED)) is not None:
                table.add(row)
            else:
                self._database.create_table(_RETIRED, row)
            self._retired = self.highest

    def _find(self, name: str) -> None:
        if name not in (taken := self.snapshots()):
            raise KeyError(f"no snapshot {name!r}; there are {taken}")

    def _open(self, name: str) -> Any | None:
        """Open a table; None if it is missing, or only a folder of a table whose creation was killed."""
        try:
            return self._database.open_table(name)
        except ValueError as error:
            if "was not found" in str(error):
                return None
            raise

    def _create(self, dim: int | None, num_thresholds: int | None, read_only: bool) -> Any:
        if read_only or dim is None:
            raise _nothing(self.uri, read_only)
        a, columns = self._arrow, num_thresholds or 0
        time = a.timestamp("us", tz="UTC")
        fields = [
            a.field("id", a.int64(), nullable=False, metadata=_KEY),
            *((name, a.string()) for name in _TEXTS),
            ("version", a.int64()),
        ]
        fields += [("created", time), ("updated", time), ("vector", a.list_(a.float32(), dim + columns))]
        metadata = {_FORMAT: b"1", b"num_thresholds": str(columns).encode()}
        return self._database.create_table(_TABLE, schema=a.schema(fields, metadata=metadata))

    def _describe(self, dim: int | None, num_thresholds: int | None) -> None:
        schema = self._table.schema
        metadata = schema.metadata or {}
        if metadata.get(_FORMAT) != b"1":
            raise StoreError(f"{self.uri} is not a store of attnflow of format 1, but another database of LanceDB")
        self.num_thresholds = int(metadata[b"num_thresholds"])
        self.dim = schema.field("vector").type.list_size - self.num_thresholds
        for name, given in (("dim", dim), ("num_thresholds", num_thresholds)):
            if given not in (None, has := getattr(self, name)):
                raise ValueError(
                    f"the store at {self.uri} has {name}={has}, got {name}={given}: leave it out, or open another"
                )


def _nothing(uri: str, read_only: bool) -> StoreError:
    how = "there is nothing to read" if read_only else "give dim, the width of an embedding, to make one"
    return StoreError(f"there is no store at {uri}: {how}")


def _lists(rows: int) -> int:
    return max(1, min(round(2 * rows**0.5), rows // 32))


def _among(ids: IntArray) -> str:
    return f"id IN ({','.join(map(str, ids.tolist()))})" if len(ids) else "false"
