"""What loads, what is refused and in which words, and that loading reads no expert."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from conftest import (
    CONFIGS,
    layouts_of,
    make_checkpoint,
    random_model,
    random_tokens,
    resident,
    same_bits,
    save_checkpoint,
)
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

import smoe_mlx
from smoe_mlx.generate import generate_step
from smoe_mlx.hub import find_model
from smoe_mlx.load import load_model

HALF = smoe_mlx.StreamingConfig(slots=0.5, debug=True)


def load_half(folder, **kwargs):
    return load_model(Path(folder), config=HALF, **kwargs)[0]


def assert_exact(folder, **kwargs):
    tokens = mx.array([random_tokens(70)])
    assert same_bits(resident(folder)(tokens), load_half(folder, **kwargs)(tokens))


# ---- layouts -------------------------------------------------------------------------------------


def per_expert(weights: dict, names: dict[str, str], block: str = "mlp") -> dict:
    """Unstack `switch_mlp.<proj>` tensors to `experts.<e>.<name>`, as raw checkpoints have them."""
    out = {}
    for k, v in weights.items():
        stem, _, rest = k.partition(f".{block}.switch_mlp.")
        if not rest:
            out[k] = v
            continue
        proj, kind = rest.split(".")
        for e in range(v.shape[0]):
            out[f"{stem}.{block}.experts.{e}.{names[proj]}.{kind}"] = mx.array(v[e])
    return out


SAME = {p: p for p in ("gate_proj", "up_proj", "down_proj")}
W123 = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@pytest.mark.parametrize(
    ("arch", "names", "block"),
    [
        ("qwen3_moe", SAME, "mlp"),
        ("deepseek_v2", SAME, "mlp"),
        ("glm4_moe", SAME, "mlp"),
        ("mixtral", W123, "block_sparse_moe"),
        ("phimoe", W123, "block_sparse_moe"),
    ],
)
def test_raw_checkpoints_with_a_tensor_an_expert(arch, names, block, tmp_path):
    """Hugging Face's own layout streams without conversion; shards split layers at random."""
    config = dict(CONFIGS[arch])
    weights = per_expert(dict(tree_flatten(random_model(config).parameters())), names, block)
    folder = tmp_path / "raw"
    folder.mkdir()
    shards = {f"model-{i:05d}-of-00003.safetensors": {} for i in range(1, 4)}
    for i, (k, v) in enumerate(weights.items()):
        list(shards.values())[i % 3][k] = v
    for name, part in shards.items():
        mx.save_safetensors(str(folder / name), part)
    index = {"weight_map": {k: name for name, part in shards.items() for k in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    assert_exact(folder)
    layout = layouts_of(folder)[0]
    assert len(set(layout.file_ids.ravel().tolist())) == 3


def test_a_prefix_that_sanitize_takes_off(tiny, tmp_path):
    """A text model saved inside a multimodal checkpoint."""
    folder = shutil.copytree(tiny("qwen3_vl_moe", "affine"), tmp_path / "m")
    assert_exact(folder)
    names = {n for s in layouts_of(folder) for n in [s.path]}
    assert all(n.startswith("language_model.") for n in names)


def test_shards_without_an_index(tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    weights = mx.load(str(folder / "model.safetensors"))
    for i in range(2):
        part = {k: v for j, (k, v) in enumerate(weights.items()) if j % 2 == i}
        mx.save_safetensors(str(folder / f"model-{i}.safetensors"), part)
    (folder / "model.safetensors").unlink()
    assert_exact(folder)


def test_layers_are_numbered_in_their_order(tmp_path):
    config = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 12}
    folder = save_checkpoint(tmp_path / "m", random_model(config), config)
    paths = [x.path for x in layouts_of(folder)]
    assert paths == [f"model.layers.{i}.mlp.switch_mlp" for i in range(12)]


def test_per_layer_expert_shapes_and_top_k(tmp_path):
    config = {
        **CONFIGS["hunyuan"],
        "num_hidden_layers": 2,
        "moe_topk": [1, 3],
        "moe_intermediate_size": [64, 96],
    }
    folder = save_checkpoint(tmp_path / "m", random_model(config), config)
    assert_exact(folder)
    plan = smoe_mlx.plan(folder, slots=0.5)
    assert len(plan.banks) == 2
    assert plan.expert_reads == 4


def test_a_child_that_the_model_hung_on_its_experts(tmp_path):
    """As muse_spark does: its block reads `self.experts.post_expert_norm`. Also remote code."""
    code = """
import mlx.nn as nn
from mlx_lm.models import qwen3_moe
from mlx_lm.models.qwen3_moe import ModelArgs

class Model(qwen3_moe.Model):
    def __init__(self, args):
        super().__init__(args)
        for layer in self.layers:
            layer.mlp.switch_mlp.post_expert_norm = nn.RMSNorm(args.hidden_size)
            layer.mlp.__class__ = Block

class Block(qwen3_moe.Qwen3MoeSparseMoeBlock):
    def __call__(self, x):
        return self.switch_mlp.post_expert_norm(super().__call__(x))
"""
    config = {**CONFIGS["qwen3_moe"], "model_file": "my_model.py"}
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "my_model.py").write_text(code)
    (folder / "config.json").write_text(json.dumps(config))
    namespace: dict = {}
    exec(code, namespace)
    model = namespace["Model"](namespace["ModelArgs"].from_dict(config))
    model.set_dtype(mx.float32)
    norms = [layer.mlp.switch_mlp.post_expert_norm for layer in model.layers]
    for i, norm in enumerate(norms):
        norm.weight = mx.random.normal(norm.weight.shape) + i
    mlx_lm.utils.save_model(folder, model)

    tokens = mx.array([random_tokens(70)])
    reference, _ = mlx_lm.utils.load_model(folder, trust_remote_code=True)
    model = load_half(folder, trust_remote_code=True)
    assert same_bits(reference(tokens), model(tokens))
    assert "post_expert_norm" in model.layers[0].mlp.switch_mlp
    with pytest.raises(smoe_mlx.UnsupportedModelError, match="trust_remote_code"):
        load_half(folder)


def test_muse_spark_up_to_where_its_metal_kernels_begin(tmp_path):
    """Its forward needs Metal; its loading, its norm under the experts and its experts do not."""
    text = {
        "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_hidden_layers": 2, "vocab_size": 512, "rms_norm_eps": 1e-5, "post_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000.0}, "layer_rope_theta": [1000.0, 0],
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16,
        "final_logit_softcapping": 30.0, "output_multiplier": 1.0, "num_local_experts": 8,
        "num_experts_per_tok": 2, "moe_hidden_size": 64, "moe_intermediate_size": 64,
    }  # fmt: skip
    config = {"model_type": "muse_spark", "text_config": text}
    reference = random_model(config)
    folder = save_checkpoint(tmp_path / "m", reference, config)
    model = load_half(folder)
    experts = model.model.language_model.layers[1].mlp.experts
    original = reference.model.language_model.layers[1].mlp.experts
    assert isinstance(experts, smoe_mlx.StreamingSwitchGLU)
    assert same_bits(experts.post_expert_norm.weight, original.post_expert_norm.weight)
    x, ids = mx.random.normal((1, 70, 64)), mx.array(np.arange(140).reshape(1, 70, 2) * 5 % 8)
    assert same_bits(experts(x, ids), original(x, ids))


def test_zero_experts_are_not_read(tiny):
    """LongCat's router may choose numbers that are no experts; mlx-lm's block makes them 0."""
    folder = tiny("longcat_flash", "affine")
    model = load_half(folder)
    cache = model._streaming.cache
    chosen: dict[int, set[int]] = {}
    for layer, x in enumerate(cache.layouts):
        switch = model
        for key in x.path.split("."):
            switch = switch[int(key)] if isinstance(switch, list) else switch[key]
        keep = switch.expect
        switch.expect = lambda ids, keep=keep, layer=layer: (
            chosen.setdefault(layer, set()).update(np.array(ids).ravel().tolist()),
            keep(ids),
        )
    tokens = mx.array([random_tokens(2)])
    assert same_bits(resident(folder)(tokens), model(tokens))
    experts = cache.layouts[0].num_experts
    assert any(max(ids) >= experts for ids in chosen.values())  # zero experts did occur
    for layer, ids in chosen.items():
        real = {i for i in ids if i < experts}
        stats = cache.stats.layers[layer]
        assert stats.hits + stats.misses == max(len(real), 1)


# ---- what load reads and keeps -------------------------------------------------------------------

COUNT_READS = """
import sys
from pathlib import Path
from types import SimpleNamespace
import mlx.core as mx
import smoe_mlx
from smoe_mlx.generate import generate_step
from smoe_mlx.load import load_model
def read_so_far():
    return int(open("/proc/self/io").read().split()[1])
config = smoe_mlx.StreamingConfig(slots=0.5)
load_model(Path(sys.argv[1]), config=config)  # imports done
before = read_so_far()
model, _ = load_model(Path(sys.argv[1]), config=config)
print(read_so_far() - before, smoe_mlx.stats(model).plan.backbone, mx.get_active_memory())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts reads by Linux's /proc")
def test_load_reads_the_backbone_once_and_no_expert(tmp_path):
    config = {**CONFIGS["qwen3_moe"], "num_experts": 64, "moe_intermediate_size": 256}
    folder = save_checkpoint(tmp_path / "m", random_model(config), config)
    experts = sum(x.nbytes for x in layouts_of(folder))
    out = subprocess.run(
        [sys.executable, "-c", COUNT_READS, str(folder)], capture_output=True, text=True, check=True
    )
    read, backbone, active = map(int, out.stdout.split())
    assert backbone <= read < backbone + 200_000 < experts
    assert active < 2 * backbone + 200_000  # two models, no slots allocated yet


def test_the_loaded_model_is_an_ordinary_one(tiny):
    folder = tiny("qwen3_moe", "affine")
    model, reference = load_half(folder), resident(folder)
    assert type(model) is type(reference)
    names = dict(tree_flatten(model.parameters()))
    expected = {k for k, _ in tree_flatten(reference.parameters()) if ".switch_mlp." not in k}
    assert set(names) == expected


def test_two_models_share_nothing(tiny):
    a, b = load_half(tiny("qwen3_moe", "affine")), load_half(tiny("mixtral", "affine"))
    tokens = mx.array([random_tokens(20)])
    mx.eval(a(tokens))
    assert smoe_mlx.stats(a).misses > 0
    assert smoe_mlx.stats(b).misses == 0
    assert smoe_mlx.stats(b).bytes_read == 0


@pytest.mark.parametrize("decode", ["exact", "wait", "lag1", "token"])
def test_freeing_a_model_frees_its_files_and_threads(decode, tiny):
    import gc
    import threading

    folder = tiny("qwen3_moe", "affine")

    def descriptors():
        return len(os.listdir("/dev/fd"))

    load_half(folder)
    gc.collect()
    threads, fds = threading.active_count(), descriptors()
    config = smoe_mlx.StreamingConfig(slots=0.5, decode=decode)
    model = load_model(folder, config=config)[0]
    mx.eval(model(mx.array([random_tokens(70)])))
    list(generate_step(mx.array(random_tokens(9)), model, max_tokens=3))
    assert descriptors() > fds
    del model
    gc.collect()
    assert threading.active_count() <= threads
    assert descriptors() <= fds


# ---- what is refused -----------------------------------------------------------------------------


def refused(folder, error, *words, **kwargs):
    with pytest.raises(error) as e:
        load_half(folder, **kwargs)
    for word in words:
        assert str(word) in str(e.value), str(e.value)


def test_a_dense_model(tmp_path):
    config = {**CONFIGS["qwen3_moe"], "model_type": "qwen3"}
    folder = save_checkpoint(tmp_path / "m", random_model(config), config)
    refused(folder, smoe_mlx.UnsupportedModelError, folder, "dense", "mlx_lm.load")


def test_dbrx(tmp_path):
    folder = make_checkpoint(tmp_path / "m", "dbrx")
    refused(folder, smoe_mlx.UnsupportedModelError, folder, "dbrx", "mlx_lm.load")


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "granitemoe", "gemma4"])
def test_a_raw_fused_layout(arch, tmp_path):
    config = dict(CONFIGS[arch])
    weights = dict(tree_flatten(random_model(config).parameters()))
    raw = {}
    for k, v in weights.items():
        if "gate_proj" in k and v.ndim == 3:
            up = weights[k.replace("gate_proj", "up_proj")]
            fused = mx.concatenate([v, up], axis=1)
            raw[RAW_NAME[arch](k)] = fused
        elif "up_proj" in k and v.ndim == 3:
            continue
        elif "down_proj" in k and v.ndim == 3:
            raw[RAW_NAME[arch](k)] = v
        else:
            raw[k] = v
    folder = tmp_path / "m"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), raw)
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, smoe_mlx.UnsupportedModelError, folder, "smoe-mlx shatter")


def _experts(stem_from, stem_to, gate_up, down):
    return lambda k: (
        k.split(stem_from)[0] + stem_to + (down if "down_proj" in k else gate_up)
    ).replace("language_model.model.", "model.language_model.")


RAW_NAME = {
    "qwen3_5_moe": _experts("switch_mlp", "experts.", "gate_up_proj", "down_proj"),
    "granitemoe": _experts("switch_mlp", "", "input_linear.weight", "output_linear.weight"),
    "gemma4": _experts("switch_glu", "", "gate_up_proj", "down_proj"),
}


def test_an_unknown_architecture(tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen3_moe"), tmp_path / "m")
    config = {**json.loads((folder / "config.json").read_text()), "model_type": "nosuch"}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, smoe_mlx.UnsupportedModelError, "nosuch", folder)


@pytest.mark.parametrize("content", [None, "{", "[]", "null"])
def test_a_bad_config(content, tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen3_moe"), tmp_path / "m")
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    refused(folder, smoe_mlx.CheckpointError, folder, "config.json")


def edit(folder: Path, change) -> None:
    """Rewrite a single-file checkpoint with changed tensors (bf16-free)."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


UP = "model.layers.1.mlp.switch_mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{UP}.weight"), [f"{UP}.weight", "missing"]),
        (lambda t: t.pop(f"{UP}.scales"), [f"{UP}"]),
        (lambda t: t.pop(f"{UP}.biases"), [f"{UP}.biases", "missing"]),
        (lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"][:7]}), [f"{UP}", "7", "8"]),
        (lambda t: t.update({f"{UP}.scales": t[f"{UP}.scales"][:, :5]}), [f"{UP}.scales"]),
        (
            lambda t: t.update({f"{UP}.weight": t[f"{UP}.weight"].astype(np.float32)}),
            [UP, "float32"],
        ),
        (lambda t: t.update({f"{UP}.bias": np.zeros((8, 64), np.float32)}), [f"{UP}.bias"]),
    ],
)
def test_wrong_expert_tensors(change, words, tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / "m")
    edit(folder, change)
    refused(folder, smoe_mlx.CheckpointError, folder, *words)


def test_missing_experts_in_a_raw_checkpoint(tmp_path):
    config = dict(CONFIGS["qwen3_moe"])
    weights = per_expert(dict(tree_flatten(random_model(config).parameters())), SAME)
    del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    folder = tmp_path / "m"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, smoe_mlx.CheckpointError, folder, "layers.1.mlp.experts.5.up_proj")


def test_a_missing_backbone_tensor(tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / "m")
    edit(folder, lambda t: t.pop("model.norm.weight"))
    refused(folder, smoe_mlx.CheckpointError, folder, "model.norm.weight")


def test_experts_in_two_files(tiny, tmp_path):
    folder = shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    refused(folder, smoe_mlx.CheckpointError, "model-2.safetensors", "remove one")


def test_a_switch_layer_with_a_forward_of_its_own(tmp_path):
    code = """
from mlx_lm.models import qwen3_moe
from mlx_lm.models.qwen3_moe import ModelArgs
from mlx_lm.models.switch_layers import SwitchGLU

class Mine(SwitchGLU):
    def __call__(self, x, indices):
        return 2 * super().__call__(x, indices)

class Model(qwen3_moe.Model):
    def __init__(self, args):
        super().__init__(args)
        self.layers[1].mlp.switch_mlp.__class__ = Mine
"""
    config = {**CONFIGS["qwen3_moe"], "model_file": "my_model.py"}
    folder = save_checkpoint(tmp_path / "m", random_model(CONFIGS["qwen3_moe"]), config)
    (folder / "my_model.py").write_text(code)
    refused(folder, smoe_mlx.UnsupportedModelError, "Mine", trust_remote_code=True)


def test_a_model_file_outside_the_folder(tmp_path):
    config = {**CONFIGS["qwen3_moe"], "model_file": "../evil.py"}
    folder = save_checkpoint(tmp_path / "m", random_model(CONFIGS["qwen3_moe"]), config)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    refused(folder, smoe_mlx.CheckpointError, "evil.py", trust_remote_code=True)


def test_adapters_on_experts_are_refused_and_others_work(tiny, tmp_path):
    folder, adapter = tiny("qwen3_moe", "affine"), tmp_path / "adapter"
    adapter.mkdir()
    rank = {"lora_parameters": {"rank": 2, "scale": 10.0, "dropout": 0.0}, "num_layers": 2}
    (adapter / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", **rank}))
    layer = "model.layers.0.self_attn.q_proj"
    weights = {
        f"{layer}.lora_a": np.ones((128, 2), np.float32),
        f"{layer}.lora_b": np.ones((2, 128), np.float32),
    }
    save_file(weights, adapter / "adapters.safetensors")
    tokens = mx.array([random_tokens(5)])
    plain = load_half(folder)(tokens)
    adapted = load_half(folder, adapter_path=str(adapter))(tokens)
    assert not same_bits(plain, adapted)
    weights[f"{UP}.lora_a"] = np.ones((128, 2), np.float32)
    save_file(weights, adapter / "adapters.safetensors")
    refused(folder, smoe_mlx.UnsupportedModelError, UP, "mlx_lm.fuse", adapter_path=str(adapter))


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("/no/such/folder", "./nothing", "nothing", "a/b/c"):
        with pytest.raises(smoe_mlx.ModelNotFoundError, match="no folder"):
            smoe_mlx.load(name)
    (tmp_path / "file").write_text("")
    with pytest.raises(smoe_mlx.ModelNotFoundError, match=r"config\.json"):
        smoe_mlx.load(tmp_path / "file")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("RepositoryNotFoundError", "no such repository"),
        ("GatedRepoError", "gated"),
        ("RevisionNotFoundError", "revision"),
        ("LocalEntryNotFoundError", "cannot be reached"),
    ],
)
def test_hub_errors_in_plain_words(error, words, monkeypatch):
    import huggingface_hub.errors

    kind = getattr(huggingface_hub.errors, error)

    def fail(*args, **kwargs):
        response = SimpleNamespace(headers={}, request=None)
        raise kind("no") if error == "LocalEntryNotFoundError" else kind("no", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(smoe_mlx.ModelNotFoundError, match=words):
        smoe_mlx.load("owner/name", revision="v1")


def test_a_hub_repository_is_fetched_with_only_the_files_needed(tiny, monkeypatch):
    asked = {}

    def snapshot_download(name, revision=None, allow_patterns=None):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(tiny("qwen3_moe", "affine"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    plan = smoe_mlx.plan("owner/name", revision="v1", slots=0.5)
    assert plan.num_experts == 16
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1")
    assert {"model*.safetensors", "experts.smoe"} <= set(asked["patterns"])
    assert "*.bin" not in asked["patterns"]


def test_budgets():
    demo = Path(smoe_mlx.__file__).parent / "demo"
    plan = smoe_mlx.plan(demo, slots=0.25)
    with pytest.raises(smoe_mlx.BudgetError, match="at least"):
        smoe_mlx.plan(demo, memory="1MB")
    assert smoe_mlx.plan(demo, memory=plan.minimum).slots >= 1
    with pytest.raises(smoe_mlx.BudgetError):
        smoe_mlx.plan(demo, memory=plan.minimum - 10_000)
    for bad in (0, -1, 1.5, 0.0, True, "half"):
        with pytest.raises(smoe_mlx.BudgetError):
            smoe_mlx.StreamingConfig(slots=bad)
    for bad in ("", "12XB", "GB", -1, 0, "0GB"):
        with pytest.raises(smoe_mlx.BudgetError):
            smoe_mlx.StreamingConfig(memory=bad)
    with pytest.raises(smoe_mlx.BudgetError, match="not both"):
        smoe_mlx.StreamingConfig(memory="1GB", slots=3)


def test_a_plan_for_more_than_there_is_warns(monkeypatch):
    module = sys.modules["smoe_mlx.load"]
    monkeypatch.setattr(module, "available_nbytes", lambda: 10_000_000)
    with pytest.warns(UserWarning, match="only 10 MB can be had"):
        load_model(find_model("demo"), config=smoe_mlx.StreamingConfig(slots=0.25))

    def cannot_tell():
        raise OSError

    monkeypatch.setattr(module, "available_nbytes", cannot_tell)
    load_model(find_model("demo"), config=smoe_mlx.StreamingConfig(slots=0.25))


def test_loads_leave_no_chain_of_random_keys(tiny):
    """mlx-lm draws initial weights; each draw hangs a key on the one before, a few KB."""
    load_model(tiny("qwen3_moe", "affine"), config=smoe_mlx.StreamingConfig(slots=0.5))
    graph = io.StringIO()
    mx.export_to_dot(graph, *mx.random.state)
    assert "->" not in graph.getvalue()
