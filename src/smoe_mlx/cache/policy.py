"""Eviction policies: pure Python over (layer, expert) keys, no arrays.

docs/policies.md compares them.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

Key = tuple[int, int]  # (layer, expert)
Entry = tuple[float, Key]  # (weight, key)
NONE: Key = (-1, -1)
FAR = 1 << 32  # more than there are layers


class Policy(Protocol):
    """Orders the keys that may be evicted."""

    def touch(self, key: Key) -> None:
        """`key` was used just now (and is added if it is new)."""

    def demote(self, key: Key) -> None:
        """`key`, a candidate, is to go before all others."""

    def __contains__(self, key: Key) -> bool:
        """Whether `key` is a candidate."""

    def discard(self, key: Key) -> None:
        """`key` is no longer a candidate (evicted, pinned or lost)."""

    def victim(self, keep: Collection[Key]) -> Key:
        """The key to evict next, none of `keep`. It stays a candidate until it is discarded.

        Raises:
            LookupError: there is no such key.
        """


class LRU:
    """Least recently used goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def touch(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def demote(self, key: Key) -> None:
        self._order.move_to_end(key, last=False)

    def discard(self, key: Key) -> None:
        self._order.pop(key, None)

    def victim(self, keep: Collection[Key]) -> Key:
        for key in self._order:
            if key not in keep:
                return key
        raise LookupError("every key is to be kept")

    def __contains__(self, key: Key) -> bool:
        return key in self._order


class LFU:
    """Least frequently used goes first, where old uses count less and the order of layers is known.

    A key's weight is the sum of 2^-(age of the use / half-life) over all its uses, those before an
    eviction included (LRFU, Lee et al. 2001). Age is counted in passes through the layers; the
    half-life is as long as it takes to use twice as many keys as there are candidates, but at least
    a pass: a prompt that uses every expert ages the others by one. Weights are compared at the
    moment when a key can be used next: a layer that this pass has behind it has its next chance a
    pass later than one ahead (layered LRU, Angelopoulos et al. 2025).
    """

    TURNOVERS = 2  # a half-life, in uses for each candidate

    def __init__(self) -> None:
        # All weights fade alike, so a new use counts for more instead: `_unit` grows. A weight
        # only falls in `demote`, so a key's least heap entry is a lower bound, put right when it
        # comes to the top.
        self._weights: dict[Key, float] = {}  # of evicted keys as well
        self._unit = 1.0
        self._candidates: set[Key] = set()
        self._queued: set[Key] = set()  # keys in the heaps; some are candidates no more
        self._heaps: dict[int, list[Entry]] = {}  # by layer
        self._least: dict[int, Entry] = {}  # of each layer, right but for stale ones
        self._stale: set[int] = set()
        self._layer = -1
        self._uses = 0  # in this pass
        self._fade = 0.5  # what one pass leaves of a weight

    def touch(self, key: Key) -> None:
        layer = key[0]
        if layer != self._layer:
            if layer < self._layer:
                self._next_pass()
            self._layer = layer
            self._stale.add(layer)
        elif self._uses > self.TURNOVERS * len(self._candidates) and len(self._heaps) == 1:
            self._next_pass()  # a single layer never goes back to an earlier one
        self._uses += 1
        self._weights[key] = self._weights.get(key, 0.0) + self._unit
        if key not in self._candidates:
            self._candidates.add(key)
            if key not in self._queued:
                self._queued.add(key)
                heapq.heappush(self._heaps.setdefault(layer, []), (self._weights[key], key))

    def _next_pass(self) -> None:
        half_life = self.TURNOVERS * max(1, len(self._candidates))
        self._fade = 2 ** -min(1.0, self._uses / half_life)
        self._unit /= self._fade
        self._uses = 0
        if self._unit > 1e100:
            self._weights = {k: w / self._unit for k, w in self._weights.items()}
            for heap in self._heaps.values():
                heap[:] = [(w / self._unit, k) for w, k in heap]
            self._stale.update(self._heaps)
            self._unit = 1.0

    def demote(self, key: Key) -> None:
        self._weights[key] = 0.0  # less than its heap entry: it needs another
        heapq.heappush(self._heaps.setdefault(key[0], []), (0.0, key))
        self._stale.add(key[0])

    def discard(self, key: Key) -> None:
        self._stale.add(key[0])  # first: an interrupt may come in between
        self._candidates.discard(key)

    def victim(self, keep: Collection[Key]) -> Key:
        found = self._search(keep)
        if found not in self._candidates:  # none, or an interrupt left a candidate in no heap
            self._rebuild()
            found = self._search(keep)
        if found is NONE:
            raise LookupError("every key is to be kept")
        return found

    def _rebuild(self) -> None:
        """The heaps anew, from candidates and weights."""
        heaps: dict[int, list[Entry]] = {}
        for key in self._candidates:
            heaps.setdefault(key[0], []).append((self._weights.setdefault(key, 0.0), key))
        for heap in heaps.values():
            heapq.heapify(heap)
        self._heaps, self._queued = heaps, set(self._candidates)
        self._least, self._stale = {}, set(heaps)

    def _search(self, keep: Collection[Key]) -> Key:
        kept = {key[0] for key in keep}
        for layer in self._stale | kept:
            self._least[layer] = self._first(layer, keep)
        self._stale = kept | {self._layer}
        now, fade = self._layer, self._fade
        least, distance, found = math.inf, 0, NONE
        for layer, (weight, key) in self._least.items():
            ahead = layer - now
            if ahead <= 0:  # this pass has it behind it
                weight *= fade
                ahead += FAR
            # Of equals, the one whose next chance is furthest away.
            if weight < least or (weight == least and ahead > distance):
                least, distance, found = weight, ahead, key
        return found

    def _first(self, layer: int, keep: Collection[Key]) -> Entry:
        """The least entry of a layer that may go, with its true weight."""
        heap, kept = self._heaps.get(layer, []), []
        first: Entry = (math.inf, NONE)
        while heap:
            weight, key = heap[0]
            if key not in self._candidates:
                heapq.heappop(heap)
                self._queued.discard(key)
            elif self._weights[key] != weight:
                heapq.heapreplace(heap, (self._weights[key], key))
            elif key in keep:
                kept.append(heapq.heappop(heap))
            else:
                first = heap[0]
                break
        for entry in kept:
            heapq.heappush(heap, entry)
        return first

    def __contains__(self, key: Key) -> bool:
        return key in self._candidates


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "lfu": LFU}
