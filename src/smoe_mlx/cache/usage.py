"""Usage: which experts decoding needed, remembered from one run to the next. No arrays, no MLX."""

import hashlib
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..store.files import read_json, write_json
from ..store.layout import ExpertLayout
from .policy import Key

FORMAT, VERSION = "smoe-mlx usage", 1
HALF_LIFE = 2048  # tokens after which a use counts half
MAX_WEIGHT = 1e12  # far more than any number of uses that fade at this rate comes to


class Usage:
    """Decayed counts of the uses of each expert: the sum of 2^-(age / HALF_LIFE) over its uses.

    Age is counted in tokens, that is in calls of layers over the number of layers.

    Args:
        layouts: of the model's layers. A usage file is for models whose layers have the same paths
            and numbers of experts, however they are quantised.
        path: where `save` writes.
    """

    def __init__(self, layouts: Sequence[ExpertLayout], path: Path | None = None):
        self.path = path
        self._counts = [x.num_experts for x in layouts]
        names = [(x.path, x.num_experts, x.experts) for x in layouts]
        self.fingerprint = hashlib.sha256(json.dumps(names).encode()).hexdigest()[:32]
        self._weights = {(i, e): 0.0 for i, n in enumerate(self._counts) for e in range(n)}
        # All weights fade alike, so a new use counts for more instead: `_unit` grows.
        self._unit = 1.0
        self._growth = 2 ** (1 / (HALF_LIFE * len(layouts)))
        self._saved = self._unit

    def saw(self, keys: Iterable[Key]) -> None:
        """A call of a layer needed these distinct experts."""
        self._unit *= self._growth
        unit, weights = self._unit, self._weights
        for key in keys:
            weights[key] += unit
        if unit > 1e100:
            self._set({key: w / unit for key, w in weights.items()})

    def _set(self, weights: dict[Key, float]) -> None:
        self._weights, self._unit, self._saved = weights, 1.0, 0.0

    def weight(self, key: Key) -> float:
        """The decayed count of one expert now."""
        return self._weights[key] / self._unit

    def ranked(self) -> list[Key]:
        """All experts, the most used first; of equals, some of each layer."""
        return sorted(self._weights, key=lambda key: (-self._weights[key], key[1]))

    # ---- the file ----------------------------------------------------------------------------

    def save(self) -> None:
        """Write the file if there are new uses; it is replaced when the new one is whole.

        One that cannot be written is a warning: what was generated is not lost over it.
        """
        if self.path is None or self._unit == self._saved:
            return
        document = {"format": FORMAT, "version": VERSION, "model": self.fingerprint}
        self._saved = self._unit
        try:
            document["weights"] = [
                [float(f"{self.weight((i, e)):.4g}") for e in range(n)]
                for i, n in enumerate(self._counts)
            ]
            write_json(self.path, document)
        except (OSError, MemoryError) as e:
            why = str(getattr(e, "strerror", None) or e) or "no memory"
            warnings.warn(f"{self.path}: cannot be written ({why}).", stacklevel=2)

    def load(self) -> None:
        """Take up what the file says, if there is one.

        One that is damaged, or not of this model, is a warning. It is not written to either.
        """
        assert self.path is not None
        try:
            self._set(self._read(self.path))
            self._saved = self._unit
        except FileNotFoundError:
            pass
        except Exception as e:  # json raises several kinds on damage
            warnings.warn(
                f"{self.path}: no usage file of this model ({str(e) or type(e).__name__:.200}). "
                "It is ignored and left as it is; remove it, or name another.",
                stacklevel=2,
            )
            self.path = None

    def _read(self, path: Path) -> dict[Key, float]:
        document = read_json(path, 4096 + 32 * len(self._weights))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError("not written by smoe-mlx")
        if document.get("version") != VERSION:
            raise ValueError(f"version {document.get('version')!r:.20}, not {VERSION}")
        if document.get("model") != self.fingerprint:
            raise ValueError("of a model with other layers")
        layers = document.get("weights")
        if not isinstance(layers, list) or len(layers) != len(self._counts):
            raise ValueError("weights for another number of layers")
        for i, (row, n) in enumerate(zip(layers, self._counts, strict=True)):
            if not isinstance(row, list) or len(row) != n or not all(map(_is_weight, row)):
                raise ValueError(f"bad weights for layer {i}")
        return {(i, e): float(w) for i, row in enumerate(layers) for e, w in enumerate(row)}


def _is_weight(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0 <= value <= MAX_WEIGHT
