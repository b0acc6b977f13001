"""A model without its experts: mlx-lm's own model, built and filled lazily, its routed experts left
on disk and mapped.

How an expert tensor of the model is found in the checkpoint needs no table of names: mlx-lm's own
`sanitize` is run on the lazy arrays, and each array is followed by identity, through renaming and
through `mx.stack`. What `sanitize` computes anew cannot be streamed as it is, and is refused.
"""

import contextlib
import importlib.util
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.utils import _get_classes, load_model

from .cache.bank import MX_DTYPES
from .errors import CheckpointError, SmoeError, UnsupportedModelError, VaultError
from .layers.lookahead import look_up
from .layers.switch import GLU, KINDS, MLP, Projection, quantisation
from .model_config import read_config
from .store.files import mlx_reads
from .store.layout import ExpertLayout, layout_from_checkpoint
from .store.safetensors import Checkpoint
from .store.vault import Vault

PROJECTIONS = {SwitchGLU: GLU, SwitchMLP: MLP}
CONVERT = "Make a vault of it first: smoe-mlx shatter MODEL NEW --bits 4, then load NEW."


@dataclass
class Part:
    """The experts of a switch that are stored alike: all of them, but for vaults made by a recipe
    that tells experts apart."""

    layout: ExpertLayout
    projections: dict[str, Projection]


@dataclass
class Switch:
    """One routed-expert module of the model, without its weights."""

    path: str
    module: nn.Module
    linears: dict[str, SwitchLinear]  # unquantised and never evaluated: for their shapes
    arrays: dict[tuple[str, str], mx.array] = field(default_factory=dict)
    names: dict[tuple[str, str], str | list[str]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    projections: dict[str, Projection] = field(default_factory=dict)  # of a checkpoint's `arrays`

    @property
    def tensor_order(self) -> list[tuple[str, str]]:
        """(projection, kind) of an expert's tensors, in the order in which they are kept."""
        return [(p, k) for p in self.linears for k in KINDS if (p, k) in self.names]

    @property
    def is_glu(self) -> bool:
        return isinstance(self.module, SwitchGLU)

    @property
    def num_experts(self) -> int:
        return int(next(iter(self.linears.values())).num_experts)


@dataclass
class Skeleton:
    """A lazily loaded model whose switch modules are empty, and what is known of them."""

    model: nn.Module
    config: dict[str, Any]
    switches: list[Switch]
    model_file: str | None = None

    @property
    def layouts(self) -> list[ExpertLayout]:
        """Of all parts of all switches, in their order."""
        return [p.layout for s in self.switches for p in s.parts]


# ---- building ------------------------------------------------------------------------------------


def build_skeleton(
    folder: Path,
    checkpoint: Checkpoint,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    vault: Vault | None = None,
    keep_arrays: bool = False,
) -> Skeleton:
    """Build the model of `folder` with mlx-lm's loader; no weight is read.

    Args:
        vault: holds the experts, in the place of the checkpoint's own files.
        keep_arrays: leave mlx-lm's lazy expert arrays in the switches, whatever `sanitize` did to
            them, and look for no layout.

    Raises:
        UnsupportedModelError: dense, routed in a way of its own, or in a layout to be converted.
        CheckpointError: tensors are missing or of wrong shape or dtype.
    """
    read_config(folder)  # before mlx-lm believes it
    switches: list[Switch] = []
    hook = _model_classes(folder, switches, trust_remote_code, vault, keep_arrays)
    try:
        with mlx_reads(folder):
            model, config = load_model(
                folder,
                lazy=True,
                # A custom model file is imported by the hook, which keeps experts out there too.
                model_config={**(model_config or {}), "model_file": None},
                get_model_classes=hook,
            )
    except FileNotFoundError as e:
        raise CheckpointError(f"{folder}: {e}") from e
    except KeyError as e:
        raise CheckpointError(f"{folder}: tensor or config entry {e} is missing.") from e
    except ValueError as e:
        raise _explained(e, folder) from e
    except (SmoeError, OSError, MemoryError):
        raise
    except Exception as e:  # whatever mlx-lm's code stumbles over in a config that fits no model
        raise CheckpointError(
            f"{folder}/config.json describes no model that mlx-lm can build "
            f"({type(e).__name__}: {e!s:.200})."
        ) from e
    model.__class__ = type(model).__bases__[0]  # from here on an ordinary mlx-lm model
    if not switches:
        raise UnsupportedModelError(_why_not_streamed(folder, config))
    for switch in switches:
        if vault is not None:
            switch.parts = _vault_parts(switch, vault, config, folder)
        else:
            arrays, count = switch.arrays, switch.num_experts
            switch.projections = _projections(switch, arrays, count, config, folder)
            if not keep_arrays:
                switch.parts = [Part(_layout(switch, checkpoint), switch.projections)]
        if not keep_arrays:
            switch.arrays.clear()  # the lazy arrays keep the files open
    return Skeleton(model, config, switches, _model_file(folder))


def _model_classes(  # type: ignore[no-untyped-def]
    folder: Path,
    switches: list[Switch],
    trust_remote_code: bool,
    vault: Vault | None,
    keep_arrays: bool,
):
    """mlx-lm's `get_model_classes`, for a model class that keeps its experts out."""

    def get_model_classes(config: dict[str, Any]) -> tuple[type, type]:
        model_file = _model_file(folder)
        if model_file is None:
            model_class, args_class = _get_classes(config)
        elif not trust_remote_code:
            raise UnsupportedModelError(
                f"{folder} brings its own model code ({model_file}), which would run on this "
                "machine. Pass trust_remote_code=True if you trust it."
            )
        else:
            module = _import_file(folder / model_file)
            model_class, args_class = module.Model, module.ModelArgs

        class Streamed(model_class):  # type: ignore[misc, valid-type]
            def __init__(self, args: Any):
                super().__init__(args)
                switches.extend(_empty_switches(self))

            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                if vault is not None:  # sanitize is to see a whole checkpoint
                    weights = {**weights, **_placeholders(vault)}
                originals = dict(weights)  # keeps the arrays, and so their ids, alive
                with _recorded_stacks({id(a): n for n, a in originals.items()}) as names:
                    if hasattr(super(), "sanitize"):
                        weights = super().sanitize(weights)
                    _check_scales(self, weights, folder)
                    return _take_experts(weights, switches, names, folder, keep_arrays)

        return Streamed, args_class

    return get_model_classes


def _check_scales(model: nn.Module, weights: dict[str, mx.array], folder: Path) -> None:
    """mlx-lm divides by how many inputs have a scale in common, and MLX by what comes out."""
    for path, m in model.named_modules():
        scales = weights.get(f"{path}.scales")
        if scales is not None and hasattr(m, "to_quantized"):
            inputs, groups = m.weight.shape[-1], scales.shape[-1] if scales.ndim else 0
            packed = weights.get(f"{path}.weight", scales)
            if not 0 < groups <= inputs <= 32 * packed.shape[-1]:
                raise CheckpointError(
                    f"{folder}: {path} has {inputs} inputs in config.json, which its weights and "
                    f"their {groups} scales do not fit."
                )


def _model_file(folder: Path) -> str | None:
    name = read_config(folder).get("model_file")
    if name is not None and (not isinstance(name, str) or Path(name).name != name):
        raise CheckpointError(f"{folder}/config.json: model_file {name!r} is not a plain file name")
    return name


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("custom_model", path)
    if spec is None or spec.loader is None:
        raise CheckpointError(f"{path} cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _empty_switches(model: nn.Module) -> list[Switch]:
    """Take the projections out of every switch module, before anything is allocated."""
    found = []
    for path, m in model.named_modules():
        kind = next((k for k in PROJECTIONS if isinstance(m, k)), None)
        if kind is None:
            continue
        if type(m).__call__ is not kind.__call__:
            raise UnsupportedModelError(
                f"{path} is a {type(m).__name__} with a forward of its own; it cannot be streamed. "
                "Load it with mlx_lm.load, or report the model."
            )
        linears = {name: m.pop(name) for name in PROJECTIONS[kind]}
        found.append(Switch(path, m, linears))
    # In the order of the layers, which named_modules() does not keep.
    return sorted(found, key=lambda s: [(k.isdigit(), k.zfill(8)) for k in s.path.split(".")])


_stack_lock = threading.Lock()


@contextlib.contextmanager
def _recorded_stacks(names: dict[int, str]) -> Iterator[dict[int, str | list[str]]]:
    """While active: array id -> the checkpoint tensor that it is, or the E that it stacks."""
    known: dict[int, str | list[str]] = dict(names)
    alive = []
    stack = mx.stack

    def recording(arrays: list[mx.array], axis: int = 0, **kwargs: Any) -> mx.array:
        out = stack(arrays, axis, **kwargs)
        parts = [names.get(id(a)) for a in arrays]
        if axis == 0 and None not in parts:
            known[id(out)] = parts  # type: ignore[assignment]
            alive.append(out)
        return out

    with _stack_lock:
        mx.stack = recording  # type: ignore[assignment]
        try:
            yield known
        finally:
            mx.stack = stack


def _take_experts(
    weights: dict[str, mx.array],
    switches: list[Switch],
    names: dict[int, str | list[str]],
    folder: Path,
    computed_too: bool,
) -> dict[str, mx.array]:
    """Move the expert tensors from `weights` to their switches; returns the rest."""
    wanted = {
        f"{s.path}.{projection}.{kind}": (s, projection, kind)
        for s in switches
        for projection in s.linears
        for kind in KINDS
    }
    rest = {}
    for name, array in weights.items():
        if name not in wanted:
            rest[name] = array
            continue
        switch, projection, kind = wanted[name]
        if id(array) not in names and not computed_too:
            raise UnsupportedModelError(
                f"{folder}: the experts of {switch.path} are stored in another layout (fused, "
                f"transposed or in a format that mlx-lm unpacks as it loads). {CONVERT}"
            )
        switch.arrays[projection, kind] = array
        switch.names[projection, kind] = names.get(id(array), [])
    return rest


def _placeholders(vault: Vault) -> dict[str, mx.array]:
    """Lazy arrays of the shapes that a vault's experts would have in a checkpoint."""
    for t in (t for x in vault.layouts for t in x.tensors if t.dtype not in MX_DTYPES):
        raise VaultError(f"{vault.path}: {t.name} is {t.dtype}, which cannot be streamed.")
    experts: dict[str, int] = {}
    for x in vault.layouts:
        experts[x.path] = experts.get(x.path, 0) + x.num_experts
    return {
        f"{x.path}.{t.name}": mx.zeros((experts[x.path], *t.shape), MX_DTYPES[t.dtype])
        for x in vault.layouts
        for t in x.tensors
    }


def _explained(error: ValueError, folder: Path) -> Exception:
    if isinstance(error, (UnsupportedModelError, CheckpointError)):
        return error
    text = str(error)
    if text.startswith("Model type"):
        return UnsupportedModelError(f"{folder}: {text} This mlx-lm knows no such architecture.")
    return CheckpointError(f"{folder}: {text}")


def _why_not_streamed(folder: Path, config: dict[str, Any]) -> str:
    kind = config.get("model_type")
    text = config.get("text_config") or config
    if any("expert" in k for k, v in text.items() if v) or kind == "dbrx" or "ffn_config" in text:
        return (
            f"{folder}: {kind} routes its experts in its own code, not through mlx-lm's switch "
            "layers, and cannot be streamed. Use mlx_lm.load."
        )
    return f"{folder}: {kind} is a dense model: it has no experts to stream. Use mlx_lm.load."


# ---- checking the experts ------------------------------------------------------------------------


def _projections(
    switch: Switch,
    arrays: dict[tuple[str, str], mx.array],
    experts: int,
    config: dict[str, Any],
    folder: Path,
) -> dict[str, Projection]:
    """How experts are quantised, from the shapes of `arrays` [experts, ...], checked."""
    return {
        name: _projection(f"{switch.path}.{name}", name, linear, experts,
                          {k: a for (p, k), a in arrays.items() if p == name}, config, folder)
        for name, linear in switch.linears.items()
    }  # fmt: skip


def _layout(switch: Switch, checkpoint: Checkpoint) -> ExpertLayout:
    """Where a switch's experts lie in a checkpoint."""
    layout = layout_from_checkpoint(
        checkpoint,
        switch.path,
        switch.num_experts,
        {key: switch.names[key] for key in switch.tensor_order},
    )
    for t in layout.tensors:
        array = switch.arrays[t.projection, t.kind]
        names = switch.names[t.projection, t.kind]
        name = names if isinstance(names, str) else names[0]
        where = f"{checkpoint.folder}: tensor {name!r}"
        if t.dtype not in MX_DTYPES:
            raise UnsupportedModelError(
                f"{where} is {t.dtype}, which cannot be streamed. {CONVERT}"
            )
        if (MX_DTYPES[t.dtype], (switch.num_experts, *t.shape)) != (array.dtype, array.shape):
            raise CheckpointError(f"{where} is not what mlx-lm would load ({array.dtype})")
    return layout


def _vault_parts(switch: Switch, vault: Vault, config: dict[str, Any], folder: Path) -> list[Part]:
    """A switch's experts in a vault."""
    layouts = [x for x in vault.layouts if x.path == switch.path]
    if not layouts:
        raise VaultError(f"{vault.path}: the experts of {switch.path} are not in this vault.")
    here = {(t.projection, t.kind): f"{x.path}.{t.name}" for x in layouts for t in x.tensors}
    if here != switch.names or sum(x.num_experts for x in layouts) != switch.num_experts:
        raise VaultError(f"{vault.path}: {switch.path} is not what this model needs.")
    parts = []
    for x in layouts:
        n = x.num_experts
        arrays = {
            (t.projection, t.kind): mx.zeros((n, *t.shape), MX_DTYPES[t.dtype]) for t in x.tensors
        }
        parts.append(Part(x, _projections(switch, arrays, n, config, folder)))
    return parts


def _projection(
    path: str,
    name: str,
    linear: SwitchLinear,
    experts: int,
    arrays: dict[str, mx.array],
    config: dict[str, Any],
    folder: Path,
) -> Projection:
    """How mlx-lm would quantise this projection (`mlx_lm.utils.load_model`), checked by shape."""
    if "weight" not in arrays:
        raise CheckpointError(f"{folder}: tensor '{path}.weight' is missing.")

    def expect(kind: str, *shape: int) -> None:
        if arrays[kind].shape != shape:
            raise CheckpointError(
                f"{folder}: tensor '{path}.{kind}' has shape {arrays[kind].shape}, "
                f"the model needs {shape}."
            )

    E, O, I = experts, linear.output_dims, linear.input_dims  # noqa: E741
    if arrays["weight"].shape[0] != E:
        raise CheckpointError(
            f"{folder}: '{path}.weight' holds {arrays['weight'].shape[0]} experts, "
            f"the config says {E}."
        )
    if ("bias" in linear) != ("bias" in arrays):
        state = "is missing" if "bias" in linear else "is there, but the model has no such bias"
        raise CheckpointError(f"{folder}: tensor '{path}.bias' {state}.")
    if "bias" in arrays:
        expect("bias", E, O)
    if "scales" not in arrays:
        expect("weight", E, O, I)
        if not mx.issubdtype(arrays["weight"].dtype, mx.floating):
            raise CheckpointError(f"{folder}: tensor '{path}.scales' is missing.")
        return Projection(name)
    listed = (config.get("quantization") or {}).get(path)
    widths = arrays["weight"].shape[-1], arrays["scales"].shape[-1]
    group_size, bits, mode = quantisation(I, *widths, arrays["scales"].dtype == mx.uint8)
    if isinstance(listed, dict):
        mode = listed.get("mode", "affine")
    said = {**listed} if isinstance(listed, dict) else {}
    if (
        arrays["weight"].dtype != mx.uint32
        or not mode
        or said.get("bits", bits) != bits
        or said.get("group_size", group_size) != group_size
    ):
        raise CheckpointError(
            f"{folder}: '{path}' looks like {bits} bits in groups of {group_size}, stored as "
            f"{arrays['weight'].dtype}, which does not fit its config ({listed})."
        )
    expect("weight", E, O, I * bits // 32)
    expect("scales", E, O, I // group_size)
    if (mode == "affine") != ("biases" in arrays):
        state = "is missing" if mode == "affine" else f"is there, but {mode} has none"
        raise CheckpointError(f"{folder}: tensor '{path}.biases' {state}.")
    if mode == "affine":
        expect("biases", E, O, I // group_size)
    if "global_scale" in arrays:
        expect("global_scale", E)
    return Projection(name, group_size, bits, mode)


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` at `path` ("model.layers.3.mlp.switch_mlp") of `model`."""
    parent, _, last = path.rpartition(".")
    look_up(model, parent)[last] = module


def other_children(switch: Switch) -> dict[str, Any]:
    """Children that a model hung on its switch module (muse_spark's post_expert_norm)."""
    return {k: v for k, v in switch.module.items() if k != "activation"}
