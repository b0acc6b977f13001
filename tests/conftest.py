"""Tiny checkpoints of every architecture, made once a session."""

import contextlib
import copy
import io
import json
import linecache
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten

import smoe_mlx
from smoe_mlx.skeleton import build_skeleton
from smoe_mlx.store.layout import ExpertLayout
from smoe_mlx.store.reader import ExpertReader
from smoe_mlx.store.safetensors import Checkpoint

mx.set_default_device(mx.cpu)

CONFIGS = json.loads((Path(__file__).parent / "data" / "tiny_configs.json").read_text())
# dbrx has expert modules of its own, which cannot be streamed.
STREAMED = sorted(set(CONFIGS) - {"dbrx"})


@pytest.fixture(scope="session", autouse=True)
def no_verdicts_of_this_machine(tmp_path_factory):
    """What was found out about it, and lies in the user's cache folder, is no part of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def random_model(config: dict, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """A model whose every weight is random: what is zero by default would hide mistakes."""
    model_class, args_class = mlx_lm.utils._get_classes(config)
    mx.random.seed(0)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    model.eval()
    zeros = [
        (k, mx.random.normal(v.shape).astype(v.dtype) * 0.1)
        for k, v in tree_flatten(model.parameters())
        if v.size and mx.issubdtype(v.dtype, mx.floating) and mx.abs(v).max().item() == 0
    ]
    model.load_weights(zeros, strict=False)
    model.set_dtype(dtype)
    mx.eval(model)
    return model


def save_checkpoint(folder: Path, model: nn.Module, config: dict) -> Path:
    folder.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()):
        mlx_lm.utils.save_model(folder, model)
        mlx_lm.utils.save_config(dict(config), folder / "config.json")
    return folder


def make_checkpoint(folder: Path, arch: str, mode: str | None = None, **quant: object) -> Path:
    """Save a tiny random model of `arch`; `mode` None is float32, else quantise everything."""
    config = copy.deepcopy(CONFIGS[arch])
    model = random_model(config)
    if mode is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            model, config = mlx_lm.utils.quantize_model(
                model,
                config,
                quant.get("group_size"),
                quant.get("bits"),
                mode=mode,
                quant_predicate=quant.get("quant_predicate"),
            )
    return save_checkpoint(folder, model, config)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(arch, mode=None, **quantisation) -> folder of a checkpoint, the same for a session."""
    root = tmp_path_factory.mktemp("tiny")

    @cache
    def get(arch: str, mode: str | None = None, **quant: object) -> Path:
        name = "-".join([arch, str(mode), *(f"{k}{v}" for k, v in sorted(quant.items()))])
        if (root / name).exists():
            return root / name
        return make_checkpoint(root / name, arch, mode, **quant)

    return get


def resident(folder: Path) -> nn.Module:
    """mlx-lm's own model, everything in memory."""
    model, _ = mlx_lm.utils.load_model(folder)
    mx.eval(model)
    return model


def random_tokens(n: int, seed: int = 3, vocab: int = 512) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, vocab, size=n)]


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b).item()


def layouts_of(folder: Path) -> list[ExpertLayout]:
    checkpoint = Checkpoint(folder)
    try:
        return build_skeleton(folder, checkpoint).layouts
    finally:
        checkpoint.close()


def corrupt_expert(folder: Path, expert: int) -> None:
    """Change the weights of one expert of every layer, in place, and nothing else."""
    files = sorted(folder.glob("model*.safetensors"))
    for layout in layouts_of(folder):
        for t, ids, offsets in zip(layout.tensors, layout.file_ids, layout.offsets, strict=True):
            if t.kind == "weight":
                with files[ids[expert]].open("r+b") as f:
                    f.seek(offsets[expert])
                    data = np.frombuffer(f.read(t.nbytes), np.uint8) ^ 0x15
                    f.seek(offsets[expert])
                    f.write(data.tobytes())


def interrupt_at_line(n: int, action: Callable[[], object], *sources: str) -> str | None:
    """Run `action` with KeyboardInterrupt at the n-th line of these files or folders.

    Returns where it came; None if there are fewer lines. Nothing may swallow it.
    """
    lines, where = 0, None

    def trace(frame, event, arg):
        nonlocal lines, where
        file = frame.f_code.co_filename
        if not file.startswith(sources):
            return None
        # A signal comes between two instructions, but never between the end of a `with` and the
        # release of its lock, as an error raised here would.
        line = linecache.getline(file, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            lines += 1
            if lines == n:
                where = f"{file}:{frame.f_lineno}"
                raise KeyboardInterrupt  # ends the tracing as well
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return where
    finally:
        sys.settrace(before)
    assert where is None, f"the interrupt at {where} was swallowed"
    return None


class SlowReader(ExpertReader):
    """A reader that thinks of its disk as slow; reads take as long as they are told to."""

    seconds = 0.0
    fail: BaseException | None = None
    gate: threading.Event | None = None

    def __init__(self, files, threads=2, io="pread", uploader=None):
        super().__init__(files, threads, io)
        read_one = self._read_one

        def slowly(read):
            if self.gate is not None:
                self.gate.wait(10)
            time.sleep(self.seconds)
            if self.fail is not None:
                raise self.fail
            read_one(read)

        self._read_one = self._streamer.read_one = slowly

    slow = True
    waiting = 0.0

    def worth_waking(self):
        return True


@pytest.fixture
def slow_disk(monkeypatch):
    """Every reader says that its disk is slow, so that all the ways to read ahead are taken."""
    monkeypatch.setattr(sys.modules["smoe_mlx.load"], "ExpertReader", SlowReader)


@pytest.fixture(scope="session")
def tokenizer():
    """The demo's tokenizer, ids folded into the tiny vocabulary."""
    return mlx_lm.utils.load_tokenizer(Path(smoe_mlx.__file__).parent / "demo")
