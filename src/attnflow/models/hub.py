"""Models of the hub: their safetensors and JSON files, downloaded once."""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from attnflow.models.checkpoints.files import first_line
from attnflow.models.names import short_names

# Of the HTTP client that the installed version of the hub's library brings.
_HTTPError: Final = cast(type[Exception], HfHubHTTPError.__bases__[0])


def downloaded(name: str) -> Path:
    """Return the folder of a model in the hub's cache, fetched if needed; `FileNotFoundError` if it cannot be had."""
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"]))
    except (_HTTPError, OSError) as error:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set and it is not in the local cache" if offline else first_line(error)
        raise FileNotFoundError(
            f"{name!r} is not a local file or folder, and cannot be downloaded from the hub ({why}){short_names()}"
        ) from error
