"""How experts are to be quantised: one setting, or a recipe by layer, expert and projection."""

import fnmatch
import os
import re
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..errors import RecipeError
from ..store.files import read_json

# Names that the seeds of this project gave to two settings.
NAMED = {"SMOE-Q4": (4, 64, "affine"), "SMOE-Q2": (2, 64, "affine")}
AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
MAX_NBYTES = 64 << 20  # of a recipe: a rule for each expert of the largest models
FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


@dataclass(frozen=True)
class Quantisation:
    """One setting of MLX's quantisation."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or type(self.group_size) is not int:
            raise RecipeError(
                f"bits {self.bits!r:.40}, group_size {self.group_size!r:.40}: numbers"
            )
        if self.mode == "affine":
            if self.bits not in AFFINE_BITS or self.group_size not in AFFINE_GROUPS:
                raise RecipeError(
                    f"affine {self.bits} bits in groups of {self.group_size}: bits are one of "
                    f"{AFFINE_BITS}, groups one of {AFFINE_GROUPS}"
                )
        elif self.mode not in FIXED:
            raise RecipeError(f"mode {self.mode!r:.40}: one of affine, {', '.join(FIXED)}")
        elif (self.bits, self.group_size) != FIXED[self.mode]:
            bits, group_size = FIXED[self.mode]
            raise RecipeError(f"{self.mode} is {bits} bits in groups of {group_size}, nothing else")

    def as_dict(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def apply(self, weight: mx.array) -> dict[str, mx.array]:
        """Quantise [..., O, I] -> the arrays by kind."""
        weight, scales, *biases = mx.quantize(weight, self.group_size, self.bits, mode=self.mode)
        out = {"weight": weight, "scales": scales}
        return {**out, "biases": biases[0]} if biases else out


def quantisation(
    name: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
) -> Quantisation | None:
    """A setting from what a user gave: a name ("SMOE-Q4"), or bits and so on. None: keep."""
    if name is not None:
        if name.upper() not in NAMED:
            raise RecipeError(f"{name!r}: one of {', '.join(NAMED)}, or give bits")
        if bits or group_size or mode:
            raise RecipeError(f"give {name} or bits, group size and mode, not both")
        return Quantisation(*NAMED[name.upper()])
    if bits is None and group_size is None and mode is None:
        return None
    mode = "affine" if mode is None else mode
    if not isinstance(mode, str):
        raise RecipeError(f"mode {mode!r:.40}: one of affine, {', '.join(FIXED)}")
    default_bits, default_group = FIXED.get(mode, (4, 64))
    return Quantisation(
        default_bits if bits is None else bits,
        default_group if group_size is None else group_size,
        mode,
    )


@dataclass(frozen=True)
class Recipe:
    """What to do with each projection of each expert of each layer.

    A JSON recipe is an object of patterns, matched in their order against
    "<path of the switch module>.<projection>", e.g. "model.layers.3.mlp.switch_mlp.down_proj",
    and against "<path of the switch module>.experts.<expert>.<projection>":

        {"*.layers.0.*": {"bits": 8}, "*.layers.3.*.experts.17.*": {"bits": 6},
         "*.down_proj": {"bits": 6, "group_size": 32}, "*": "SMOE-Q4"}

    The first pattern that fits decides; null keeps the source's bytes, as does no pattern.
    """

    rules: tuple[tuple[str, Quantisation | None], ...] = field(default=())

    @classmethod
    def of(cls, setting: Quantisation | None) -> "Recipe":
        return cls((("*", setting),)) if setting else cls()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Recipe":
        """Read a JSON recipe. Raises RecipeError naming the file and the rule."""
        try:
            document = read_json(path, MAX_NBYTES)
        except (OSError, ValueError) as e:
            raise RecipeError(f"{os.fspath(path)}: {e}") from None
        if not isinstance(document, dict):
            raise RecipeError(f"{os.fspath(path)}: a recipe is an object of patterns")
        rules = []
        for pattern, value in document.items():
            try:
                if value is None:
                    setting = None
                elif isinstance(value, str):
                    setting = quantisation(value)
                elif isinstance(value, dict) and set(value) <= {"bits", "group_size", "mode"}:
                    setting = quantisation(**value)
                else:
                    raise RecipeError("null, a name, or an object of bits, group_size, mode")
            except RecipeError as e:
                raise RecipeError(f"{os.fspath(path)}: {pattern!r}: {e}") from None
            rules.append((pattern, setting))
        return cls(tuple(rules))

    def for_experts(self, path: str, projection: str, experts: int) -> list[Quantisation | None]:
        """The setting of each of a layer's experts for one projection. path: the switch module."""
        out: list[Quantisation | None] = [None] * experts
        left = list(range(experts))
        for pattern, setting in self.rules:
            fits = re.compile(fnmatch.translate(pattern)).match
            if fits(f"{path}.{projection}"):
                chosen = left
            elif _is_plain(pattern) and not pattern.startswith(path + "."):
                continue  # a rule for one expert of another layer: recipes may have thousands
            else:
                chosen = [e for e in left if fits(f"{path}.experts.{e}.{projection}")]
            for e in chosen:
                out[e] = setting
            if chosen:
                left = [e for e in left if e not in set(chosen)]
            if not left:
                break
        return out


def _is_plain(pattern: str) -> bool:
    return not set("*?[") & set(pattern)
