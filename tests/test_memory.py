"""A model stays in the memory it was given: measured in a fresh process, load to last token."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from conftest import CONFIGS, random_model, random_tokens, resident, save_checkpoint
from mlx.utils import tree_flatten
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

import smoe_mlx
from smoe_mlx.config import parse_bytes

DEMO = Path(smoe_mlx.__file__).parent / "demo"

# Runs a prompt as long as the planned context and some tokens, and reports what it took. "Over the
# interpreter's own": what the process holds after all imports and a first MLX computation.
SCRIPT = """
import gc, json, resource, sys
import mlx.core as mx
import smoe_mlx
from smoe_mlx.generate import generate_step

def resident_set():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

folder, options = sys.argv[1], json.loads(sys.argv[2])
from mlx_lm.utils import load_tokenizer
from pathlib import Path
load_tokenizer(Path(folder))
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
gc.collect()
peak_is_known = sys.platform == "linux"
before = resident_set() if peak_is_known else 0
mx.reset_peak_memory()
config = smoe_mlx.StreamingConfig(**options)
model, tokenizer = smoe_mlx.load(folder, config=config)
prompt = mx.array([(i * 37) % 500 for i in range(config.context - 8)])
for token, _ in generate_step(prompt, model, max_tokens=8):
    pass
s = smoe_mlx.stats(model)
print(json.dumps({
    "plan": s.plan.total, "peak": mx.get_peak_memory(),
    "slots": s.plan.slots, "misses": s.misses, "passes": s.prefill_passes,
    "rss": resident_set() - before if peak_is_known else None,
}))
"""


def run(folder: Path, **options: object) -> dict:
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), json.dumps(options)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.parametrize("budget", ["smallest", "useful", "25MB", "quarter", "34MB", "everything"])
def test_peak_memory_stays_within_the_plan(budget):
    plan = smoe_mlx.plan(DEMO, slots=0.25)
    memory = {
        "smallest": plan.minimum,
        "useful": plan.useful,
        "quarter": plan.minimum + plan.experts_nbytes // 4,
        "everything": plan.full,
    }.get(budget, budget)
    got = run(DEMO, memory=memory, context=1024)
    assert got["plan"] <= parse_bytes(memory)
    assert got["peak"] <= 1.02 * got["plan"]
    assert got["misses"] > 0 or budget == "everything"
    # The prompt goes layer by layer in as many chunks at once as the plan says.
    told = smoe_mlx.plan(DEMO, config=smoe_mlx.StreamingConfig(memory=memory, context=1024))
    assert (told.prompt_states > 0) == (budget == "34MB")
    assert got["passes"] == (budget != "everything") * -(-1015 // told.prefill_tokens)
    if got["rss"] is not None:
        assert got["rss"] <= got["plan"] + 150_000_000


def test_the_plan_is_no_empty_promise():
    """The negative control: a plan that forgot the slots or the activations would be exceeded."""
    plan = smoe_mlx.plan(DEMO, slots=1.0)
    got = run(DEMO, memory=plan.total, context=1024)
    assert got["peak"] > got["plan"] - plan.slots_nbytes
    assert got["peak"] > 0.6 * got["plan"]


def cache_nbytes(cache) -> int:
    return sum(
        a.nbytes
        for c in cache
        for part in getattr(c, "caches", [c])
        for _, a in tree_flatten(vars(part))
        if isinstance(a, mx.array)
    )


# Full attention, sliding windows, latent attention, recurrent states, several caches a layer.
CACHE_KINDS = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "longcat_flash", "jamba"]


@pytest.mark.parametrize("context", [7, 300])
@pytest.mark.parametrize("arch", CACHE_KINDS)
def test_the_planned_kv_cache_is_what_there_is_in_the_end(arch, context, tiny):
    model = resident(tiny(arch))
    cache = make_prompt_cache(model)
    tokens = random_tokens(context)
    mx.eval(model(mx.array([tokens[:-1]]), cache=cache))
    mx.eval(model(mx.array([tokens[-1:]]), cache=cache))
    config = smoe_mlx.StreamingConfig(slots=1.0, context=context)
    planned = smoe_mlx.plan(tiny(arch), config=config).kv_cache
    spare = 0
    if arch == "gpt_oss":  # a window of 16 is planned like any cache, in steps of 256
        spare = (256 - 16) * 2 * 2 * 32 * 4  # keys and values, 2 heads of 32 float32
    assert cache_nbytes(cache) == pytest.approx(planned - spare, rel=0.02)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek"])
def test_a_quantised_kv_cache_is_planned_at_its_most(arch, bits, tiny):
    start, context = 256, 2000
    model = resident(tiny(arch, "affine"))
    cache = make_prompt_cache(model)
    options = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    most = 0
    for chunk in range(0, context, 250):
        mx.eval(model(mx.array([random_tokens(250)]), cache=cache))
        before = cache_nbytes(cache) if chunk < start <= chunk + 250 else 0
        maybe_quantize_kv_cache(cache, start, 32, bits)
        most = max(most, before + cache_nbytes(cache))

    def planned(**options) -> int:
        config = smoe_mlx.StreamingConfig(slots=1.0, context=context, prefill_step=250, **options)
        return smoe_mlx.plan(tiny(arch, "affine"), config=config).kv_cache

    assert most == pytest.approx(planned(**options), rel=0.05)
    assert planned(**options) < 0.5 * planned()
    assert planned(**{**options, "quantized_kv_start": context}) == planned()


# Tiny models that 16,384 tokens pass in seconds: one head, and attention of each kind in a layer
# that is not the last, whose attention only the last token needs.
LONG = {
    "full": ("qwen3_moe", {"num_hidden_layers": 2}),
    "sliding": ("mellum", {"num_hidden_layers": 3, "hidden_size": 512,
                           "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}),
    "full with sinks": ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"]}),
    "MLA": ("deepseek_v3", {"num_hidden_layers": 2, "n_group": 1, "first_k_dense_replace": 0}),
    "linear": ("qwen3_next", {"num_hidden_layers": 2, "linear_key_head_dim": 128,
                              "linear_num_key_heads": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def long_winded(tmp_path_factory):
    def make(kind: str) -> Path:
        arch, changes = LONG[kind]
        one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}
        config = copy.deepcopy(CONFIGS[arch]) | one_head | changes
        folder = tmp_path_factory.mktemp("long") / "model"
        save_checkpoint(folder, random_model(config), config)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, folder)
        return folder

    return make


def test_peak_memory_of_a_long_prompt_stays_within_the_plan(long_winded):
    """Its hidden states are in the plan."""
    folder, options = long_winded("sliding"), {"context": 16_384, "prefill_step": 512}
    plan = smoe_mlx.plan(folder, config=smoe_mlx.StreamingConfig(slots=0.5, **options))
    got = run(folder, slots=0.5, **options)
    assert got["passes"] == 1
    assert got["misses"] > 0
    assert plan.total - plan.prompt_states < got["peak"] <= got["plan"] == plan.total


@pytest.mark.parametrize("kind", sorted(LONG.keys() - {"sliding"}))
def test_peak_memory_of_a_long_prompt_with_little_room_stays_within_the_plan(kind, long_winded):
    """No room is left for its hidden states, so that it goes in passes, and none by mistake."""
    folder, options = long_winded(kind), {"context": 16_384, "prefill_step": 512}
    plan = smoe_mlx.plan(folder, config=smoe_mlx.StreamingConfig(slots=0.5, **options))
    got = run(folder, memory=plan.total - plan.prompt_states, **options)
    assert got["plan"] <= plan.total - plan.prompt_states
    assert got["passes"] > 1
    assert got["misses"] > 0
    assert 0.7 * got["plan"] < got["peak"] <= got["plan"]


def test_a_235b_skeleton_fits_into_little(tmp_path):
    """The shape of Qwen3-235B-A22B in sparse files: 125 GB of experts that nothing may touch."""
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    script = [sys.executable, str(benchmarks / "make_checkpoint.py")]
    folder = tmp_path / "big"
    subprocess.run([*script, "--preset", "qwen3-235b-sparse", "--out", str(folder)], check=True)
    code = (benchmarks / "load.py").read_text().split('"""')[3]  # what each of its runs does
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder), "8", "1"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    got = json.loads(out.stdout)
    assert got["experts"] == 94 * 128
    assert got["bytes"] > 100e9
    assert got["rss"] < 200e6
    assert got["mlx"] < 1e6
