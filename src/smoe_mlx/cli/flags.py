"""The flags that commands share, and what is made of them."""

import argparse

from ..cache.policy import POLICIES
from ..config import StreamingConfig
from ..errors import SmoeError
from ..forward.decode import MODES
from ..kernels.choose import KERNELS
from ..store.reader import IO_MODES

DEMO_PROMPT = "And the LORD said unto Moses,"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="local folder, Hub repository, or 'demo'")
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)  # as mlx_lm
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repository")


def add_budget(parser: argparse.ArgumentParser, slots: float | None = None) -> None:
    group = parser.add_argument_group("memory and reading")
    group.add_argument("--memory", help="ceiling for all that MLX allocates, such as 12GB, or auto")
    group.add_argument(
        "--slots",
        type=slots_or_share,
        help="instead: experts in memory, a number or a share such as 0.25",
    )
    group.add_argument("--context", type=int, help="tokens of KV cache to plan for")
    group.add_argument("--kv-bits", type=int, help="quantise the KV cache")
    group.add_argument("--kv-group-size", type=int, default=64)
    group.add_argument("--quantized-kv-start", type=int, default=5000)
    group.add_argument(
        "--no-hits-first",
        dest="hits_first",
        action="store_false",
        help="wait for all experts of a token before computing any",
    )
    group.add_argument(
        "--no-lookahead",
        dest="lookahead",
        action="store_false",
        help="read no experts of the next layer ahead",
    )
    group.add_argument(
        "--spec", type=int, default=0, metavar="N", help="ranks beyond top-k to read as bets"
    )
    group.add_argument("--threads", type=int, default=8, help="reads at a time (default: 8)")
    group.add_argument(
        "--io", choices=IO_MODES, default="pread", help="direct: past the page cache"
    )
    group.add_argument(
        "--decode", default="auto", metavar="MODE", help=f"{', '.join(MODES)} (docs/decode.md)"
    )
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default="stock",
        help="fused, auto: expert kernels on a GPU (docs/kernels.md); default: mlx-lm's operations",
    )
    group.add_argument(
        "--policy", default="lru", help=f"who makes room for another: {', '.join(POLICIES)}"
    )
    group.add_argument(
        "--usage",
        metavar="FILE",
        help="remember here which experts are used most, and read them while the model is idle "
        "('auto': beside the model)",
    )
    group.add_argument(
        "--hot-per-layer", type=int, default=0, metavar="N", help="pin the N most used of a layer"
    )
    group.add_argument(
        "--govern", action="store_true", help="give slots back while the system lacks memory"
    )
    group.add_argument(
        "--no-tuned",
        dest="tuned",
        action="store_false",
        help="do not use what smoe-mlx tune found for this model",
    )
    group.add_argument(
        "--check", action="store_true", help="compare each record of a vault with its checksum"
    )
    parser.set_defaults(default_slots=slots)


def add_prompt(
    parser: argparse.ArgumentParser, prompt: str, temp: float, top_p: float, max_tokens: int
) -> None:
    add = parser.add_argument
    add("--prompt", "-p", default=prompt, help="the prompt; '-' reads it from standard input")
    add("--max-tokens", "-m", type=int, default=max_tokens, help=f"default: {max_tokens}")
    add("--temp", type=float, default=temp, help=f"sampling temperature (default: {temp})")
    add("--top-p", type=float, default=top_p, help=f"default: {top_p}")
    add("--min-p", type=float, default=0.0)
    add("--top-k", type=int, default=0)
    add("--seed", type=int, help="seed of the sampler")
    add("--system-prompt", help="system message for the chat template")
    add("--ignore-chat-template", action="store_true", help="take the prompt as it is")
    add("--extra-eos-token", nargs="+", default=(), help="more tokens that end the text")
    add("--adapter-path", help="folder of a LoRA adapter (not on routed experts)")
    add("--max-kv-size", type=int, help="rotate the KV cache at this size")
    add("--prefill-step-size", type=int, help="prompt tokens at a time (default: by the plan)")
    add("--quiet", "-q", action="store_true", help="print nothing but the text")


def from_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)


def slots_or_share(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a share") from None


def budgets(text: str) -> list[int | float]:
    return [slots_or_share(x) for x in comma_list(text)]


def comma_list(text: str) -> list[str]:
    return [x.strip() for x in text.split(",")]


def model_name(args: argparse.Namespace) -> str:
    model = args.model or getattr(args, "model_flag", None)
    if not model:
        raise SmoeError("name a model: a local folder, a Hub repository, or 'demo'")
    return str(model)


def streaming_config(args: argparse.Namespace) -> StreamingConfig:
    slots = args.slots
    if slots is None and args.memory is None:
        slots = args.default_slots
    try:
        return StreamingConfig(
            memory=args.memory,
            slots=slots,
            context=args.context,
            kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size,
            quantized_kv_start=args.quantized_kv_start,
            hits_first=args.hits_first,
            lookahead=args.lookahead,
            spec=args.spec,
            decode=args.decode,
            kernels=args.kernels,
            threads=args.threads,
            io=args.io,
            policy=args.policy,
            usage=args.usage,
            hot_per_layer=args.hot_per_layer,
            govern=args.govern,
            tuned=args.tuned,
            check=args.check,
        )
    except ValueError as e:
        raise SmoeError(str(e)) from e
