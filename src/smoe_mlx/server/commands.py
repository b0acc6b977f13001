"""The flags of `smoe-mlx server` and `smoe-mlx chat`. What they run is imported when it is run."""

import argparse
import json
import os

from ..config import StreamingConfig, parse_bytes


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "models",
        nargs="+",
        metavar="MODEL",
        help="local folder, Hub repository or 'demo', the default first; NAME=MODEL names it",
    )
    add("--host", default="127.0.0.1", help="default: 127.0.0.1; others need --api-key")
    add("--port", type=int, default=8080, help="default: 8080; 0 takes any")
    add("--api-key", default=os.environ.get("SMOE_API_KEY"), help="default: $SMOE_API_KEY")
    add(
        "--allowed-origins",
        type=lambda text: text.split(","),
        default=[],
        help="web pages of these origins may use the server (default: its own page)",
    )
    add("--max-queue", type=int, default=64, help="requests that may wait (default: 64)")
    add(
        "--log-level",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        default="WARNING",
        help="default: WARNING; INFO tells of each request",
    )
    group = parser.add_argument_group("sessions")
    group.add_argument(
        "--prompt-cache-bytes",
        type=parse_bytes,
        help="memory for KV caches of past conversations, out of --memory (default: what the plan "
        "sets aside for the KV cache, while nothing else needs it)",
    )
    group.add_argument(
        "--session-dir", help="folder to keep KV caches in that have no room, and over a restart"
    )
    group.add_argument(
        "--session-disk", default="8GB", help="most that they may take there (default: 8GB)"
    )
    group = parser.add_argument_group("defaults of requests")
    group.add_argument("--max-tokens", type=int, default=512, help="default: 512")
    group.add_argument("--temp", type=float, default=0.0, help="default: 0.0")
    group.add_argument("--top-p", type=float, default=1.0, help="default: 1.0")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    _add_model_flags(parser)
    add(
        "--decode-concurrency",
        type=int,
        default=1,
        help="answers at a time (default: 1; more are right, but read more experts a token)",
    )
    # What mlx-lm's server reads besides, and this one does not offer.
    parser.set_defaults(
        draft_model=None,
        num_draft_tokens=0,
        pipeline=False,
        prompt_concurrency=1,
        use_default_chat_template=False,
    )


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="local folder, Hub repository, or 'demo'")
    add("--system-prompt", help="system message of the conversation")
    add("--max-tokens", "-m", type=int, default=512, help="of an answer (default: 512)")
    add("--temp", type=float, default=0.0, help="sampling temperature (default: 0.0)")
    add("--top-p", type=float, default=1.0, help="default: 1.0")
    add("--min-p", type=float, default=0.0)
    add("--top-k", type=int, default=0)
    add("--seed", type=int, help="seed of the sampler")
    _add_model_flags(parser)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--adapter-path", help="folder of a LoRA adapter (not on routed experts)")
    add("--trust-remote-code", action="store_true", help="run the model's own code")
    add("--chat-template", default="", help="instead of the tokenizer's own")
    add(
        "--chat-template-args",
        type=json.loads,
        default={},
        help="""JSON, e.g. '{"enable_thinking": false}'""",
    )
    add("--prefill-step-size", type=int, help="prompt tokens at a time (default: by the plan)")


def run_chat(args: argparse.Namespace, config: StreamingConfig) -> None:
    from .chat import chat

    chat(args, config)


def run_server(args: argparse.Namespace, config: StreamingConfig) -> None:
    from .app import serve
    from .fleet import parse_models

    args.models = parse_models(args.models)
    serve(args, config)
