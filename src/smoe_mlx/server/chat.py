"""smoe-mlx chat: a conversation on the console."""

import contextlib
import json
import signal
import sys
import unicodedata
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from mlx_lm.server import convert_chat

from ..config import StreamingConfig
from ..load import load
from ..stats import stats
from .sessions import Sessions
from .text import plain_words
from .turn import Stopped, kv_nbytes, stream_answer

HELP = """\
Enter sends. A line that ends in \\ goes on in the next one; \"\"\" begins and ends a longer text.
Ctrl-C stops an answer and keeps the conversation; Ctrl-D ends the chat.
/stats        what the experts cost so far
/reset        a new conversation
/save FILE    write the conversation, as JSON
/load FILE    go on with one that was saved
/help         this"""


class Chat:
    """One conversation: its messages, and the session that keeps what was computed of it."""

    def __init__(self, model: Any, tokenizer: Any, args: Namespace):
        self.model, self.tokenizer, self.args = model, tokenizer, args
        self.plan = stats(model).plan
        self.sessions = Sessions(limit=self.plan.kv_cache)
        self.stop = False
        self.reset()

    def reset(self) -> None:
        system = self.args.system_prompt
        self.messages = [{"role": "system", "content": system}] if system else []

    def run(self) -> None:
        """Until the end of the input."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (arrows and history)
            print("/help tells what there is.")
        while True:
            try:
                text = self.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                print("\nCtrl-D ends the chat.")
                continue
            if text.startswith("/"):
                self.command(text)
            elif text.strip():
                self.ask(text)

    def read(self) -> str:
        prompt, more = (">>> ", "... ") if sys.stdin.isatty() else ("", "")
        text = input(prompt)
        if text.startswith('"""'):
            text = text[3:]
            while not text.endswith('"""'):
                text += "\n" + input(more)
            return text[:-3]
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input(more)
        return text

    def command(self, line: str) -> None:
        name, _, path = line.partition(" ")
        try:
            if name == "/stats":
                print(stats(self.model))
            elif name == "/reset":
                self.reset()
            elif name == "/save" and path:
                Path(path).expanduser().write_text(json.dumps(self.messages, indent=2) + "\n")
            elif name == "/load" and path:
                self.messages = _messages(json.loads(Path(path).expanduser().read_text()))
            else:
                print(HELP)
        except (OSError, ValueError) as e:
            print(f"{path}: {getattr(e, 'strerror', None) or e}")

    def ask(self, text: str) -> None:
        """Answer a message; both become part of the conversation."""
        self.messages.append({"role": "user", "content": text})
        prompt = self.prompt()
        most = min(self.args.max_tokens, self.plan.context - len(prompt))
        if most <= 0:
            self.messages.pop()
            print(
                f"The conversation has {len(prompt)} tokens; memory is planned for "
                f"{self.plan.context}. /reset, or start again with a larger --context."
            )
            return
        reserve = kv_nbytes(self.plan, len(prompt) + most)
        cache, reused = self.sessions.take("chat", prompt, reserve)
        answer, last = "", None
        stream = stream_answer(
            self.sessions,
            "chat",
            self.model,
            self.tokenizer,
            prompt,
            cache,
            reused,
            [(len(prompt) - 1, "prompt")],
            max_tokens=most,
            sampler=make_sampler(
                self.args.temp, self.args.top_p, self.args.min_p, top_k=self.args.top_k
            ),
            prefill_step_size=self.args.prefill_step_size,
            kv_bits=self.args.kv_bits,
            kv_group_size=self.args.kv_group_size,
            quantized_kv_start=self.args.quantized_kv_start,
            prompt_progress_callback=lambda done, total: self.check(),
        )
        with self.stopping_at_ctrl_c(), contextlib.suppress(Stopped), contextlib.closing(stream):
            for last in stream:
                answer += last.text
                print(_printable(last.text), end="", flush=True)
                self.check()
        print(" (stopped)" if self.stop else "")
        if last is None:  # stopped before it began
            self.messages.pop()
            return
        self.messages.append({"role": "assistant", "content": answer})
        if sys.stdin.isatty():
            print(
                f"[{last.generation_tps:.1f} tok/s; prompt: {len(prompt) - reused} tokens, "
                f"{reused} more were kept]"
            )

    def prompt(self) -> list[int]:
        """The tokens of the conversation, ready for an answer."""
        messages: list[dict[str, Any]] = [dict(m) for m in self.messages]
        tokenizer = plain_words(self.tokenizer, messages)
        if tokenizer.has_chat_template:
            options = {"add_generation_prompt": True, **self.args.chat_template_args}
            return list(tokenizer.apply_chat_template(messages, **options))
        return list(tokenizer.encode(convert_chat(messages)))

    def check(self) -> None:
        if self.stop:
            raise Stopped

    @contextlib.contextmanager
    def stopping_at_ctrl_c(self) -> Iterator[None]:
        """Ctrl-C is looked at between two tokens: anywhere else the session would be in doubt."""
        self.stop = False

        def stop(*_: Any) -> None:
            self.stop = True

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def chat(args: Namespace, config: StreamingConfig) -> None:
    """Load the model and converse.

    Raises:
        SmoeError: what `load` raises.
    """
    tokenizer_config = {"trust_remote_code": True} if args.trust_remote_code else {}
    if args.chat_template:
        tokenizer_config["chat_template"] = args.chat_template
    model, tokenizer, *_ = load(
        args.model,
        tokenizer_config=tokenizer_config,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        config=config,
    )
    if args.seed is not None:
        mx.random.seed(args.seed)
    Chat(model, tokenizer, args).run()


def _messages(document: Any) -> list[dict[str, str]]:
    good = isinstance(document, list) and all(
        isinstance(m, dict) and {type(m.get("role")), type(m.get("content"))} == {str}
        for m in document
    )
    if not good:
        raise ValueError("not a conversation that /save wrote")
    return list(document)


def _printable(text: str) -> str:
    """Without what would steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
