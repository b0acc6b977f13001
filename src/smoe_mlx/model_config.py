"""config.json: read within bounds, and looked at before mlx-lm builds what it describes."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from .errors import CheckpointError
from .store.files import read_json

MAX_NBYTES = 64 << 20  # the largest real ones, with a setting for each tensor, are a few MB
MAX_LAYERS = 4096
QUANTISATION = {"bits": 16, "group_size": 4096}  # MLX divides by them before it looks at them


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says.

    Raises:
        CheckpointError: there is none, it is no JSON object, or it asks for what would keep the
            machine busy for ever or end the process.
    """
    path = folder / "config.json"
    try:
        config = read_json(path, MAX_NBYTES)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no config.json in this folder.") from None
    except CheckpointError:
        raise
    except ValueError as e:
        raise CheckpointError(f"{path}: not valid JSON ({e}).") from None
    _check(config, path)
    return config


def fingerprint(folder: Path, *options: Any) -> str:
    """What tells a model and MLX from others: its files, versions, and `options`. 16 hex digits."""
    files = [
        (p.name, p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(folder.iterdir())
        if p.suffix in (".safetensors", ".smoe") or p.name == "config.json"
    ]
    facts = [files, version("mlx"), version("mlx-lm"), str(mx.default_device()), options]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def _check(config: dict[str, Any], path: Path) -> None:
    for name, value in config.items():
        if "layer" in name and isinstance(value, int) and value > MAX_LAYERS:
            raise CheckpointError(f"{path}: {name} is {value}: no model has so many layers.")
        most = QUANTISATION.get(name)
        if most is not None and not (type(value) is int and 1 <= value <= most):
            raise CheckpointError(
                f"{path}: {name} is {value!r:.40}, not a number from 1 to {most}."
            )
        if isinstance(value, dict):
            _check(value, path)
