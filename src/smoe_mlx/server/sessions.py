"""Sessions: the KV caches of past conversations, found again by the tokens they hold.

A request starts from the cache that has the longest prefix of its prompt. Tokens alone decide, not
names or connections: what two conversations share is what both prompts begin with, and a template
that writes earlier turns anew costs what comes after the first change.

Caches that only grow are cut where the prompt departs from them. Others (recurrent states, sliding
windows) cannot be cut, so copies are kept at the places where a later prompt will depart: the end
of the system prompt and the end of the prompt.
"""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, trim_prompt_cache

from .session_files import SessionFiles, remove

Kind = Literal["system", "prompt", "answer"]  # what an entry's tokens end with


@dataclass(eq=False)
class Entry:
    """A KV cache and the tokens it holds, in memory, in a file, or both.

    Attributes:
        asked: tokens of the question; the rest is the answer. A prompt that has only the question
            in common is most likely a later one of the same conversation, whose template leaves
            out thoughts, or the same one again.
        grows: whether the cache can be cut at any token.
        stale: only the question was of use to a later prompt. First to go, and not to a file.
    """

    model: str
    tokens: np.ndarray
    kind: Kind
    asked: int
    grows: bool
    nbytes: int
    cache: list[Any] | None = None
    file: Path | None = None
    stale: bool = False


class Sessions:
    """KV caches of several models and conversations, the least recently used make room.

    Used by one thread: the one that generates.

    Attributes:
        limit: most bytes of caches in memory; beyond, they go to files, or are dropped.
        entries: the least recently used first.
    """

    def __init__(self, files: SessionFiles | None = None, limit: int = 0):
        self.files, self.limit = files, limit
        self.entries: list[Entry] = []
        self.fingerprints: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries if e.cache is not None)

    def open(self, model: str, fingerprint: str) -> None:
        """Know the files of a model; `fingerprint` tells all that its caches depend on."""
        if self.files is None or model in self.fingerprints:
            return
        self.fingerprints[model] = fingerprint
        for path, found in self.files.index(fingerprint):
            self.entries.append(Entry(model, file=path, **found))

    def take(self, model: str, prompt: list[int], reserve: int = 0) -> tuple[list[Any] | None, int]:
        """The cache that spares most of a prompt, and how many tokens it holds; else (None, 0).

        It is the caller's from now on: `put` it back with all that it then holds. At least the last
        token of the prompt is never in it.

        Args:
            reserve: bytes that the caller is going to need out of `limit`.
        """
        wanted = np.array(prompt, np.int64)
        entry, n = self._longest(model, wanted)
        while entry is not None and entry.cache is None:
            self._fit(max(reserve, entry.nbytes))
            if self._read(entry):
                break
            entry, n = self._longest(model, wanted)
        if entry is None:
            self._fit(reserve)
            return None, 0
        assert entry.cache is not None
        cache = entry.cache
        self.entries.remove(entry)
        entry.stale = entry.asked <= n < len(entry.tokens)
        self.entries.insert(0 if entry.stale else len(self.entries), entry)
        if n == len(entry.tokens) and entry.kind == "answer":
            self._release(entry)
        else:  # another conversation may still come back to all of it
            cache = copy.deepcopy(cache)  # arrays are shared until one side writes
            trim_prompt_cache(cache, len(entry.tokens) - n)
        self._fit(reserve)
        return cache, n

    def put(
        self,
        model: str,
        tokens: list[int],
        cache: list[Any],
        kind: Kind = "answer",
        asked: int | None = None,
    ) -> None:
        """Keep a cache that holds `tokens`, the first `asked` of them the question (default: all).

        What it makes superfluous is dropped.
        """
        held = np.array(tokens, np.int64)
        grows = only_grows(cache)
        longer = next(
            (
                e
                for e in self.entries
                if e.model == model
                and e.grows
                and len(e.tokens) > len(held)
                and _common(e.tokens, held) == len(held)
            ),
            None,
        )
        if grows and longer is not None:  # from which it can be cut at any time
            longer.stale = False
            self.entries.remove(longer)
            self.entries.append(longer)
            return
        for e in [e for e in self.entries if e.model == model]:
            if _common(e.tokens, held) == len(e.tokens) and (
                grows or e.kind == "answer" or e.kind == kind or len(e.tokens) == len(held)
            ):
                self._drop(e)
        nbytes = sum(c.nbytes for c in cache)
        asked = len(held) if asked is None else asked
        self.entries.append(Entry(model, held, kind, asked, grows, nbytes, cache))
        self._fit(0)

    def evict(self, model: str | None = None) -> None:
        """Free the memory of one model's caches, or of all: they go to files where there are."""
        for e in [e for e in self.entries if model in (None, e.model)]:
            self._evict(e)

    # The names that mlx-lm's batches call (decode_concurrency > 1).

    def fetch_nearest_cache(self, model: str, tokens: list[int]) -> tuple[Any, list[int]]:
        cache, n = self.take(model, tokens)
        return cache, tokens[n:]

    def insert_cache(
        self, model: str, tokens: list[int], cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        held = held_tokens(cache)
        if held is not None and held <= len(tokens):
            kinds: dict[str, Kind] = {"system": "system", "user": "prompt"}
            self.put(model, tokens[:held], cache, kinds.get(cache_type, "answer"))

    def trim_to(self, *, n_bytes: int) -> None:
        self._fit(self.limit - n_bytes)

    def _longest(self, model: str, prompt: np.ndarray) -> tuple[Entry | None, int]:
        best, most = None, 0
        for e in self.entries:
            if e.model != model:
                continue
            n = min(_common(e.tokens, prompt), len(prompt) - 1)
            if n > most and (e.grows or n == len(e.tokens)):
                best, most = e, n
        return best, most

    def _fit(self, reserve: int) -> None:
        room = max(self.limit - reserve, 0)
        for e in list(self.entries):
            if self.nbytes <= room:
                break
            self._evict(e)

    def _evict(self, entry: Entry) -> None:
        if entry.cache is None:
            return
        if self.files is not None and entry.file is None and not entry.stale:
            entry.file = self.files.save(self.fingerprints[entry.model], entry)
        self._release(entry)

    def _release(self, entry: Entry) -> None:
        entry.cache = None
        if entry.file is None:
            self.entries.remove(entry)

    def _drop(self, entry: Entry) -> None:
        self.entries.remove(entry)
        if entry.file is not None:
            remove(entry.file)

    def _read(self, entry: Entry) -> bool:
        assert self.files is not None
        assert entry.file is not None
        try:
            cache = self.files.load(entry.file)
            if held_tokens(cache) != len(entry.tokens):
                raise ValueError("it holds other tokens than it says")
        except FileNotFoundError:  # another session needed its place
            self.entries.remove(entry)
            return False
        except (OSError, MemoryError) as e:  # perhaps it can be read another time
            logging.warning(f"{entry.file} is not used: {str(e) or 'no memory'}")
            self.entries.remove(entry)
            return False
        except ValueError as e:
            logging.warning(f"{entry.file} is dropped: {e}")
            self._drop(entry)
            return False
        entry.cache = cache
        return True


def only_grows(cache: list[Any]) -> bool:
    """Whether a prompt cache can be cut at any token: true where nothing is ever overwritten."""
    return all(
        only_grows(list(c.caches))
        if isinstance(c, CacheList)
        else type(c) in (KVCache, QuantizedKVCache)
        for c in cache
    )


def held_tokens(cache: list[Any]) -> int | None:
    """How many tokens a prompt cache holds; None if its entries do not say so, or disagree."""
    offsets = set()
    entries = list(cache)
    while entries:
        c = entries.pop()
        entries += getattr(c, "caches", ())
        offset = getattr(c, "offset", 0)
        if offset:  # recurrent states have none; some layers use another layer's keys
            offsets.add(int(offset))
    return offsets.pop() if len(offsets) == 1 else None


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
