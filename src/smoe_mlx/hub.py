"""From what a user names to a folder on this machine: demo, local folder or Hub repository."""

import os
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from .errors import ModelNotFoundError

DEMO = "demo"


def find_model(path_or_repo: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The local folder of a model; a Hub repository is downloaded, what is there already is kept.

    Args:
        path_or_repo: "demo" (bundled), a local folder, or a Hub repository such as
            "mlx-community/Qwen3-30B-A3B-4bit".

    Raises:
        ModelNotFoundError: there is no such folder or repository, or no connection to fetch it.
    """
    name = os.fspath(path_or_repo)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotFoundError(f"{path} is a file. Name the folder that holds config.json.")
    if name == DEMO:
        return Path(__file__).parent / "demo"
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelNotFoundError(
            f"There is no folder {name!r}, and it is no Hub repository name (owner/name)."
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS
            )
        )
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
