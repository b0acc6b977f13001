"""shatter(): from a checkpoint to a folder with a backbone and a vault of expert records.

The expert tensors are what mlx-lm's own `sanitize` makes of the checkpoint, so that every layout
that mlx-lm can load can be shattered: they are lazy, and evaluated one projection of one layer at a
time. Everything is written into `DST.partial`, which becomes `DST` when all of it is on the disk.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import dequantize_model, make_shards, quantize_model, save_config

from ..cache.bank import MX_DTYPES
from ..device import using_mlx
from ..errors import BudgetError, RecipeError, SmoeError, UnsupportedModelError
from ..hub import find_model
from ..layers.switch import Projection
from ..plan import format_bytes
from ..skeleton import Skeleton, Switch, build_skeleton
from ..store.files import mlx_reads, naming
from ..store.layout import TensorSpec
from ..store.safetensors import DTYPE_BITS, Checkpoint
from ..store.vault import (
    VAULT_FILE,
    Vault,
    VaultPlan,
    VaultWriter,
    plan_vault,
    sync_folder,
)
from .recipe import NAMED, Quantisation, Recipe, quantisation

DTYPE_NAMES = {v: k for k, v in MX_DTYPES.items()}
SHARD_GB = 1
CHUNK_NBYTES = 8 << 20  # of unquantised weights that are quantised at a time, in each stream
WRITERS = 4
KEPT_FILES = ("*.json", "*.py", "*.txt", "*.jinja", "*.jsonl", "*.model", "*.tiktoken")

Progress = Callable[[int, int], None]


def shatter(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str | None = None,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    backbone_bits: int | None = None,
    backbone_group_size: int | None = None,
    backbone_mode: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Make a vault of a checkpoint.

    An interrupted run is resumed by the same call. The source is only read.

    Args:
        src: local folder or Hub repository, MLX or Hugging Face layout.
        dst: the new folder; must not exist.
        bits: 2, 3, 4, 5, 6 or 8, to quantise the experts. With neither this nor `group_size`,
            `mode` and `recipe`, their bytes are kept.
        group_size: weights that share a scale: 32, 64 or 128 (nvfp4: 16).
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        recipe: instead: "SMOE-Q4" or "SMOE-Q2" (4 and 2 bits, groups of 64), a `Recipe`, or the
            path of a JSON recipe, by layer, expert and projection.
        backbone_bits: the same for everything else.
        backbone_group_size: the same for everything else.
        backbone_mode: the same for everything else.
        revision: branch, tag or commit of a Hub repository.
        trust_remote_code: run Python code that lies in the model's folder.
        progress: called as (bytes written, bytes in all) of the vault.

    Returns:
        The folder `dst`, which `load` loads.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError: as `load`.
        RecipeError: a quantisation that MLX does not have.
        BudgetError: not enough room on the disk.
        FileExistsError: `dst` exists.
    """
    using_mlx()
    recipe = _recipe(recipe, quantisation(None, bits, group_size, mode))
    backbone = quantisation(None, backbone_bits, backbone_group_size, backbone_mode)
    folder, dst = find_model(src, revision), Path(dst)
    if dst.exists():
        raise FileExistsError(f"{dst} exists. Name a new folder, or remove it first.")
    if folder.resolve() in dst.resolve().parents:
        raise SmoeError(f"{dst} lies inside the source {folder}. Name a folder outside it.")
    partial = dst.with_name(dst.name + ".partial")
    if (folder / VAULT_FILE).exists():
        raise UnsupportedModelError(
            f"{folder} is a vault already. Shatter the original checkpoint."
        )
    checkpoint = Checkpoint(folder)
    try:
        skeleton = build_skeleton(
            folder, checkpoint, trust_remote_code=trust_remote_code, keep_arrays=True
        )
        mx.eval(mx.random.state)  # as in load_model
        parts = [_parts(switch, recipe) for switch in skeleton.switches]
        _warn_of_twice(skeleton, parts, backbone)
        plan, vault_id = _plan(skeleton, checkpoint, parts, backbone)
        partial.mkdir(parents=True, exist_ok=True)
        _check_room(partial, plan, skeleton)
        with naming(partial), mlx_reads(folder):
            _write_vault(partial / VAULT_FILE, plan, skeleton, parts, progress)
            config = _write_backbone(partial, skeleton, backbone)
            for file in checkpoint.files:
                file.check_unchanged()
            _copy_files(folder, partial)
            _finish_config(partial, skeleton, parts, config, vault_id)
    finally:
        checkpoint.close()
    for path in partial.iterdir():
        with path.open("rb") as f, naming(path):
            os.fsync(f.fileno())
    sync_folder(partial)
    os.rename(partial, dst)
    sync_folder(dst.parent)
    return dst


# ---- what is to be done --------------------------------------------------------------------------


def _recipe(recipe: Recipe | str | os.PathLike[str] | None, setting: Quantisation | None) -> Recipe:
    if recipe is None:
        return Recipe.of(setting)
    if setting is not None:
        raise RecipeError("give a recipe or bits, group size and mode, not both")
    if isinstance(recipe, Recipe):
        return recipe
    if str(recipe).upper() in NAMED:
        return Recipe.of(quantisation(str(recipe)))
    return Recipe.read(recipe)


@dataclass(frozen=True)
class Part:
    """Experts of one layer that get the same settings. Nearly always all of them."""

    experts: tuple[int, ...] | None  # None: all
    settings: dict[str, Quantisation | None]  # by projection; None keeps the bytes

    def quantisation(self, name: str, source: Projection) -> dict[str, Any] | None:
        """How a projection will be quantised, for a config."""
        setting = self.settings[name]
        if setting is not None:
            return setting.as_dict()
        if source.mode is None:
            return None
        return {"group_size": source.group_size, "bits": source.bits, "mode": source.mode}


def label(path: str, projection: str, experts: Sequence[int] | None) -> str:
    """What the header of a vault calls one projection of a layer, or of some of its experts."""
    return f"{path}.{projection}" + ("" if experts is None else f"[{experts[0]}...]")


def _parts(switch: Switch, recipe: Recipe) -> list[Part]:
    """Group a layer's experts by what the recipe says of them."""
    names, count = list(switch.linears), switch.num_experts
    by_name = [recipe.for_experts(switch.path, name, count) for name in names]
    groups: dict[tuple[Quantisation | None, ...], list[int]] = {}
    for e, settings in enumerate(zip(*by_name, strict=True)):
        groups.setdefault(settings, []).append(e)
    for settings in groups:
        for name, setting in zip(names, settings, strict=True):
            dims = switch.linears[name].input_dims
            if setting is not None and dims % setting.group_size:
                raise UnsupportedModelError(
                    f"{switch.path}.{name} has {dims} inputs, which groups of "
                    f"{setting.group_size} do not divide. Choose a smaller group size, or leave "
                    "it out by a recipe."
                )
    return [
        Part(None if len(groups) == 1 else tuple(experts), dict(zip(names, settings, strict=True)))
        for settings, experts in groups.items()
    ]


def _warn_of_twice(
    skeleton: Skeleton, parts: list[list[Part]], backbone: Quantisation | None
) -> None:
    twice = [
        label(switch.path, name, part.experts)
        for switch, of_switch in zip(skeleton.switches, parts, strict=True)
        for part in of_switch
        for name, setting in part.settings.items()
        if setting is not None and switch.projections[name].mode is not None
    ]
    if backbone is not None and skeleton.config.get("quantization"):
        twice.append("the backbone")
    if twice:
        warnings.warn(
            f"{len(twice)} parts of the source are quantised already ({twice[0]}, ...): quantising "
            "twice loses more than quantising the original once.",
            stacklevel=3,
        )


def _specs(switch: Switch, part: Part) -> list[TensorSpec]:
    """The tensors of one expert as they will be in the vault."""
    specs = []
    for name, linear in switch.linears.items():
        setting = part.settings[name]
        kinds = {k: switch.arrays[p, k] for p, k in switch.tensor_order if p == name}
        if setting is not None:
            dtype = _dtype(kinds, switch.projections[name])
            sample = mx.zeros((1, linear.output_dims, linear.input_dims), dtype)
            new = setting.apply(sample)
            kinds = {**new, **({"bias": kinds["bias"]} if "bias" in kinds else {})}
        for kind, array in kinds.items():
            shape = tuple(array.shape[1:])
            stored = DTYPE_NAMES.get(array.dtype)
            if stored is None:
                raise UnsupportedModelError(f"{switch.path}.{name}.{kind} is {array.dtype}")
            nbytes = math.prod(shape) * DTYPE_BITS[stored] // 8
            specs.append(TensorSpec(name, kind, stored, shape, nbytes))
    return specs


def _dtype(arrays: dict[str, mx.array], source: Projection) -> mx.Dtype:
    """The type of a projection's weights when they are not quantised."""
    dtype = arrays["weight" if source.mode is None else "scales"].dtype
    return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16


def _plan(
    skeleton: Skeleton,
    checkpoint: Checkpoint,
    parts: list[list[Part]],
    backbone: Quantisation | None,
) -> tuple[VaultPlan, str]:
    every = [(s, p) for s, of_s in zip(skeleton.switches, parts, strict=True) for p in of_s]
    layers = [(s.path, p.experts or s.num_experts, _specs(s, p)) for s, p in every]
    quantization = {
        label(s.path, name, p.experts): p.quantisation(name, s.projections[name])
        for s, p in every
        for name in s.linears
    }
    extra: dict[str, Any] = {
        "source": [fingerprint(f) for f in checkpoint.files],
        "quantization": quantization,
        "requantised": sorted(
            label(s.path, name, p.experts)
            for s, p in every
            for name, setting in p.settings.items()
            if setting
        ),
        "backbone": backbone.as_dict() if backbone else None,
    }
    vault_id = hashlib.sha256(json.dumps([extra, layers], default=vars).encode()).hexdigest()[:32]
    return plan_vault(layers, {**extra, "id": vault_id}), vault_id


def fingerprint(file: Any) -> dict[str, Any]:
    """What tells one version of a source file from another: its size and its header."""
    start = file.pread(8, 0)
    header = file.pread(int.from_bytes(start, "little"), 8)
    digest = hashlib.sha256(header).hexdigest()
    return {"name": file.path.name, "size": file.fingerprint.size, "header_sha256": digest}


def _check_room(partial: Path, plan: VaultPlan, skeleton: Skeleton) -> None:
    backbone = sum(a.nbytes for _, a in tree_flatten(skeleton.model.parameters()))
    there = sum(p.stat().st_blocks * 512 for p in partial.iterdir())
    needed, free = plan.file_nbytes + backbone + (64 << 20), shutil.disk_usage(partial).free
    if needed > free + there:
        raise BudgetError(
            f"{partial.parent}: {format_bytes(needed)} are needed, {format_bytes(free)} are free."
        )


# ---- doing it ------------------------------------------------------------------------------------


def _write_vault(
    path: Path,
    plan: VaultPlan,
    skeleton: Skeleton,
    parts: list[list[Part]],
    progress: Progress | None,
) -> None:
    if path.exists():  # an earlier run came to the end of the vault
        with Vault(path) as vault:
            if vault.header["id"] == json.loads(plan.header)["id"]:
                path.with_name(f"{path.name}.journal").unlink(missing_ok=True)
                return
        path.unlink()
    sizes = np.bincount(plan.table["layer"], plan.table["length"]).astype(int).tolist()
    writer = VaultWriter(path, plan)
    done, layer = 0, 0
    with contextlib.closing(_Pipeline(writer)) as pipeline:
        for switch, of_switch in zip(skeleton.switches, parts, strict=True):
            layers = range(layer, layer := layer + len(of_switch))
            if not writer.done.issuperset(layers):
                _write_layer(pipeline, dict(zip(layers, of_switch, strict=True)), switch)
                pipeline.layers_done(layers)
            switch.arrays.clear()
            mx.clear_cache()
            done += sum(sizes[i] for i in layers)
            if progress is not None:
                progress(done, sum(sizes))
        pipeline.drain()
        writer.finish()


class _Pipeline:
    """Writes while the next tensors are read and quantised, and syncs a layer behind them.

    What is handed over is bounded: one projection is written while one is made.
    """

    def __init__(self, writer: VaultWriter):
        self.writer = writer
        # Quantising runs in these; MLX's CPU streams have a thread each.
        device = mx.default_device()
        self.streams = [mx.new_stream(device) for _ in range(WRITERS if device == mx.cpu else 1)]
        self._pool = ThreadPoolExecutor(WRITERS)
        self._finisher = ThreadPoolExecutor(1)  # one sync at a time, in the order of the layers
        self._writes: list[Future[None]] = []
        self._sync: Future[None] | None = None

    def write(self, layer: int, begin: int, tensors: dict[int, mx.array]) -> None:
        """Write tensors (by their number in a record) of the experts from `begin` on.

        An expert's tensors come in their order, since its checksum runs over them.
        """
        self.wait_for_writes()
        data = {}
        for index, array in tensors.items():
            array = mx.contiguous(array)
            mx.eval(array)
            data[index] = memoryview(np.frombuffer(memoryview(array), np.uint8))  # type: ignore[arg-type]
        count = len(next(iter(tensors.values())))

        def write_some(experts: range) -> None:
            for i in experts:
                for index, view in data.items():
                    size = len(view) // count
                    view = view[i * size : (i + 1) * size]
                    self.writer.write_piece(layer, begin + i, index, view)

        step = -(-count // WRITERS)
        self._writes = [
            self._pool.submit(write_some, range(i, min(i + step, count)))
            for i in range(0, count, step)
        ]

    def wait_for_writes(self) -> None:
        for write in self._writes:
            write.result()
        self._writes = []

    def layers_done(self, layers: Sequence[int]) -> None:
        """Everything of these layers was handed over: make it last."""
        self.wait_for_writes()
        self.drain()

        def finish() -> None:
            for layer in layers:
                self.writer.layer_done(layer)

        self._sync = self._finisher.submit(finish)

    def drain(self) -> None:
        """Wait for the last layer that was handed over to be on the disk."""
        if self._sync is not None:
            self._sync.result()

    def close(self) -> None:
        for pool in (self._pool, self._finisher):
            pool.shutdown(cancel_futures=True)
        self.writer.close()


def _write_layer(pipeline: _Pipeline, parts: dict[int, Part], switch: Switch) -> None:
    """Write one layer; `parts` by their number in the vault."""
    plan = pipeline.writer.plan
    for name in switch.linears:
        # Taken out of the switch, so that nothing keeps what has been evaluated.
        arrays = {k: switch.arrays.pop((p, k)) for p, k in switch.tensor_order if p == name}
        mx.eval(arrays)
        for layer, part in parts.items():
            mine = arrays
            if part.experts is not None:
                rows = mx.array(part.experts)
                mine = {k: a[rows] for k, a in arrays.items()}
            specs = plan.geometries[plan.layers[layer].geometry].tensors
            for begin, some in _chunks(mine, switch, name, part.settings[name], pipeline.streams):
                tensors = {i: some[t.kind] for i, t in enumerate(specs) if t.projection == name}
                pipeline.write(layer, begin, tensors)


def _chunks(
    arrays: dict[str, mx.array],
    switch: Switch,
    name: str,
    setting: Quantisation | None,
    streams: list[mx.Stream],
) -> Iterator[tuple[int, dict[str, mx.array]]]:
    """(first expert, arrays by kind) of a projection, requantised if asked for, in parts."""
    if setting is None:
        yield 0, arrays
        return
    linear, source = switch.linears[name], switch.projections[name]
    dtype = _dtype(arrays, source)
    count = len(arrays["weight"])
    each = linear.output_dims * linear.input_dims * 4
    step = max(1, CHUNK_NBYTES // each)
    under_way: deque[tuple[int, dict[str, mx.array]]] = deque()
    for begin in range(0, count, step):
        part = {k: a[begin : begin + step] for k, a in arrays.items()}
        with mx.stream(streams[begin // step % len(streams)]):
            weight = part["weight"]
            if source.mode is not None:
                weight = mx.dequantize(
                    weight, part["scales"], part.get("biases"), source.group_size, source.bits,
                    mode=source.mode, global_scale=part.get("global_scale"),
                )  # fmt: skip
            new = setting.apply(weight.astype(dtype))
        if "bias" in part:
            new["bias"] = part["bias"]
        mx.async_eval(new)  # type: ignore[no-untyped-call]
        under_way.append((begin, new))
        if len(under_way) == len(streams):
            yield under_way.popleft()
    yield from under_way


def _write_backbone(
    folder: Path, skeleton: Skeleton, backbone: Quantisation | None
) -> dict[str, Any]:
    """Save everything but the routed experts; returns the config that fits it."""
    model, config = skeleton.model, dict(skeleton.config)
    if backbone is not None:
        if config.get("quantization"):
            model = dequantize_model(model)
            config.pop("quantization", None)
        config.pop("quantization_config", None)
        with contextlib.redirect_stdout(io.StringIO()):
            model, config = quantize_model(
                model, config, backbone.group_size, backbone.bits, mode=backbone.mode
            )
    weights = dict(tree_flatten(model.parameters()))
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))
    shards = make_shards(weights, SHARD_GB)
    weights.clear()
    index: dict[str, str] = {}
    count = len(shards)
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
        mx.save_safetensors(str(folder / name), shards[i], metadata={"format": "mlx"})
        index.update(dict.fromkeys(shards[i], name))
        shards[i] = {}
    text = json.dumps({"metadata": {}, "weight_map": dict(sorted(index.items()))}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)
    return config


def _copy_files(folder: Path, dst: Path) -> None:
    for pattern in KEPT_FILES:
        for path in folder.glob(pattern):
            if path.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copyfile(path, dst / path.name)


def _finish_config(
    folder: Path,
    skeleton: Skeleton,
    parts: list[list[Part]],
    config: dict[str, Any],
    vault_id: str,
) -> None:
    quantization = config.get("quantization")
    listed = {  # layers with several kinds of experts are described by the vault alone
        f"{s.path}.{name}": p[0].quantisation(name, s.projections[name])
        for s, p in zip(skeleton.switches, parts, strict=True)
        for name in s.linears
        if len(p) == 1
    }
    if any(listed.values()):
        if not quantization:
            first = next(x for x in listed.values() if x)
            quantization = {**first}
        quantization = {**quantization, **{k: v or False for k, v in listed.items()}}
        config["quantization"] = config["quantization_config"] = quantization
    if skeleton.model_file is not None:
        config["model_file"] = skeleton.model_file
    else:
        config.pop("model_file", None)
    config["smoe_mlx"] = {"vault": VAULT_FILE, "id": vault_id}
    save_config(config, folder / "config.json")
