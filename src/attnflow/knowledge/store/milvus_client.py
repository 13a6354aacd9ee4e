"""The connection to Milvus: a file that milvus-lite serves within this process, or a server."""

from __future__ import annotations

import logging
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnflow._core.errors import MissingExtra
from attnflow.knowledge.store.errors import NotAStore, ReadOnly, StoreError
from attnflow.knowledge.store.lock import FileLock

_SERVED: Counter[Path] = Counter()  # files, by how many stores of this process use them


class Connection:
    """A client, and what has to be let go of with it.

    Attributes:
        client: a `pymilvus.MilvusClient`.
        types: `pymilvus.DataType`.
        file: the file that is served, or None.
    """

    def __init__(self, address: str, read_only: bool) -> None:
        try:
            import pymilvus
        except ImportError:
            raise MissingExtra("pymilvus", "milvus", "a store in Milvus") from None
        self.types = pymilvus.DataType
        self.file = None if "://" in address else Path(address).absolute()
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
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReadOnly(f"a store at {file} cannot be made: {error.strerror}") from None
        if not read_only:
            self._lock = FileLock(file.with_name(f"{file.name}.lock"))
        return str(file)
