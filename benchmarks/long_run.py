"""Decode thousands of tokens with hardly any experts in memory, and compare each with mlx-lm.

    python benchmarks/long_run.py
    python benchmarks/long_run.py --slots 8 --tokens 20000 --decode lag1

The demo model writes a text of its own, greedily, in a window of 512 tokens; the model with all
experts in memory is fed the same tokens. At each step the logits must have the same bits, and at
least one expert must have been evicted. Stops at the first step where that is not so.
"""

import argparse
import sys
import time

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from tqdm import tqdm

import smoe_mlx
from smoe_mlx.hub import find_model

WINDOW = 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder, or demo (the bundled model)")
    parser.add_argument("--slots", type=int, default=1, help="experts in memory, of all layers")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--decode", default="auto", help="StreamingConfig.decode")
    args = parser.parse_args()
    folder = find_model(args.model)
    reference, tokenizer = mlx_lm.load(str(folder))
    config = smoe_mlx.StreamingConfig(slots=args.slots, decode=args.decode)
    model, _ = smoe_mlx.load(folder, config=config)
    caches = [make_prompt_cache(m, max_kv_size=WINDOW) for m in (reference, model)]
    decoding, counts = model._streaming.decoding, model._streaming.cache.stats
    token = tokenizer.encode("The")[-1]
    start = time.perf_counter()
    # A greedy text of a small model soon repeats itself: every 64th token is another one.
    for n in tqdm(range(args.tokens), unit="token"):
        x = mx.array([[token if n % 64 else n // 64 % 512]])
        evictions = counts.evictions
        expected = reference(x, cache=caches[0])
        got = decoding.step(model, x, caches[1])
        if not mx.array_equal(expected, got).item():
            sys.exit(f"token {n}: the logits differ")
        decoding.done()
        if n > args.slots and counts.evictions == evictions:
            sys.exit(f"token {n}: nothing was evicted")
        token = mx.argmax(got[0, -1]).item()
    print(
        f"{args.tokens:,} tokens equal to mlx-lm's, bit for bit, at {args.slots} of "
        f"{smoe_mlx.stats(model).plan.num_experts} experts in memory; "
        f"{counts.evictions:,} evictions; {time.perf_counter() - start:.0f} s"
    )
    print(smoe_mlx.stats(model))


if __name__ == "__main__":
    main()
