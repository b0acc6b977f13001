"""What `smoe-mlx tune` found out, remembered for a model on this machine.

Kept in `tuned.json` in the user's cache folder, by the model's files, the machine, and the versions
of MLX and mlx-lm.
"""

import platform
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .config import StreamingConfig
from .device import names
from .machine import total_memory
from .model_config import fingerprint
from .plan import format_bytes
from .store.files import Known

# Of StreamingConfig: what is tuned besides the slots, and what has to be as it is by default for
# that to be used.
OPTIONS = ("io", "threads", "lookahead", "spec", "decode", "kernels")
ASKED = (
    *OPTIONS, "memory", "slots", "hits_first", "policy", "hot_per_layer", "prefill_step",
)  # fmt: skip
MOST_THREADS = 256


@dataclass(frozen=True)
class Tuned:
    """The fastest setting of a model on this machine.

    Attributes:
        slots: the most that pay; None: as many as the memory holds.
        options: `OPTIONS` of `StreamingConfig`.
        memory: the limit that it was tuned under, or None.
        date: when, as 2026-11-30.
    """

    slots: int | None
    options: dict[str, Any]
    memory: int | None
    date: str

    def __str__(self) -> str:
        what = [f"{k}={v}" for k, v in self.options.items() if v != getattr(StreamingConfig, k)]
        what += [] if self.slots is None else [f"slots<={self.slots:,}"]
        what += [] if self.memory is None else [f"memory<={format_bytes(self.memory)}"]
        return f"{', '.join(what) or 'the defaults'} (smoe-mlx tune, {self.date})"


def find_tuned(folder: Path, config: StreamingConfig) -> Tuned | None:
    """What was found for the model in `folder`, unless the user asks for anything else."""
    default = StreamingConfig()
    if not config.tuned or any(getattr(config, n) != getattr(default, n) for n in ASKED):
        return None
    known = TUNED.entries()
    return known.get(_key(folder)) if known else None


def remember(folder: Path, tuned: Tuned | None) -> None:
    """Keep this for the model in `folder`, or nothing any more. Raises OSError."""
    TUNED.add(_key(folder), tuned)


def _key(folder: Path) -> str:
    """All that the finding depends on, in a hash."""
    return fingerprint(folder, platform.node(), platform.machine(), total_memory(), names())


def _checked(entry: dict[str, Any]) -> Tuned:
    tuned = Tuned(**{f.name: entry[f.name] for f in fields(Tuned)})
    options = tuned.options
    StreamingConfig(**options)
    StreamingConfig(slots=tuned.slots)
    StreamingConfig(memory=tuned.memory)
    ok = (
        set(options) == set(OPTIONS)
        and options["decode"] != "lossy"
        and options["kernels"] != "fused"
        and type(options["lookahead"]) is bool
        and 0 <= options["threads"] <= MOST_THREADS
        and (tuned.slots is None or type(tuned.slots) is int)
        and (tuned.memory is None or type(tuned.memory) is int)
        and isinstance(tuned.date, str)
        and len(tuned.date) == 10
    )
    if not ok:
        raise ValueError("not what was found")
    return tuned


TUNED = Known("tuned", 2, _checked)
