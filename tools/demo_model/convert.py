"""Quantise the raw checkpoint with mlx-lm: 4 bit, group 64, scales, biases and norms in float32.

    python convert.py SRC DST

SRC is the folder that `export.py` wrote.  The weights are cast to float32 before they are
quantised: MLX's CPU kernels compute in the type of the scales and are several times faster in
float32 than in bfloat16.  The routers get 8 bits, as mlx-lm's own conversion gives them.  The same
SRC and the same versions of MLX and mlx-lm make the same bytes.  Other files in DST, the card for
example, are left alone and count for the size limit.
"""

import argparse
import json
import pathlib
import sys

import mlx.core as mx
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

BITS, GROUP = 4, 64
ROUTER = {"bits": 8, "group_size": 64}
LIMIT = 20_000_000  # bytes of the whole folder
JSON_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


def predicate(table_group, attention_bits):
    """How each layer is quantised; `table_group` is for the input and output embeddings."""

    def choose(path, module):
        if path.endswith("mlp.gate"):
            return dict(ROUTER)
        if path in ("model.embed_tokens", "lm_head") and table_group != GROUP:
            return {"bits": BITS, "group_size": table_group}
        if ".self_attn." in path and attention_bits != BITS:
            return {"bits": attention_bits, "group_size": GROUP}
        return True

    return choose


def copy_json(source, target):
    """The same JSON without its white space, which is more than half of tokenizer.json."""
    value = json.loads(source.read_text(encoding="utf-8"))
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    target.write_text(text + "\n", encoding="utf-8")


def convert(src, dst, table_group=GROUP, attention_bits=BITS):
    model, config = load_model(src, lazy=True)
    model.set_dtype(mx.float32)
    config["torch_dtype"] = "float32"
    choose = predicate(table_group, attention_bits)
    model, config = quantize_model(
        model, config, GROUP, BITS, mode="affine", quant_predicate=choose
    )
    save_model(dst, model)
    save_config(config, dst / "config.json")
    for name in JSON_FILES:
        copy_json(src / name, dst / name)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("src", type=pathlib.Path)
    parser.add_argument("dst", type=pathlib.Path)
    parser.add_argument(
        "--table-group",
        type=int,
        default=GROUP,
        choices=[32, 64, 128],
        help="group size of embed_tokens and lm_head",
    )
    parser.add_argument(
        "--attention-bits",
        type=int,
        default=BITS,
        choices=[4, 5, 6, 8],
        help="bits of the attention's matrices",
    )
    args = parser.parse_args()
    convert(args.src, args.dst, args.table_group, args.attention_bits)
    sizes = {p.name: p.stat().st_size for p in sorted(args.dst.iterdir()) if p.is_file()}
    for name, size in sizes.items():
        print(f"{size:>10,}  {name}")
    total = sum(sizes.values())
    print(f"{total:>10,}  bytes in all")
    if total > LIMIT:
        sys.exit(f"more than {LIMIT:,} bytes")


if __name__ == "__main__":
    main()
