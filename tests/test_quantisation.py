"""Every quantisation that mlx-lm loads streams, bit for bit, also when it differs from one
projection or layer to the next."""

import json

import mlx.core as mx
import mlx_lm.utils
import pytest
from conftest import CONFIGS, random_model, random_tokens, resident, same_bits, save_checkpoint
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

import smoe_mlx
from smoe_mlx.load import load_model

MODES = [
    *(("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)),
    ("affine", 4, 128),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]


def assert_streams_exactly(folder, slots=0.4):
    tokens = mx.array([random_tokens(70)])
    expected = resident(folder)(tokens)
    model, _ = load_model(folder, config=smoe_mlx.StreamingConfig(slots=slots, debug=True))
    assert same_bits(expected, model(tokens))
    return model


@pytest.mark.parametrize(("mode", "bits", "group_size"), MODES)
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_modes(arch, mode, bits, group_size, tmp_path):
    """SwiGLU, clipped SwiGLU with expert biases, and fc1/fc2."""
    config = dict(CONFIGS[arch])
    if arch == "qwen3_moe":
        config["moe_intermediate_size"] = 128
    model = random_model(config)
    experts_only = lambda path, m: (  # noqa: E731
        {"group_size": group_size, "bits": bits, "mode": mode}
        if isinstance(m, SwitchLinear) and m.input_dims % group_size == 0
        else False
    )
    model, config = mlx_lm.utils.quantize_model(
        model, config, group_size, bits, mode=mode, quant_predicate=experts_only
    )
    if not any(isinstance(m, QuantizedSwitchLinear) for _, m in model.named_modules()):
        pytest.skip(f"the tiny {arch} has no expert dimension divisible by {group_size}")
    streamed = assert_streams_exactly(save_checkpoint(tmp_path / "m", model, config))
    kinds = {t.kind for x in streamed._streaming.cache.layouts for t in x.tensors}
    assert "scales" in kinds
    assert ("biases" in kinds) == (mode == "affine")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_scales_and_activations_in_any_dtype(dtype, tmp_path):
    config = dict(CONFIGS["qwen3_moe"])
    model, config = mlx_lm.utils.quantize_model(random_model(config, dtype), config, 64, 4)
    assert_streams_exactly(save_checkpoint(tmp_path / "m", model, config))


def test_bits_may_differ_by_projection_and_layer(tmp_path):
    config = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 3}

    def mixed(path, module):
        layer = int(path.split(".")[2]) if path.startswith("model.layers.") else -1
        if path.endswith("down_proj"):
            return {"group_size": 32, "bits": 8, "mode": "affine"}
        if layer == 1 and path.endswith("up_proj"):
            return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        if layer == 2 and "switch_mlp" in path:
            return False  # this layer's gate and up stay unquantised
        return {"group_size": 64, "bits": 3, "mode": "affine"}

    model, config = mlx_lm.utils.quantize_model(
        random_model(config), config, 64, 3, quant_predicate=mixed
    )
    streamed = assert_streams_exactly(save_checkpoint(tmp_path / "m", model, config))
    assert len(streamed._streaming.plan.banks) == 3  # three geometries, three banks


def test_global_scale_is_streamed_or_refused_by_the_backend_alone(tmp_path):
    """nvfp4 with a scale an expert: MLX computes it on a GPU only. Its bytes are found anyway."""
    config = dict(CONFIGS["qwen3_moe"])
    model = random_model(config)
    for _, m in model.named_modules():
        if hasattr(m, "switch_mlp"):
            for name in ("gate_proj", "up_proj", "down_proj"):
                m.switch_mlp[name] = m.switch_mlp[name].to_quantized(
                    16, 4, mode="nvfp4", global_scale=True
                )
    config["quantization"] = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    folder = save_checkpoint(tmp_path / "m", model, config)
    streamed, _ = load_model(folder, config=smoe_mlx.StreamingConfig(slots=0.5))
    cache = streamed._streaming.cache
    specs = {t.name: t for t in cache.layouts[0].tensors}
    assert specs["up_proj.global_scale"].shape == ()
    cache.claim(0, [1, 5])
    slot = int(cache.table(0)[5])
    got = cache.arrays(0)["up_proj", "global_scale"][slot : slot + 1]
    assert same_bits(got, model.model.layers[0].mlp.switch_mlp.up_proj.global_scale[5:6])
    with pytest.raises(ValueError, match="only supported on the GPU"):
        mx.eval(streamed(mx.array([[1, 2]])))


def test_a_listed_quantisation_that_the_tensors_contradict_is_refused(tiny, tmp_path):
    import shutil

    folder = shutil.copytree(tiny("qwen3_moe", "affine"), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    path = "model.layers.0.mlp.switch_mlp.up_proj"
    config["quantization"][path] = {"group_size": 64, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(smoe_mlx.CheckpointError, match=path):
        smoe_mlx.plan(folder, slots=0.5)
