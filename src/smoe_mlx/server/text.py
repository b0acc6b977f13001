"""Text in and out: control tokens in a user's words, stop words in an answer."""

from collections.abc import Callable, Sequence
from typing import Any

# Where control tokens stood in a user's text, while a chat template is applied. Private characters:
# no template looks for them.
_MARK = "\ue0b1\ue0b2{}\ue0b3"


class PlainWords:
    """A tokenizer for one request: control tokens in what users and tools say are mere text.

    Only texts that contain one take this way, so all other prompts come out as mlx-lm makes them.
    """

    def __init__(self, tokenizer: Any, words: list[str]):
        self._tokenizer, self._words = tokenizer, words

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, *args: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        text = self._tokenizer.apply_chat_template(*args, tokenize=False, **kwargs)
        return self._encode(text, add_special_tokens=False) if tokenize else text

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return self._encode(text, **kwargs)

    def _encode(self, text: str, **kwargs: Any) -> list[int]:
        tokens: list[int] = []
        rest = text
        while rest or not tokens:
            found = [(rest.find(_MARK.format(i)), i) for i in range(len(self._words))]
            at, i = min(((a, i) for a, i in found if a >= 0), default=(len(rest), -1))
            tokens += self._tokenizer.encode(rest[:at], **kwargs)
            if i < 0:
                break
            kwargs["add_special_tokens"] = False
            for part in (self._words[i][:1], self._words[i][1:]):
                tokens += self._tokenizer.encode(part, **kwargs)
            rest = rest[at + len(_MARK.format(i)) :]
        return tokens


def plain_words(tokenizer: Any, messages: list[dict[str, Any]]) -> Any:
    """The tokenizer for these messages; where control tokens stand in them, they are marked."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    # Some tokenizers also add runs of spaces and the like: those are no control tokens.
    control = [t.content for t in added if t.special or t.content[0] in "<["]
    control.sort(key=len, reverse=True)
    if not any(word in text for text in _texts(messages) for word in control):
        return tokenizer

    def mark(text: str) -> str:
        for i, word in enumerate(control):
            text = text.replace(word, _MARK.format(i))
        return text

    _texts(messages, mark)
    return PlainWords(tokenizer, control)


def _texts(
    messages: list[dict[str, Any]], change: Callable[[str], str] = lambda text: text
) -> list[str]:
    """What users and tools say, after `change`. (An assistant's thoughts and calls are its own.)"""
    texts = []
    for m in messages:
        if m.get("role") in ("system", "assistant"):
            continue
        if isinstance(m.get("content"), str):
            m["content"] = change(m["content"])
            texts.append(m["content"])
        elif isinstance(m.get("content"), list):
            for part in m["content"]:
                if isinstance(part.get("text"), str):
                    part["text"] = change(part["text"])
                    texts.append(part["text"])
    return texts


class StopWords:
    """Looks for stop words in a text that comes piece by piece, wherever tokens begin and end."""

    def __init__(self, words: Sequence[str]):
        self._words = [w for w in words if w]
        self._keep = max(map(len, self._words), default=1) - 1
        self._tail = ""

    def find(self, piece: str) -> tuple[str, str] | None:
        """(what of this piece comes before the first stop word, that word), or None."""
        text = self._tail + piece
        found = [(text.find(w), w) for w in self._words if w in text]
        if found:
            at, word = min(found)
            return piece[: max(0, at - len(self._tail))], word
        self._tail = text[-self._keep :] if self._keep else ""
        return None
