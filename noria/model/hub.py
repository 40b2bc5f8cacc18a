"""Models by hub name (org/model), through huggingface_hub: from its local cache if they are complete there, else downloaded.

Only safetensors, JSON and chat templates are fetched; never pickled weights, which run code when they are read. The cache's place, a token and a
mirror are huggingface_hub's own settings (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Deliberately not here: what files mean (`hf_folder.py`).
"""

import re
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from noria.errors import ModelFileMissingError
from noria.model.hf_folder import is_complete

FILES: Final = ["*.safetensors", "*.json", "*.jinja"]
NOT_READ: Final = ["*/*", "consolidated*"]  # other forms of the same weights, as large again
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether a name can be one of the hub's: org/model."""
    return _NAME.fullmatch(name) is not None


def hub_folder(name: str) -> Path:
    """The local folder of a hub model, complete.

    Raises ModelFileMissingError (no such model, no access, no network, no safetensors in it), ModelFileCorruptError (a broken index in the cache).
    """
    try:
        folder = _snapshot(name, local_files_only=True)
        if is_complete(folder):
            return folder
    except LocalEntryNotFoundError:
        pass  # not in the cache
    except HFValidationError as error:
        raise ModelFileMissingError(f"there is no folder {name!r}, and the hub has no such names: {error}") from error
    try:
        folder = _snapshot(name, local_files_only=False)
    except (OSError, HfHubHTTPError) as error:
        raise _missing(name, f"it cannot be fetched ({type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]})") from error
    if not is_complete(folder):  # what a cache has in part is all there is without network
        raise _missing(name, f"what could be fetched ({folder}) lacks safetensors files; noria reads no pickled weights")
    return folder


def _snapshot(name: str, *, local_files_only: bool) -> Path:
    return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=NOT_READ, local_files_only=local_files_only))


def _missing(name: str, why: str) -> ModelFileMissingError:
    return ModelFileMissingError(
        f"there is no folder {name!r}, no complete model of that name in the Hugging Face cache, and {why}. Check the name, the network, and "
        f"HF_TOKEN if the model asks for one; without network, run `hf download {name}` elsewhere and copy its HF_HOME here"
    )
