"""What reads files from strangers, as functions of bytes: understood or refused, within bounds.

Each target writes the bytes where the library looks for them and reads them. Only the documented
errors may come out; no file may be opened outside the folder (but the libraries' own, to be read),
no process started, nothing unpickled, no connection made; and no more Python memory may be needed
than `MOST_PER_BYTE` for each byte of the file beside a constant.
"""

import atexit
import contextlib
import logging
import os
import shutil
import struct
import sys
import tempfile
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import numpy as np

import smoe_mlx
from smoe_mlx.cache.usage import Usage
from smoe_mlx.errors import CheckpointError, RecipeError, SmoeError, TraceError, VaultError
from smoe_mlx.sculptor.recipe import Recipe
from smoe_mlx.server.session_files import SessionFiles
from smoe_mlx.store.layout import ExpertLayout, TensorSpec
from smoe_mlx.store.safetensors import Checkpoint, SafetensorsMmap
from smoe_mlx.store.vault import PREAMBLE, Vault, front_matter, plan_vault
from smoe_mlx.trace import load_trace

MOST_PER_BYTE = 64  # bytes of Python objects; of JSON, a list or a short string takes the most
MOST_BESIDE = 8 << 20

mx.set_default_device(mx.cpu)
logging.disable()
warnings.simplefilter("ignore")
FOLDER = Path(os.path.realpath(tempfile.mkdtemp(prefix="fuzz-")))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
DEMO = Path(smoe_mlx.__file__).parent / "demo"

# ---- the guard -----------------------------------------------------------------------------------

NEVER = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect",
         "pickle.find_class", "shutil.rmtree", "ctypes.dlopen"}  # fmt: skip
OWN = {*sys.path, sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev"}
READABLE = tuple(os.path.realpath(p) + "/" for p in OWN if p)
guarded = False
violation: str | None = None


def _watch(event: str, args: tuple) -> None:
    global violation
    if not guarded:
        return
    if event in NEVER:
        violation = f"{event} {args!r:.200}"
    elif event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        writes = bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not path.startswith(f"{FOLDER}/") and (writes or not path.startswith(READABLE)):
            violation = f"open {path!r:.200}"


sys.addaudithook(_watch)

# ---- the targets ---------------------------------------------------------------------------------


def _write(name: str, data: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(data)
    return path


def safetensors(data: bytes) -> None:
    try:
        with SafetensorsMmap(_write("a.safetensors", data)) as file:
            for name, t in file.tensors.items():
                assert len(file.tensor_bytes(name)) == t.nbytes
    except CheckpointError:
        pass


def vault(data: bytes) -> None:
    """Front matter; checksums and the file's size are made right, and the records are zero."""
    size = len(data)
    if size >= PREAMBLE.size:
        fields = list(PREAMBLE.unpack_from(data))
        size = min(max(fields[6], size), 1 << 20)
        end = min(PREAMBLE.size + fields[3] + 32 * fields[4], 1 << 20)
        fields[6], fields[8] = size, zlib.crc32(data[PREAMBLE.size : end].ljust(
            min(end, size) - PREAMBLE.size, b"\0"))  # fmt: skip
        first = PREAMBLE.pack(*fields)[:-4]
        data = first + struct.pack("<I", zlib.crc32(first)) + data[PREAMBLE.size :]
    path = _write("experts.smoe", data)
    os.truncate(path, max(size, len(data)))
    try:
        with Vault(path) as file:
            for i in range(min(len(file.table), 8)):
                try:
                    file.verify_record(i)
                except VaultError:
                    continue
    except VaultError:
        pass


def recipe(data: bytes) -> None:
    with contextlib.suppress(RecipeError):
        Recipe.read(_write("recipe.json", data)).for_experts("model.layers.3.mlp", "up_proj", 8)


def usage(data: bytes) -> None:
    spec = TensorSpec("up_proj", "weight", "F32", (2,), 8)
    ids = np.zeros((1, 3), np.int64)
    read = Usage([ExpertLayout(f"layers.{i}", 3, (spec,), ids, ids) for i in range(2)],
                 _write("usage.json", data))  # fmt: skip
    read.load()
    assert len(read.ranked()) == 6


def session(data: bytes) -> None:
    folder = FOLDER / "sessions" / "model"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{zlib.crc32(data):08x}-0.safetensors"
    path.write_bytes(data)
    files = SessionFiles(folder.parent, 1 << 30)
    for found, _ in list(files.index("model")):
        with contextlib.suppress(ValueError):
            files.load(found)
    path.unlink(missing_ok=True)


def index(data: bytes) -> None:
    _link(FOLDER / "indexed")
    (FOLDER / "indexed" / "model.safetensors.index.json").write_bytes(data)
    with contextlib.suppress(CheckpointError):
        Checkpoint(FOLDER / "indexed").close()


def trace(data: bytes) -> None:
    with contextlib.suppress(TraceError):
        load_trace(_write("trace.npz", data))


def config(data: bytes) -> None:
    _link(FOLDER / "configured")
    (FOLDER / "configured" / "config.json").write_bytes(data)
    with contextlib.suppress(SmoeError):
        smoe_mlx.plan(FOLDER / "configured", slots=0.5)


def tokenizer(data: bytes) -> None:
    """What transformers makes of it is its own affair, but for files and processes."""
    folder = FOLDER / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(DEMO / name, folder)
    (folder / "tokenizer_config.json").write_bytes(data)
    with contextlib.suppress(Exception):
        mlx_lm.utils.load_tokenizer(folder)


def _link(folder: Path) -> None:
    """The demo's weights in a folder."""
    if not folder.exists():
        folder.mkdir()
        shutil.copy(DEMO / "model.safetensors", folder)


TARGETS: dict[str, Callable[[bytes], None]] = {
    f.__name__: f
    for f in (safetensors, vault, recipe, usage, session, index, trace, config, tokenizer)
}


def check(target: str, data: bytes) -> int:
    """Run a target under the guard; returns the peak of Python memory that it took, in bytes."""
    global guarded, violation
    violation = None
    started = tracemalloc.is_tracing()
    if not started:
        tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    guarded = True
    try:
        TARGETS[target](data)
    finally:
        guarded = False
        peak = tracemalloc.get_traced_memory()[1] - before
        if not started:
            tracemalloc.stop()
    assert violation is None, violation
    most = MOST_BESIDE + MOST_PER_BYTE * len(data)
    assert peak <= most, f"{peak} bytes of memory for a file of {len(data)}"
    return peak


def greedy(nbytes: int) -> dict[str, list[bytes]]:
    """JSON that takes the most memory for its size, as files of each kind."""
    texts = [
        b"[" + b"[]," * (nbytes // 3) + b"[]]",
        b"[" + b"{}," * (nbytes // 3) + b"{}]",
        b"[" + b'"ab",' * (nbytes // 5) + b"1]",
        b"[" + b"1e9," * (nbytes // 4) + b"1]",
        b"{" + b",".join(b'"%x":0' % i for i in range(nbytes // 9)) + b"}",
        b"{" + b",".join(b'"%x":[]' % i for i in range(nbytes // 10)) + b"}",
        '["\U0001f600'.encode() + b"a" * nbytes + b'"]',
    ]
    parts = plan_vault([("layers.0", 2, [TensorSpec("up_proj", "weight", "F32", (2,), 8)])], {})

    def in_vault(text: bytes) -> bytes:
        fields = list(PREAMBLE.unpack_from(front_matter(parts)))
        fields[3] = len(text)
        fields[5] = -(-(PREAMBLE.size + len(text) + 64) // 16384) * 16384
        return PREAMBLE.pack(*fields) + text + parts.table.tobytes() + bytes(1 << 14)

    return {
        **dict.fromkeys(("config", "recipe", "usage", "index"), texts),
        "safetensors": [len(t).to_bytes(8, "little") + t for t in texts],
        "session": [len(t).to_bytes(8, "little") + t for t in texts],
        "vault": [in_vault(t) for t in texts],
    }


# ---- a corpus to begin with ----------------------------------------------------------------------


def seeds() -> dict[str, list[bytes]]:
    """Good files of each kind, small."""
    import json

    from mlx_lm.models.cache import KVCache

    mx.save_safetensors(str(FOLDER / "seed.safetensors"), {"a": mx.zeros((2, 3)), "b": mx.ones(4)})
    specs = [TensorSpec("up_proj", "weight", "F32", (2, 3), 24)]
    plans = [
        plan_vault([("layers.0", 2, specs)], {"id": "x"}),
        plan_vault([("layers.0", (1,), specs), ("layers.0", (0,), specs)], {"id": "x"}),
    ]
    spec = TensorSpec("up_proj", "weight", "F32", (2,), 8)
    ids = np.zeros((1, 3), np.int64)
    layouts = [ExpertLayout(f"layers.{i}", 3, (spec,), ids, ids) for i in range(2)]
    uses = Usage(layouts, FOLDER / "seed.json")
    uses.saw([(0, 1), (1, 2)])
    uses.save()
    cache = [KVCache()]
    cache[0].update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))

    class Entry:
        kind, asked, grows, tokens = "answer", 2, True, np.arange(3)

    Entry.cache = cache
    saved = SessionFiles(FOLDER / "seeds", 1 << 30).save("m", Entry)
    header = {
        "format": "smoe-mlx trace", "version": 1, "model": "m", "prompt_tokens": 0,
        "prompt_calls": 0, "tokens": 1, "num_experts": [4], "top_k": [2], "expert_nbytes": [8],
        "banks": [0],
    }  # fmt: skip
    np.savez(
        FOLDER / "seed.npz",
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        calls=np.array([[0, 1]], np.int32),
        ids=np.array([1, 2], np.int32),
    )
    settings = {"*.down_proj": {"bits": 6, "group_size": 32}, "a.experts.3.b": None, "*": "SMOE-Q4"}
    return {
        "safetensors": [(FOLDER / "seed.safetensors").read_bytes()],
        "vault": [front_matter(p) for p in plans],
        "recipe": [json.dumps(settings).encode(), b'{"*": {"mode": "mxfp4"}}'],
        "usage": [(FOLDER / "seed.json").read_bytes()],
        "session": [saved.read_bytes()],
        "index": [b'{"metadata": {}, "weight_map": {"lm_head.weight": "model.safetensors"}}'],
        "trace": [(FOLDER / "seed.npz").read_bytes()],
        "config": [(DEMO / "config.json").read_bytes()],
        "tokenizer": [(DEMO / "tokenizer_config.json").read_bytes()],
    }
