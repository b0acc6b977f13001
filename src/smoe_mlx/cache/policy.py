"""Eviction policies: pure Python over opaque keys, no arrays."""

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import Any, Protocol


class Policy(Protocol):
    """Orders the keys that may be evicted."""

    def touch(self, key: Hashable) -> None:
        """`key` was used just now (and is added if it is new)."""

    def demote(self, key: Hashable) -> None:
        """`key`, a candidate, is to go before all others."""

    def __contains__(self, key: Hashable) -> bool:
        """Whether `key` is a candidate."""

    def discard(self, key: Hashable) -> None:
        """`key` is no longer a candidate (evicted, pinned or lost)."""

    def victim(self, keep: Collection[Hashable]) -> Any:
        """The key to evict next, none of `keep`. It stays a candidate until it is discarded.

        Raises:
            LookupError: there is no such key.
        """


class LRU:
    """Least recently used goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def touch(self, key: Hashable) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def demote(self, key: Hashable) -> None:
        self._order.move_to_end(key, last=False)

    def discard(self, key: Hashable) -> None:
        self._order.pop(key, None)

    def victim(self, keep: Collection[Hashable]) -> Any:
        for key in self._order:
            if key not in keep:
                return key
        raise LookupError("every key is to be kept")

    def __contains__(self, key: Hashable) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
