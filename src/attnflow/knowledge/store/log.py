"""Writes since the last commit of the table, one record each, appended to a file and on the disk before a call returns.

A commit of LanceDB is three files and a manifest that grows with the table; a record is a few hundred bytes. It holds
whole rows, or ids that are deleted: read again over a table that has it already, it changes nothing. It says what the
store is after it (`State`), so that rows that have vanished are noticed. Once its writes are in the table, a file is
replaced by an empty one.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple
from zlib import crc32

from attnflow._core.files import write_atomically
from attnflow.knowledge.store.checksums import Digest
from attnflow.knowledge.store.durable import sync
from attnflow.knowledge.store.errors import Damaged, StoreError

FILE: Final = "writes.log"

_STATE: Final = struct.Struct("<QQqQ")
_HEAD: Final = struct.Struct("<4sIQ32sI")  # mark, kind, length of the body, state, CRC-32 of the body
_CRC: Final = struct.Struct("<I")  # of the head
_MARK: Final = b"afwl"  # also at the end of a record: what ends with zeros was not written to its end
_SIZE: Final = _HEAD.size + _CRC.size


class Kind(IntEnum):
    """What a record says."""

    START = 0  # nothing happened yet
    PUT = 1  # these rows, in place of those of their ids
    DELETE = 2  # these ids are gone
    COMMIT = 3  # the table is about to be changed: its state will be this; the body says what it was
    DONE = 4  # and it is: an older version of the table is not what there is


class State(NamedTuple):
    """What a store is after a write: which rows it has, the last time that a row was given, ids above all given out."""

    digest: Digest = Digest()
    clock: int = 0
    next_id: int = 0

    def encode(self) -> bytes:
        """As bytes."""
        return _STATE.pack(*self.digest, self.clock, self.next_id)

    @classmethod
    def decode(cls, data: bytes) -> State:
        """The state again."""
        rows, total, clock, next_id = _STATE.unpack(data)
        return cls(Digest(rows, total), clock, next_id)


class Record(NamedTuple):
    """One write; `whole` is false of one that was read and is not as it was written."""

    kind: Kind
    state: State
    body: bytes = b""
    whole: bool = True


class WriteLog:
    """The file, followed from record to record; one at a time may append."""

    def __init__(self, directory: Path, read_only: bool) -> None:
        self.path = directory / FILE
        self.size = 0  # of the records that were read or written
        self._access = os.O_RDONLY if read_only else os.O_RDWR
        self._file = -1
        self._close: Callable[[], object] | None = None
        self._torn = False  # there may be something after `size`

    def reopen(self) -> bool:
        """Turn to the file that is there now; whether it is another one than before."""
        if self._file >= 0 and self.is_current():
            return False
        self.close()
        try:
            self._file = os.open(self.path, self._access | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise Damaged(str(self.path.parent), f"{FILE} is missing, and the latest writes with it") from None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be opened: {error.strerror}") from None
        self._close = weakref.finalize(self, os.close, self._file)
        return True

    def is_current(self) -> bool:
        """Whether the file has not been replaced by another one."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._file), os.stat(self.path, follow_symlinks=False))
        return False

    def read(self) -> list[Record]:
        """The records after those that were read or written before.

        Raises:
            Damaged: one is not as it was written.
        """
        data = os.pread(self._file, max(0, os.fstat(self._file).st_size - self.size), self.size)
        records: list[Record] = []
        length = 0
        for record, end in scan(data):
            if not record.whole:
                raise Damaged(
                    str(self.path.parent), f"{FILE} has other bytes than were written at {self.size + length:,}"
                )
            records.append(record)
            length = end
        self.size += length
        self._torn = length < len(data)
        return records

    def append(self, record: Record) -> None:
        """Add a record; when this returns it is on the disk, and when it raises it is not there."""
        data = memoryview(_encode(record))
        if self._torn:
            os.ftruncate(self._file, self.size)
        self._torn = True
        place = self.size
        try:
            while data:
                written = os.pwrite(self._file, data, place)
                data, place = data[written:], place + written
            os.fsync(self._file)
        except OSError:
            with suppress(OSError):  # else before the next one
                os.ftruncate(self._file, self.size)
            raise
        self.size, self._torn = place, False

    def restart(self, state: State) -> None:
        """An empty log in place of this one, whose writes are in the table, on the disk."""
        start(self.path.parent, state)
        self.reopen()
        self.read()

    def rewind(self) -> None:
        """Read from the beginning again."""
        self.size = 0

    def close(self) -> None:
        """Let go of the file."""
        if self._close is not None:
            self._close()
        self._file, self._close, self.size = -1, None, 0


def start(directory: Path, state: State) -> None:
    """A log without writes."""
    with write_atomically(directory / FILE) as file:
        file.write(_encode(Record(Kind.START, state)))
    sync(directory)


def scan(data: bytes) -> Iterator[tuple[Record, int]]:
    """Records one after the other, and where each ends; one that was not written to its end is not there.

    After a record whose head has changed nothing can be read; it is the last one.
    """
    place, unfinished = 0, data.endswith(b"\0" * len(_MARK))
    while len(data) - place >= _SIZE:
        head = data[place : place + _HEAD.size]
        mark, kind, length, state, crc = _HEAD.unpack(head)
        if mark != _MARK or _CRC.unpack_from(data, place + _HEAD.size) != (crc32(head),):
            if not unfinished:
                yield Record(Kind.START, State(), whole=False), len(data)
            return
        body = data[place + _SIZE : place + _SIZE + length]
        end = place + _SIZE + length + len(_MARK)
        if end > len(data):
            return
        whole = crc32(body) == crc and data[end - len(_MARK) : end] == _MARK
        if not whole and unfinished and end == len(data):
            return
        yield Record(Kind(kind), State.decode(state), body, whole), end
        place = end


def _encode(record: Record) -> bytes:
    body = record.body
    head = _HEAD.pack(_MARK, record.kind, len(body), record.state.encode(), crc32(body))
    return head + _CRC.pack(crc32(head)) + body + _MARK
