"""open_experts(): streaming modules for one's own model, from the tensors of its experts alone."""

import os
from collections.abc import Callable, Sequence

import mlx.core as mx

from ..cache.bank import MX_DTYPES
from ..cache.experts import SharedExpertCache
from ..errors import BudgetError, CheckpointError
from ..store.cuda import make_uploader
from ..store.files import check_links
from ..store.layout import ExpertLayout, TensorSpec, layout_from_checkpoint
from ..store.reader import ExpertReader
from ..store.safetensors import Checkpoint
from .switch import (
    GLU,
    KINDS,
    MLP,
    Projection,
    StreamingSwitchGLU,
    StreamingSwitchMLP,
    quantisation,
)

FLOATS = ("F32", "F16", "BF16")


def open_experts(
    path: str | os.PathLike[str],
    names: Sequence[str],
    slots: int,
    activation: Callable[..., mx.array] | None = None,
    threads: int = 8,
    io: str = "pread",
) -> list[StreamingSwitchGLU | StreamingSwitchMLP]:
    """Modules whose experts stay in a safetensors file, for a model that is not mlx-lm's.

    Each is called as `(x [..., D], indices [..., k]) -> [..., k, D]`; top-k, weights and sum are
    the model's own. No expert byte is read here. All modules share the slots, under one LRU order.

    Args:
        path: a safetensors file, or a folder of `model*.safetensors`. For each of `names` it holds
            `NAME.gate_proj.weight`, `up_proj` and `down_proj` (or `fc1` and `fc2`), each
            [E, output, input]; if quantised as by `mx.quantize`, also `scales` and `biases`. Bits,
            group size and mode are told by the shapes. A `bias` [E, output] is added.
        names: the modules, alike in shapes and dtypes.
        slots: experts in memory, over all modules.
        activation: called as `activation(x_up, x_gate)`, by default SwiGLU; where there are fc1 and
            fc2, as `activation(x)`, by default GELU.
        threads: as in `StreamingConfig`.
        io: as in `StreamingConfig`.

    Returns:
        A module for each of `names`.

    Raises:
        CheckpointError: no such file, or tensors are missing or do not go together.
        BudgetError: less than one slot.
        ValueError: no names, or a string.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"names={names!r}: give a list of modules, one at least")
    if os.path.isdir(path):
        check_links(path)
    checkpoint = Checkpoint(path)
    try:
        layouts = [_layout(checkpoint, name) for name in names]
        projections = _projections(layouts[0], checkpoint)
        for x in layouts:
            if x.tensors != layouts[0].tensors:
                raise CheckpointError(
                    f"{path}: the experts of {x.path} differ in shape or dtype from those of "
                    f"{layouts[0].path}. Open them by themselves."
                )
        total = sum(x.num_experts for x in layouts)
        if slots < 1:
            raise BudgetError(f"slots={slots}: at least 1; {total:,} would hold all experts")
        reader = ExpertReader(checkpoint.files, threads, io, make_uploader())
        cache = SharedExpertCache(layouts, [(range(len(layouts)), min(slots, total))], reader)
    except BaseException:
        checkpoint.close()
        raise
    kind = StreamingSwitchGLU if "gate_proj" in projections else StreamingSwitchMLP
    modules = [kind(cache, i, **projections, activation=activation) for i in range(len(layouts))]
    for module in modules:
        module.eval()
    return modules


def _layout(checkpoint: Checkpoint, name: str) -> ExpertLayout:
    """Where the experts of one module lie."""
    here = checkpoint.tensors
    for parts in (GLU, MLP):
        first = f"{name}.{parts[0]}.weight"
        if first in here and len(here[first][1].shape) == 3:
            break
    else:
        raise CheckpointError(
            f"{checkpoint.folder}: no experts of {name!r}: neither '{name}.gate_proj.weight' nor "
            f"'{name}.fc1.weight' is a tensor [experts, output, input] in it."
        )
    names = {(p, k): f"{name}.{p}.{k}" for p in parts for k in KINDS}
    sources: dict[tuple[str, str], str | Sequence[str]] = {
        key: n for key, n in names.items() if n in here or key[1] == "weight"
    }
    return layout_from_checkpoint(checkpoint, name, here[first][1].shape[0], sources)


def _projections(layout: ExpertLayout, checkpoint: Checkpoint) -> dict[str, Projection]:
    """How the experts of a module are quantised, by the shapes of their tensors, all checked."""
    here = {(t.projection, t.kind): t for t in layout.tensors}
    parts = list(dict.fromkeys(t.projection for t in layout.tensors))
    first, last = here[parts[0], "weight"], here[parts[-1], "weight"]
    out = {}
    for part in parts:
        tensors = {k: t for (p, k), t in here.items() if p == part}
        fits = all(t.dtype in MX_DTYPES for t in tensors.values())
        fits &= all(len(tensors[k].shape) == 2 for k in ("weight", "scales") if k in tensors)
        fits &= 0 not in (*first.shape, *last.shape)
        if fits:
            output, dims = first.shape[0], last.shape[0]  # of gate_proj, up_proj and fc1
            if part == parts[-1]:
                output, dims = dims, output
            out[part], needed = _quantised(part, tensors, output, dims)
            have = {k: t.shape for k, t in tensors.items()}
            optional = {"bias": (output,), "global_scale": ()}
            fits = needed == {k: shape for k, shape in have.items() if k not in optional}
            fits &= all(have[k] == shape for k, shape in optional.items() if k in have)
            fits &= tensors["weight"].dtype in (FLOATS if out[part].mode is None else ("U32",))
        if not fits:
            found = ", ".join(f"{k} {t.dtype} {list(t.shape)}" for k, t in tensors.items())
            raise CheckpointError(
                f"{checkpoint.folder}: an expert of {layout.path} has {part} of {found}. That does "
                "not fit its other projections, or is not what mx.quantize makes."
            )
    return out


def _quantised(
    part: str, tensors: dict[str, TensorSpec], output: int, dims: int
) -> tuple[Projection, dict[str, tuple[int, ...]]]:
    """A projection [output, dims], and the shapes that its tensors then have to have."""
    if "scales" not in tensors:
        return Projection(part), {"weight": (output, dims)}
    weight, scales = tensors["weight"], tensors["scales"]
    size, bits, mode = quantisation(dims, weight.shape[-1], scales.shape[-1], scales.dtype == "U8")
    needed: dict[str, tuple[int, ...]] = {
        "weight": (output, dims * bits // 32),
        "scales": (output, dims // size),
    }
    if mode == "affine":
        needed["biases"] = needed["scales"]
    return Projection(part, size, bits, mode), needed if mode else {}
