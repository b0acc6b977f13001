"""load(): the one door. From a name to an ordinary mlx-lm model whose experts stay on disk."""

import contextlib
import os
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_tokenizer

from .cache.experts import SharedExpertCache
from .cache.policy import POLICIES
from .cache.usage import Usage
from .config import StreamingConfig
from .device import available_nbytes, max_buffer_nbytes, using_mlx
from .errors import BudgetError, CheckpointError, SmoeError, UnsupportedModelError, VaultError
from .forward.decode import Decoding
from .governor import govern
from .hot import find_usage_file, prewarm_soon
from .hub import find_model
from .kernels.choose import KernelChooser
from .kernels.experts import eligible
from .layers.blocks import recognise, recognise_routing
from .layers.lookahead import look_up, make_predictor
from .layers.mixed import MixedSwitch
from .layers.switch import StreamingSwitchGLU, StreamingSwitchMLP
from .layers.zero_experts import tell_true_routing
from .model_config import read_config
from .plan import MemoryPlan, ModelShape, format_bytes, make_plan
from .shape import measure_shape
from .skeleton import Skeleton, build_skeleton, other_children, replace_module
from .stats import Streaming
from .store.cuda import make_uploader
from .store.files import check_links, mlx_reads
from .store.reader import ExpertReader
from .store.safetensors import Checkpoint, SafetensorsMmap
from .store.vault import VAULT_FILE, Vault
from .tuned import Tuned, find_tuned


def load(
    path_or_repo: str | os.PathLike[str],
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    memory: str | int | float | None = None,
    slots: int | float | None = None,
    config: StreamingConfig | None = None,
) -> tuple[nn.Module, TokenizerWrapper] | tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Load a model whose routed experts are read from disk as the router asks for them.

    The first eight arguments are those of `mlx_lm.load`. No expert byte is read or allocated here;
    the rest of the model is read once.

    Args:
        path_or_repo: a local folder, a Hub repository, or "demo" for the bundled model.
        tokenizer_config: options for the tokenizer.
        model_config: entries that replace those of config.json.
        adapter_path: folder of a LoRA adapter; not on routed experts.
        lazy: do not read the backbone before it is used.
        return_config: return the model's config too.
        revision: branch, tag or commit of a Hub repository.
        trust_remote_code: run Python code that lies in the model's folder.
        memory: ceiling for all that MLX allocates: bytes, or "12GB". With neither this nor
            `slots`, the plan is made from the memory that this machine has free, and by what
            `smoe-mlx tune` found.
        slots: instead: experts in memory over all layers (int), or a share of all (float, 0-1).
        config: instead of both: all options at once.

    Returns:
        (model, tokenizer), and the model's config (a dict) with `return_config`.

    Raises:
        ModelNotFoundError: there is no such folder or repository, or no connection.
        UnsupportedModelError: this model or adapter cannot be streamed as it is.
        CheckpointError: a file is malformed, incomplete or missing; a vault: `VaultError`.
        BudgetError: `memory` or `slots` is too little, or not understood.
    """
    config = _streaming_config(memory, slots, config)
    folder = find_model(path_or_repo, revision)
    model, config_of_model = load_model(
        folder, lazy, model_config, trust_remote_code, config, adapter_path
    )
    tokenizer = load_tokenizer(
        folder, tokenizer_config, eos_token_ids=config_of_model.get("eos_token_id")
    )
    if return_config:
        return model, tokenizer, config_of_model
    return model, tokenizer


def load_model(
    folder: Path,
    lazy: bool = False,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    config: StreamingConfig | None = None,
    adapter_path: str | None = None,
    share: int | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """`load` without the tokenizer, from a local folder. Returns (model, its config).

    Args:
        share: bytes that the model may take of what `config` allows, beside other models.
    """
    using_mlx()
    config, tuned = _with_tuned(folder, config or StreamingConfig(), share)
    checkpoint, vault = open_weights(folder)
    try:
        skeleton = build_skeleton(folder, checkpoint, model_config, trust_remote_code, vault)
        model = skeleton.model
        shape, plan = _shape_and_plan(skeleton, config, tuned=tuned)
        limit_memory(plan)
        files = checkpoint.files if vault is None else [vault]
        reader = ExpertReader(files, config.threads, config.io, make_uploader())
        model._streaming = install(skeleton, reader, plan, config)
        model._streaming.config, model._streaming.shape = config, shape
        model._streaming.tuned = tuned
        if adapter_path is not None:
            _check_adapter(Path(adapter_path), skeleton)
            model = load_adapters(model, adapter_path)
            model.eval()
        _install_usage(folder, model._streaming, config)
        # mlx-lm drew initial weights that nobody will see: a chain of keys, kept until evaluated.
        mx.eval(mx.random.state)
        if not lazy:
            with mlx_reads(folder):
                mx.eval(model)  # not only its parameters: some models keep lazy constants besides
    except BaseException:
        for file in (*checkpoint.files, *([vault] if vault else [])):
            file.close()
        raise
    if vault is not None:
        checkpoint.close()
    if config.usage is not None:
        prewarm_soon(model._streaming)
    if config.govern:
        govern(model._streaming)
    return model, skeleton.config


def plan(
    path_or_repo: str | os.PathLike[str],
    model_config: dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    *,
    memory: str | int | float | None = None,
    slots: int | float | None = None,
    config: StreamingConfig | None = None,
) -> MemoryPlan:
    """What `load` would do with this budget, from headers alone.

    Args:
        path_or_repo: as for `load`. A Hub repository is downloaded first.
        model_config: as for `load`.
        revision: as for `load`.
        trust_remote_code: as for `load`.
        memory: as for `load`.
        slots: as for `load`.
        config: as for `load`.

    Returns:
        Where the memory would go. `print` it for a table.

    Raises:
        ModelNotFoundError, UnsupportedModelError, CheckpointError, BudgetError: as `load`.
    """
    config = _streaming_config(memory, slots, config)
    folder = find_model(path_or_repo, revision)
    return plan_model(folder, model_config, trust_remote_code, config)


def plan_model(
    folder: Path,
    model_config: dict[str, Any] | None,
    trust_remote_code: bool,
    config: StreamingConfig,
    share: int | None = None,
) -> MemoryPlan:
    """`plan` for a local folder. `share` is that of `load_model`."""
    config, tuned = _with_tuned(folder, config, share)
    checkpoint, vault = open_weights(folder)
    try:
        skeleton = build_skeleton(folder, checkpoint, model_config, trust_remote_code, vault)
        return plan_for(skeleton, config, tuned=tuned)
    finally:
        checkpoint.close()
        if vault is not None:
            vault.close()


def _streaming_config(
    memory: str | int | float | None, slots: int | float | None, config: StreamingConfig | None
) -> StreamingConfig:
    if config is None:
        return StreamingConfig(memory=memory, slots=slots)
    if memory is not None or slots is not None:
        raise ValueError("give either config or memory/slots: config holds both")
    return config


def open_weights(folder: Path) -> tuple[Checkpoint, Vault | None]:
    """The weights of a folder, and the vault beside them if its config names one."""
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    try:
        return checkpoint, _open_vault(folder, config.get("smoe_mlx"))
    except BaseException:
        checkpoint.close()
        raise


def _open_vault(folder: Path, entry: Any) -> Vault | None:
    path = folder / VAULT_FILE
    if entry is None and not path.exists():
        return None
    if not isinstance(entry, dict):
        raise VaultError(f"{folder}/config.json does not say that {VAULT_FILE} belongs to it.")
    try:
        vault = Vault(path)
    except FileNotFoundError:
        raise VaultError(f"{path} is missing: this folder holds only the backbone.") from None
    if vault.header["id"] != entry.get("id"):
        vault.close()
        raise VaultError(
            f"{path} was made from another checkpoint, or by another run, than the rest of this "
            "folder. Shatter the source again."
        )
    return vault


def plan_for(
    skeleton: Skeleton,
    config: StreamingConfig,
    available: int | None = None,
    tuned: Tuned | None = None,
) -> MemoryPlan:
    """The plan for a model, with `available` bytes on the machine (None: what there is now)."""
    return _shape_and_plan(skeleton, config, available, tuned)[1]


def _shape_and_plan(
    skeleton: Skeleton,
    config: StreamingConfig,
    available: int | None = None,
    tuned: Tuned | None = None,
) -> tuple[ModelShape, MemoryPlan]:
    available = _available(config) if available is None else available
    try:
        shape = measure_shape(skeleton, config)
        inputs = skeleton.layouts, shape, config, max_buffer_nbytes(), available
        plan = make_plan(*inputs, None if tuned is None else tuned.slots)
        if tuned is not None and tuned.memory is not None and plan.total > tuned.memory:
            limited = replace(config, memory=tuned.memory)
            plan = make_plan(skeleton.layouts, shape, limited, max_buffer_nbytes(), 0, tuned.slots)
        return shape, plan
    except SmoeError:
        raise
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"config.json: a number is none, or impossible ({e}).") from e


def _with_tuned(
    folder: Path, config: StreamingConfig, share: int | None = None
) -> tuple[StreamingConfig, Tuned | None]:
    """The options that `smoe-mlx tune` found, where the user asks for nothing."""
    tuned = find_tuned(folder, config)
    options = {} if tuned is None else tuned.options
    if share is not None and config.slots is None:
        options = {**options, "memory": share}
    return replace(config, **options), tuned


def _available(config: StreamingConfig) -> int:
    """Only a config without a budget needs to know, so that one with a budget works anywhere."""
    return available_nbytes() if config.memory is None and config.slots is None else 0


def limit_memory(plan: MemoryPlan) -> None:
    """Keep freed buffers within the plan, and say so if the plan is more than there is.

    MLX has one limit for the whole process: it is lowered, never raised.
    """
    if plan.buffer_cache:
        before = mx.set_cache_limit(plan.buffer_cache)
        if before < plan.buffer_cache:
            mx.set_cache_limit(before)
    available = plan.total
    with contextlib.suppress(OSError, subprocess.SubprocessError, BudgetError):  # cannot tell
        available = available_nbytes()
    if plan.total > available:
        warnings.warn(
            f"{format_bytes(plan.total)} are planned, but only {format_bytes(available)} can be "
            "had without swapping, which is far slower than reading experts. Close programs, or "
            "plan with less memory.",
            stacklevel=4,
        )


def install(
    skeleton: Skeleton, reader: ExpertReader, plan: MemoryPlan, config: StreamingConfig
) -> Streaming:
    """Put a streaming module in the place of every switch module."""
    cache = SharedExpertCache(
        skeleton.layouts,
        [(b.layers, b.slots) for b in plan.banks],
        reader,
        policy=POLICIES[config.policy],
        check=config.check,
        debug=config.debug,
    )
    kernels = KernelChooser(config.kernels)
    layer = 0
    for switch in skeleton.switches:
        path, _, name = switch.path.rpartition(".")
        block = look_up(skeleton.model, path)
        recognised = None
        # (Experts of several kinds are not computed at once: there is no sum to leave.)
        if config.kernels != "stock" and len(switch.parts) == 1:
            block_kind: Any = type(block)
            recognised = recognise(block_kind, name)
        kind = StreamingSwitchGLU if switch.is_glu else StreamingSwitchMLP
        activation = switch.module.get("activation")
        parts = []
        for part in switch.parts:
            streamed = kind(cache, layer, **part.projections, activation=activation)
            streamed.eval()  # here, since the parts of a MixedSwitch are not its children
            geometry = eligible(part.layout.tensors, part.projections, streamed.activation)
            streamed.fused = kernels.choose(
                geometry, streamed.in_one, streamed.activation, recognised is not None,
                0 if recognised is None else recognised.added,
            )  # fmt: skip
            parts.append(streamed)
            layer += 1
        module: nn.Module = parts[0]
        if len(parts) > 1:
            experts = [p.layout.experts or () for p in switch.parts]
            module = MixedSwitch(list(zip(experts, parts, strict=True)))
        for key, child in other_children(switch).items():
            module[key] = child
        module.eval()
        replace_module(skeleton.model, switch.path, module)
        if isinstance(module, (StreamingSwitchGLU, StreamingSwitchMLP)):
            tell_true_routing(block, module)
            if module.fused is not None and recognised is not None:
                block.__class__ = recognised.kind
                routing = recognise_routing(block, recognised, name, switch.num_experts)
                if routing and (router := kernels.choose_router(routing.router)):
                    module.router, block.__class__ = router, routing.kind
    install_bets(skeleton, config)
    looks_ahead = config.lookahead or config.spec > 0
    decoding = Decoding(skeleton.model, cache, config.decode, looks_ahead)
    return Streaming(cache, plan, decoding, kernels, config.hot_per_layer)


def install_bets(skeleton: Skeleton, config: StreamingConfig) -> None:
    """Tell each streaming module what to read ahead. (Not layers with experts of several kinds.)"""
    found = [(switch, look_up(skeleton.model, switch.path)) for switch in skeleton.switches]
    modules = [x for x in found if isinstance(x[1], (StreamingSwitchGLU, StreamingSwitchMLP))]
    for i, (here, module) in enumerate(modules):
        wanted = []  # (layer, switch, ranks beyond the token's own)
        if config.lookahead and i + 1 < len(modules):
            wanted.append((modules[i + 1][1]._layer, modules[i + 1][0], 0))
        if config.spec:
            wanted.append((module._layer, here, config.spec))
        bets = []
        for number, there, extra in wanted:
            dims = next(iter(there.linears.values())).input_dims
            predict = make_predictor(
                skeleton.model, here.path, there.path, dims, there.num_experts, extra
            )
            if predict is not None:
                bets.append((number, predict))
        module.bet(bets, config.hits_first)


def _install_usage(folder: Path, streaming: Streaming, config: StreamingConfig) -> None:
    if config.usage is None and not config.hot_per_layer:
        return
    usage = streaming.cache.usage = Usage(streaming.cache.layouts)
    if config.usage is not None:
        usage.path = find_usage_file(config.usage, folder)
        usage.load()


def _check_adapter(folder: Path, skeleton: Skeleton) -> None:
    """Adapters on routed experts would silently have no effect: refuse them."""
    file = folder / "adapters.safetensors"
    if not file.exists():
        raise CheckpointError(f"{folder}: no adapters.safetensors in this folder.")
    check_links(folder)
    for name in SafetensorsMmap(file).tensors:
        for switch in skeleton.switches:
            if name.startswith(switch.path + "."):
                raise UnsupportedModelError(
                    f"{file}: {name!r} adapts routed experts, which cannot be done while they are "
                    "streamed. Fuse the adapter first (mlx_lm.fuse), then load the fused model."
                )
