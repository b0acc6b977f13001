"""Every benchmark runs, in miniature. What it measures then means nothing.

And a model that is routed by a trace predicts what the trace says.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import CONFIGS, random_model, random_tokens, resident, same_bits, save_checkpoint
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx
from smoe_mlx.load import load_model
from smoe_mlx.trace import Recorder, Trace, force

ROOT = Path(__file__).parents[1]
DEMO = Path(smoe_mlx.__file__).parent / "demo"
ARGUMENTS = {
    "decode.py": "--tokens 8 --warmup 4 --rounds 1 --turn 4 --shares 0.5 --trace {trace} "
    "--ways both wait lag1 token",
    "forecast.py": "--models demo --tokens 4 --prompt-tokens 4",
    "host_overhead.py": "--tokens 12 --warmup 2",
    "hot.py": "--learn {text} --text {text} --learn-tokens 16 --tokens 8 --shares 0.5 --pins 2 "
    "--prompts 8",
    "kernels.py": "--help",  # needs a GPU
    "load.py": "{demo} --rounds 1",
    "long_run.py": "--tokens 4",
    "make_checkpoint.py": "--preset tiny --out {new}",
    "prefill.py": "--tokens 70 --rounds 1 --disk 1",
    "projection.py": "",
    "quality.py": "{raw} --tokens 64 --window 32 --bits 4 --text {text}",
    "read.py": "{demo} {vault} --rounds 1 --seconds 0.02",
    "serve.py": "--turns 2 --max-tokens 4",
    "shatter.py": "{demo} --rounds 1",
    "soak.py": "--rounds 1 --requests 4",
    "speculative.py": "--tokens 5 --turn 4 --rounds 1 --texts code --ways plain lookup",
    "sync.py": "--tokens 4 --rounds 1",
    "turns.py": "--model {raw} --tokens 720 --warmup 0 --turn 8 --shares 1.0 0.5 --kernels auto "
    "--trace {trace}",  # the text is shorter
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    smoe_mlx.shatter("demo", folder / "vault")
    config = json.loads((DEMO / "config.json").read_text())
    for name in ("quantization", "quantization_config"):
        config.pop(name, None)
    config |= {"hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    save_checkpoint(folder / "raw", random_model(config), config)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder / "raw")
    model, _ = smoe_mlx.load(folder / "raw", slots=1.0)
    with Recorder(model) as recorder:
        list(force(model, random_tokens(12), window=12))
    recorder.trace().save(folder / "trace.npz")
    made = {"vault": folder / "vault", "raw": folder / "raw", "trace": folder / "trace.npz"}
    return made | {"demo": DEMO, "text": ROOT / "docs" / "decode.md"}


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "benchmarks").glob("*.py")))
def test_benchmark(name, places, tmp_path):
    arguments = [x.format(**places, new=tmp_path / "new") for x in ARGUMENTS[name].split()]
    out = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *arguments],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr + out.stdout
    assert out.stdout.strip()


# ---- routing by a trace --------------------------------------------------------------------------

LAYERS, EXPERTS, TOP_K, LENGTH = 2, 4, 2, 30  # of the trace; the model has 5 layers of 8 experts


@pytest.fixture(scope="module")
def decode_py():
    spec = importlib.util.spec_from_file_location("decode", ROOT / "benchmarks" / "decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory):
    config = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 5}
    folder = tmp_path_factory.mktemp("five") / "model"
    return save_checkpoint(folder, random_model(config), config)


def trace_with(predict, folder: Path) -> tuple[np.ndarray, np.ndarray, Path]:
    """A file of random routing, of which `predict(ids)` was said; both [LENGTH, LAYERS, TOP_K]."""
    draw = np.random.default_rng(0)
    ids = draw.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (LENGTH, LAYERS, 1)), axis=-1)
    ids = ids[..., :TOP_K]
    predicted = np.where(np.arange(LAYERS)[:, None] > 0, predict(ids), -1).astype(np.int32)
    trace = Trace(
        "t", (EXPERTS,) * LAYERS, (TOP_K,) * LAYERS, (1,) * LAYERS, (0,) * LAYERS, LENGTH, 0, 0,
        calls=np.array([(i, 1) for i in range(LAYERS)] * LENGTH, np.int32),
        ids=ids.ravel(), predicted=predicted.ravel(),
    )  # fmt: skip
    trace.save(folder / "trace.npz")
    return ids, predicted, folder / "trace.npz"


@pytest.mark.parametrize("mode", ["exact", "token"])
@pytest.mark.parametrize("right", [True, False])
def test_what_a_trace_says_was_predicted_is_read_ahead(
    mode, right, decode_py, five_layers, tmp_path, slow_disk
):
    ids, predicted, path = trace_with(lambda x: x if right else EXPERTS - 1 - x, tmp_path)
    config = smoe_mlx.StreamingConfig(slots=12, decode=mode, debug=True)
    model, _ = load_model(five_layers, config=config)
    cache, decoding = model._streaming.cache, model._streaming.decoding
    now, ahead, needed = {"tokens": 0}, set(), set()

    def note(name, to):
        method = getattr(cache, name)

        def noted(layer, experts, *rest, **options):
            to.update((now["tokens"], layer, e) for e in experts)
            return method(layer, experts, *rest, **options)

        setattr(cache, name, noted)

    reference, also_now = resident(five_layers), {"tokens": 0}
    decode_py.route_by_trace(model, path, now)
    decoding.optimistic.ready(model)  # a self-test, in which a prompt goes its own ways
    for name, to in (("prefetch", ahead), ("claim_few", needed), ("saw", needed)):
        note(name, to)
    decode_py.route_by_trace(reference, path, also_now)
    caches = make_prompt_cache(model), make_prompt_cache(reference)
    for token in random_tokens(2 * LENGTH):
        now["tokens"] += 1
        also_now["tokens"] += 1
        x = mx.array([[token]])
        y = decoding.step(model, x, caches[0])
        assert same_bits(y, reference(x, cache=caches[1]))
    assert decoding.tokens[mode] == 2 * LENGTH

    assert {layer for _, layer, _ in ahead} == {1, 3}, "nothing is said of the trace's first layer"
    for which, said in ((ahead, predicted), (needed, ids)):
        for token, layer, e in which:
            at = (token + 997 * (layer // LAYERS)) % LENGTH
            assert e // 2 in said[at, layer % LAYERS], "an expert of the trace stands for two"
    bets = smoe_mlx.stats(model).bets
    assert bets.issued > 20
    if right:
        assert needed.issuperset(ahead)
        assert bets.used + bets.late > 20
    assert bool(bets.wasted + bets.cancelled) == (not right)
