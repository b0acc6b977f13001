"""Log-likelihoods of texts, many at a time: the model reads its experts once for a whole batch.

    python examples/score.py                                    # three texts, the demo model
    python examples/score.py texts.txt --model MODEL --memory 12GB
    some-command | python examples/score.py -                   # one text a line

Writes one line for each text: log-likelihood (nats, of all tokens but the first), tokens,
perplexity and the text, with tabs between them. Texts longer than --window tokens are scored in
windows of that length, each by itself.
"""

import argparse
import math
import sys

import mlx.core as mx

import smoe_mlx

TEXTS = [
    "And God said, Let there be light: and there was light.",
    "And light said, Let there be God: there and was light.",
    "import os\n\n\ndef main():\n    print(os.getcwd())\n",
]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", help="one text a line; - is standard input")
    parser.add_argument("--model", default="demo", help="default: demo")
    parser.add_argument("--memory", help="for example 12GB (the demo: a quarter of its experts)")
    parser.add_argument("--window", type=int, default=512, help="tokens (default: 512)")
    args = parser.parse_args()
    if args.window < 2:
        parser.error("--window: at least 2 tokens")
    texts = TEXTS
    if args.file is not None:
        with sys.stdin if args.file == "-" else open(args.file, encoding="utf-8") as f:
            texts = [line.rstrip("\n") for line in f if line.strip()]
    slots = 0.25 if args.model == "demo" and args.memory is None else None
    model, tokenizer = smoe_mlx.load(args.model, memory=args.memory, slots=slots)

    encoded = [tokenizer.encode(text) for text in texts]
    windows = [
        (i, tokens[start : start + args.window])
        for i, tokens in enumerate(encoded)
        for start in range(0, len(tokens), args.window)
    ]
    total, count = [0.0] * len(texts), [0] * len(texts)
    batches = list(make_batches(windows, smoe_mlx.stats(model).plan.prefill_step))
    for batch in batches:
        for (i, tokens), nats in zip(batch, score(model, [t for _, t in batch]), strict=True):
            total[i] += nats
            count[i] += len(tokens) - 1
    for nats, n, text in zip(total, count, texts, strict=True):
        perplexity = math.exp(-nats / n) if n else math.nan  # of a single token nothing is known
        print(f"{nats:.3f}\t{n}\t{perplexity:.2f}\t{text[:60]!r}")
    read = smoe_mlx.stats(model).bytes_read / 1e6
    print(f"{len(batches)} batches, {read:.1f} MB of experts read", file=sys.stderr)


def make_batches(windows, most):
    """Windows of like lengths together, at most `most` tokens with their padding."""
    batch = []
    for window in sorted(windows, key=lambda w: len(w[1])):
        if batch and (len(batch) + 1) * len(window[1]) > most:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def score(model, rows):
    """The log-likelihood of each list of tokens, given its first one."""
    length = max(2, *map(len, rows))
    padded = mx.array([r + [0] * (length - len(r)) for r in rows])
    # Padding comes last, where no token of the text can see it.
    logits = model(padded[:, :-1]).astype(mx.float32)
    targets = padded[:, 1:, None]
    nats = mx.take_along_axis(logits, targets, axis=-1)[..., 0] - mx.logsumexp(logits, axis=-1)
    inside = mx.arange(length - 1) < mx.array([[len(r) - 1] for r in rows])
    return mx.where(inside, nats, 0).sum(axis=1).tolist()


if __name__ == "__main__":
    main()
