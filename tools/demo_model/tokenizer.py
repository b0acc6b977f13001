"""Train the byte-level BPE tokenizer and encode the corpus.

    python tokenizer.py train  --corpus DIR --out DIR [--vocab 8192]
    python tokenizer.py encode --corpus DIR --tokenizer DIR --out DIR

`encode` writes train.bin and heldout.bin (uint16, every document followed by <|endoftext|>), and
heldout.labels, one byte per token: the kind of its document (labels.json names them).
"""

import argparse
import json
import pathlib
import random

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"


def read(path, share=1.0, seed=0):
    rng = random.Random(seed)
    with open(path) as f:
        for line in f:
            if share >= 1 or rng.random() < share:
                yield json.loads(line)["text"]


def train(corpus, out, vocab, share):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(read(corpus / "train.jsonl", share), trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "added_tokens_decoder": {
            "0": {
                "content": END,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
        },
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print("entries:", tokenizer.get_vocab_size())


def encode(corpus, tokenizer_dir, out):
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "heldout"):
        texts = list(read(corpus / f"{part}.jsonl"))
        lengths = []
        with open(out / f"{part}.bin", "wb") as f:
            for at in range(0, len(texts), 256):
                for encoding in tokenizer.encode_batch_fast(texts[at : at + 256]):
                    ids = np.array(encoding.ids + [0], dtype=np.uint16)
                    ids.tofile(f)
                    lengths.append(len(ids))
        size, count = sum(len(t.encode()) for t in texts), sum(lengths)
        if part == "heldout":
            with open(corpus / "heldout.jsonl") as f:
                kinds = [json.loads(line)["label"] for line in f]
            names = sorted(set(kinds))
            np.repeat(np.array([names.index(k) for k in kinds], dtype=np.uint8), lengths).tofile(
                out / "heldout.labels"
            )
            (out / "labels.json").write_text(json.dumps(names))
        print(
            f"{part}: {len(texts)} documents, {size} bytes, {count} tokens, "
            f"{size / count:.3f} bytes per token"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["train", "encode"])
    parser.add_argument("--corpus", type=pathlib.Path, required=True)
    parser.add_argument("--tokenizer", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument(
        "--share",
        type=float,
        default=0.35,
        help="share of the documents the tokenizer is trained on",
    )
    args = parser.parse_args()
    if args.step == "train":
        train(args.corpus, args.out, args.vocab, args.share)
    else:
        encode(args.corpus, args.tokenizer, args.out)
