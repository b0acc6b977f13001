"""Make an MLX checkpoint of a given Mixture-of-Experts shape with random weights.

    python benchmarks/make_checkpoint.py --preset mid --out /tmp/bench/mid

The files are what `mlx_lm.convert -q` writes for a Qwen3-MoE model: shards, index, config with
its quantisation, 8-bit routers. They are written a few megabytes at a time, so that a checkpoint
of any size needs no memory. The weights have the spread that a layer of that width should have:
the forward is numerically sane, the text that comes out is noise, and experts are used evenly.

With `--sparse` the files have their full length but no data: for timing a load, not a forward.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

CHUNK_NBYTES = 16 << 20
ITEMSIZE = {"U32": 4, "F32": 4, "BF16": 2}
DTYPES = {"float32": "F32", "bfloat16": "BF16"}
ROUTER_BITS, ROUTER_GROUP = 8, 64  # as mlx-lm converts them


@dataclass(frozen=True)
class Shape:
    """A Qwen3-MoE model, every layer of it a MoE layer."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int = 8192
    bits: int = 4
    group_size: int = 64
    dtype: str = "bfloat16"
    sparse: bool = False


PRESETS = {
    "tiny": Shape(4, 16, 4, 256, 64, 4, 2, 64, dtype="float32"),
    "mid": Shape(16, 128, 4, 1024, 512, 8, 2, 128, dtype="float32"),
    "qwen3-30b-sparse": Shape(48, 128, 8, 2048, 768, 32, 4, 128, vocab=151936, sparse=True),
    "qwen3-30b-12l": Shape(12, 128, 8, 2048, 768, 32, 4, 128, vocab=151936),
    "qwen3-235b-sparse": Shape(94, 128, 8, 4096, 1536, 64, 4, 128, vocab=151936, sparse=True),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint; `spread` is the standard deviation of the weights it is for."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: int = 0  # of the quantised weights; 0: a norm
    spread: float = 1.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def linear(
    name: str, shape: Shape, *dims: int, bits: int = 0, group: int = 0, spread: float = 0.0
) -> Iterator[Tensor]:
    """The three tensors of an affinely quantised map [..., O, I]."""
    bits, group = bits or shape.bits, group or shape.group_size
    *outer, width = dims
    if width % group or width * bits % 32:
        sys.exit(f"{name}: {width} inputs do not fit groups of {group} at {bits} bits")
    spread = spread or 1 / math.sqrt(width)
    yield Tensor(f"{name}.weight", "U32", (*outer, width * bits // 32), bits, spread)
    for kind in ("scales", "biases"):
        yield Tensor(f"{name}.{kind}", DTYPES[shape.dtype], (*outer, width // group), bits, spread)


def layer_tensors(s: Shape, i: int) -> Iterator[Tensor]:
    """What layer `i` consists of."""
    at = f"model.layers.{i}"
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    yield from linear(f"{at}.self_attn.q_proj", s, queries, s.hidden)
    yield from linear(f"{at}.self_attn.k_proj", s, keys, s.hidden)
    yield from linear(f"{at}.self_attn.v_proj", s, keys, s.hidden)
    yield from linear(f"{at}.self_attn.o_proj", s, s.hidden, queries)
    norms = {"input_layernorm": s.hidden, "post_attention_layernorm": s.hidden}
    norms |= {"self_attn.q_norm": s.head_dim, "self_attn.k_norm": s.head_dim}
    for name, width in norms.items():
        yield Tensor(f"{at}.{name}.weight", DTYPES[s.dtype], (width,))
    yield from linear(
        f"{at}.mlp.gate", s, s.experts, s.hidden, bits=ROUTER_BITS, group=ROUTER_GROUP
    )
    yield from linear(f"{at}.mlp.switch_mlp.gate_proj", s, s.experts, s.ffn, s.hidden)
    yield from linear(f"{at}.mlp.switch_mlp.up_proj", s, s.experts, s.ffn, s.hidden)
    yield from linear(f"{at}.mlp.switch_mlp.down_proj", s, s.experts, s.hidden, s.ffn)


def shards(s: Shape, shard_nbytes: int) -> list[list[Tensor]]:
    """All tensors, a new shard before the layer that would make one larger than `shard_nbytes`."""
    parts = [list(linear("model.embed_tokens", s, s.vocab, s.hidden, spread=1.0))]
    parts += [list(layer_tensors(s, i)) for i in range(s.layers)]
    head = [Tensor("model.norm.weight", DTYPES[s.dtype], (s.hidden,))]
    parts.append([*head, *linear("lm_head", s, s.vocab, s.hidden)])
    out: list[list[Tensor]] = [[]]
    for part in parts:
        if out[-1] and sum(t.nbytes for t in out[-1] + part) > shard_nbytes:
            out.append([])
        out[-1] += part
    return out


def narrowed(values: np.ndarray, dtype: str) -> bytes:
    """float32 values as the bytes of `dtype` (bfloat16 by cutting)."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.tobytes()


def content(t: Tensor, seed: int) -> Iterator[bytes]:
    """The bytes of a tensor, in pieces.

    Quantised weights are scale * q + bias with q any number of `bits` bits: with bias at minus
    half the range, they have mean 0. The scales vary by a tenth; the biases follow them, which
    takes the same random numbers twice.
    """
    module, _, kind = t.name.rpartition(".")
    name = f"{module}.scales" if kind == "biases" else t.name
    rng = np.random.default_rng([seed, *name.encode()])
    top = (1 << t.bits) - 1
    left = math.prod(t.shape)
    while left:
        n = min(left, CHUNK_NBYTES // 4)
        left -= n
        if t.dtype == "U32":
            yield rng.integers(0, 1 << 32, n, np.uint32).tobytes()
        elif not t.bits:
            yield narrowed(np.ones(n), t.dtype)
        else:
            scales = t.spread * math.sqrt(12 / (top * (top + 2))) * rng.uniform(0.9, 1.1, n)
            yield narrowed(scales * (-top / 2) if kind == "biases" else scales, t.dtype)


def write_shard(path: Path, tensors: list[Tensor], seed: int, sparse: bool) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for t in tensors:
        entry = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.nbytes]}
        header[t.name] = entry
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            f.truncate(8 + len(text) + at)
            return
        for t in tensors:
            for piece in content(t, seed):
                f.write(piece)


def config_of(s: Shape) -> dict[str, object]:
    quantization: dict[str, object] = {
        "group_size": s.group_size,
        "bits": s.bits,
        "mode": "affine",
    }
    for i in range(s.layers):
        quantization[f"model.layers.{i}.mlp.gate"] = {
            "group_size": ROUTER_GROUP,
            "bits": ROUTER_BITS,
        }
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 0,
        "decoder_sparse_step": 1,
        "eos_token_id": 0,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": 4 * s.ffn,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": s.ffn,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.kv_heads,
        "quantization": quantization,
        "quantization_config": quantization,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": s.dtype,
        "vocab_size": s.vocab,
    }


def make(s: Shape, out: Path, tokenizer: Path, shard_nbytes: int, seed: int) -> int:
    """Write the checkpoint; returns the bytes of its tensors."""
    files = sorted(tokenizer.glob("tokenizer*.json"))
    if not files:
        sys.exit(f"{tokenizer}: no tokenizer*.json here; name a folder with --tokenizer")
    out.mkdir(parents=True, exist_ok=True)
    if old := sorted(out.glob("model*.safetensors")):
        sys.exit(f"{old[0]} is there already; name another folder")
    parts = shards(s, shard_nbytes)
    weight_map, total = {}, 0
    for i, tensors in enumerate(parts, start=1):
        name = f"model-{i:05}-of-{len(parts):05}.safetensors"
        write_shard(out / name, tensors, seed, s.sparse)
        weight_map |= {t.name: name for t in tensors}
        total += sum(t.nbytes for t in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config_of(s), indent=2))
    for file in files:
        shutil.copyfile(file, out / file.name)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    demo = Path(__file__).resolve().parents[1] / "src/smoe_mlx/demo"
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--tokenizer", type=Path, default=demo, help="folder to copy it from")
    parser.add_argument("--shard-mb", type=int, default=1000, help="largest shard, in MB")
    parser.add_argument("--seed", type=int, default=0)
    group = parser.add_argument_group("instead of the preset's values")
    for name in ("layers", "experts", "top-k", "hidden", "ffn", "heads", "kv-heads", "head-dim"):
        group.add_argument(f"--{name}", type=int)
    for name in ("vocab", "bits", "group-size"):
        group.add_argument(f"--{name}", type=int)
    group.add_argument("--dtype", choices=DTYPES, help="of scales, biases and norms")
    group.add_argument("--sparse", action="store_true", default=None, help="headers only")
    args = parser.parse_args()
    given = {k: v for k, v in vars(args).items() if k in Shape.__dataclass_fields__}
    shape = replace(PRESETS[args.preset], **{k: v for k, v in given.items() if v is not None})
    total = make(shape, args.out, args.tokenizer, args.shard_mb * 10**6, args.seed)
    on_disk = sum(f.stat().st_blocks * 512 for f in args.out.iterdir())
    print(f"{args.out}: {total / 1e9:.3f} GB of tensors, {on_disk / 1e9:.3f} GB on disk")


if __name__ == "__main__":
    main()
