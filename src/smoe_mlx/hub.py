"""From what a user names to a folder on this machine: demo, local folder or Hub repository."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from .errors import CheckpointError, ModelNotFoundError
from .model_config import read_config
from .store.files import check_links
from .store.vault import PREAMBLE, VAULT_FILE, front_nbytes

DEMO, DEMO_FOLDER = "demo", Path(__file__).parent / "demo"
# What the Hub's client raises without a connection, whichever HTTP library it is made of.
HTTPX_ERRORS: tuple[type[Exception], ...] = tuple(
    t for t in HfHubHTTPError.__mro__ if t.__name__ == "HTTPError"
)


def find_model(path_or_repo: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The local folder of a model; a Hub repository is downloaded, what is there already is kept.

    Args:
        path_or_repo: "demo" (bundled), a local folder, or a Hub repository such as
            "mlx-community/Qwen3-30B-A3B-4bit".

    Raises:
        ModelNotFoundError: there is no such folder or repository, or no connection to fetch it.
        CheckpointError: a link in the folder leads out of it.
    """
    path = find_local(path_or_repo)
    if path is not None:
        return path
    name = os.fspath(path_or_repo)
    with _explained(name, revision):
        path = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=[*DEFAULT_ALLOW_PATTERNS, VAULT_FILE]
            )
        )
    check_links(path)
    return path


def find_local(path_or_repo: str | os.PathLike[str]) -> Path | None:
    """The folder that is named, or None for what must be a Hub repository.

    Raises:
        ModelNotFoundError: it is neither.
        CheckpointError: a link in the folder leads out of it.
    """
    name = os.fspath(path_or_repo)
    path = Path(name).expanduser()
    if path.is_dir():
        if path != DEMO_FOLDER:  # ours: what installs packages may do it by links
            check_links(path)
        return path
    if path.exists():
        raise ModelNotFoundError(f"{path} is a file. Name the folder that holds config.json.")
    if name == DEMO:
        return DEMO_FOLDER
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelNotFoundError(
            f"There is no folder {name!r}, and it is no Hub repository name (owner/name)."
        )
    return None


def fetch_headers(repo: str, revision: str | None, folder: Path) -> None:
    """Make of `folder` what a Hub repository's would be, with files of full length but no weights.

    Only config.json, the index and the headers of the weights are fetched, by ranged reads; of a
    vault, the table as well.

    Raises:
        ModelNotFoundError: there is no such repository, or no connection.
        CheckpointError: it holds no safetensors files.
    """
    api = huggingface_hub.HfApi()
    with _explained(repo, revision):
        try:
            config = api.hf_hub_download(repo, "config.json", revision=revision)
            (folder / "config.json").write_bytes(Path(config).read_bytes())
            found = api.get_safetensors_metadata(repo, revision=revision)
            if "smoe_mlx" in read_config(folder):
                url = huggingface_hub.hf_hub_url(
                    repo, VAULT_FILE, revision=revision, endpoint=api.endpoint
                )
                _fetch_front(url, folder / VAULT_FILE)
        except LocalEntryNotFoundError:
            raise
        except (NotASafetensorsRepoError, SafetensorsParsingError, EntryNotFoundError) as e:
            raise CheckpointError(
                f"{repo}: no safetensors checkpoint, or a part of it ({e})."
            ) from e
        except HTTPX_ERRORS as e:
            raise e if isinstance(e, OSError) else OSError(str(e)) from e
    for name, file in found.files_metadata.items():
        if Path(name).name != name:
            raise CheckpointError(f"{repo}: {name!r} is not a plain file name")
        tensors = {
            tensor: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets}
            for tensor, t in file.tensors.items()
        }
        header = json.dumps(tensors).encode()
        end = max((t.data_offsets[1] for t in file.tensors.values()), default=0)
        with open(folder / name, "wb") as f:
            f.write(len(header).to_bytes(8, "little") + header)
            f.truncate(8 + len(header) + end)


def _fetch_front(url: str, path: Path) -> None:
    """Make a file of a vault's length that holds its header and table."""
    first, size = _fetch_range(url, PREAMBLE.size)
    with path.open("wb") as f:
        f.write(_fetch_range(url, front_nbytes(first))[0])
        f.truncate(size)


def _fetch_range(url: str, nbytes: int) -> tuple[bytes, int]:
    """(the first bytes of a file on the Hub, the length of all of it)."""
    headers = {**build_hf_headers(), "range": f"bytes=0-{nbytes - 1}"}
    with huggingface_hub.get_session().stream("GET", url, headers=headers, timeout=10) as response:
        huggingface_hub.hf_raise_for_status(response)
        size = response.headers.get("content-range", "").rpartition("/")[2]
        if response.status_code != 206 or not size.isdecimal():
            raise CheckpointError(f"{url}: the server does not send parts of a file.")
        return response.read(), int(size)


@contextlib.contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except GatedRepoError as e:
        raise ModelNotFoundError(
            f"{name!r} is a gated repository: accept its terms on the Hub and run `hf auth login`."
        ) from e
    except RevisionNotFoundError as e:
        raise ModelNotFoundError(f"{name!r} has no revision {revision!r} on the Hub.") from e
    except (RepositoryNotFoundError, HFValidationError) as e:
        raise ModelNotFoundError(
            f"There is no folder {name!r} here and no such repository on the Hub "
            "(a private one needs `hf auth login`)."
        ) from e
    except (LocalEntryNotFoundError, OSError) as e:
        raise ModelNotFoundError(
            f"{name!r} is not on this machine, and the Hub cannot be reached ({type(e).__name__}). "
            "Check the connection, or name a local folder."
        ) from e
