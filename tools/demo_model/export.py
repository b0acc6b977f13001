"""Write the trained weights as a raw Hugging Face Qwen3-MoE checkpoint.

python export.py --weights final.pt [more parts] --config RUN/config.json --tokenizer DIR --out DIR
"""

import argparse
import json
import pathlib
import shutil

import torch
from safetensors.torch import save_file

# isort: split
from model import Config

SHARD = 40_000_000  # bytes


def tensors(state):
    """(name, tensor) as published Qwen3-MoE checkpoints name them."""
    for name, value in state.items():
        value = value.bfloat16()
        target = name if name.startswith("lm_head") else f"model.{name}"
        last = name.rsplit(".", 1)[-1]
        if last in ("gate_proj", "up_proj", "down_proj"):  # [experts, in, out]
            prefix = target.rsplit(".", 1)[0]
            for expert, matrix in enumerate(value):
                yield f"{prefix}.experts.{expert}.{last}.weight", matrix.T.contiguous()
        else:
            yield target, value.contiguous()


def order(name):
    parts = name.split(".")
    return [int(p) if p.isdigit() else p for p in parts] if "layers" in parts else parts


def model_config(c):
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "decoder_sparse_step": 1,
        "eos_token_id": 0,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.moe_intermediate_size * c.num_experts_per_tok,
        "max_position_embeddings": c.max_position_embeddings,
        "max_window_layers": c.num_hidden_layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": c.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": c.num_attention_heads,
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "output_router_logits": False,
        "pad_token_id": 0,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope_theta,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": c.vocab_size,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    state = {}
    for path in args.weights:
        state.update(torch.load(path, map_location="cpu", weights_only=True))
    named = dict(sorted(tensors(state), key=lambda kv: [str(p).zfill(4) for p in order(kv[0])]))

    total = sum(v.numel() * 2 for v in named.values())
    even = total / -(-total // SHARD)  # shards of about one size
    shards, size = [{}], 0
    for name, value in named.items():
        n = value.numel() * 2
        if size >= even:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += n
    args.out.mkdir(parents=True, exist_ok=True)
    index = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, args.out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))

    def write(name, value):
        (args.out / name).write_text(json.dumps(value, indent=2) + "\n")

    write(
        "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))},
    )
    write("config.json", model_config(Config.load(args.config)))
    write(
        "generation_config.json",
        {
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 0.95,
        },
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, args.out / name)
    print(len(named), "tensors,", total, "bytes,", len(shards), "files")


if __name__ == "__main__":
    main()
