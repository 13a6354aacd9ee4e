"""Models on the hub: only the byte ranges that are needed are fetched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from huggingface_hub import HfApi, hf_hub_url, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from attnflow._core.errors import AttnflowError
from attnflow.models.checkpoints.files import (
    GGUF,
    SAFETENSORS,
    BadCheckpoint,
    Folder,
    LocalFolder,
    first_line,
    model_files,
)
from attnflow.models.names import short_names

# Of the HTTP client that the installed version of the hub's library brings.
HTTPError: Final = cast(type[Exception], HfHubHTTPError.__bases__[0])


class HubFolder(Folder):
    """The files of a model at one commit of the hub, unaffected by later uploads, read by range requests."""

    def __init__(self, repo_id: str, commit: str, sizes: Mapping[str, int]) -> None:
        super().__init__(repo_id, repo_id, {name: size for name, size in sizes.items() if "/" not in name})
        self._commit = commit

    def read(self, file: str, start: int, stop: int) -> bytearray:
        """Fetch a byte range, with retries; `OSError` if the hub refuses or cannot be reached."""
        url = hf_hub_url(self.name, file, revision=self._commit)
        # Compression would change what a range means.
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            response = http_backoff("GET", url, headers=headers, follow_redirects=True)
            hf_raise_for_status(response)
        except HTTPError as error:
            if isinstance(error, OSError):
                raise
            raise ConnectionError(f"{self.title(file)}: the hub cannot be reached ({error})") from error
        if response.status_code != 206 or len(response.content) != stop - start:
            raise BadCheckpoint(f"{self.title(file)}: the server sends whole files only; download the model")
        return bytearray(response.content)


def find_model(name: str) -> HubFolder | Path:
    """Find a model of the hub by its id; `FileNotFoundError` if it cannot be had.

    A complete local copy is used if newest or the hub is unreachable; otherwise only the list of files is fetched.
    """
    try:
        info = HfApi().model_info(name, files_metadata=True)
    except (HTTPError, OSError) as error:
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code < 500
        cached = None if refused else _cached(name, None)
        if cached is not None:
            return cached
        offline = isinstance(error, OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set and it is not in the local cache" if offline else first_line(error)
        raise FileNotFoundError(
            f"{name!r} is no local file or folder, and it cannot be had from the hub ({why}){short_names()}"
        ) from error
    if info.sha is None or info.siblings is None:
        raise FileNotFoundError(f"the hub does not list the files of {name!r}")
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    return _cached(name, info.sha) or HubFolder(name, info.sha, sizes)


def _cached(name: str, commit: str | None) -> Path | None:
    """Return the local copy of a model, if all its weights are there."""
    try:
        path = Path(snapshot_download(name, revision=commit, local_files_only=True))
        folder = LocalFolder(path)
        complete = model_files(folder, SAFETENSORS)
    except (LocalEntryNotFoundError, AttnflowError, OSError, ValueError):
        return None
    return path if complete or any(file.endswith(GGUF) for file in folder.sizes) else None
