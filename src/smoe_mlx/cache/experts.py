"""SharedExpertCache: the experts of all layers, for whatever decodes, prefills, bets or resizes.

Claims, and with them all that must hold for a slot, are in slots.py.
"""

import threading
import time
from collections.abc import Collection, Iterable, Sequence

import mlx.core as mx
import numpy as np

from ..errors import BudgetError, SmoeError
from .bets import Bet
from .bookkeeping import Bank
from .policy import Key
from .slots import SlotCache

GIVE_WAY_SECONDS = 0.001  # after each prewarmed expert: whoever waits for the lock takes it


class SharedExpertCache(SlotCache):
    """The experts of all layers in a fixed number of slots; a policy says who makes room.

    Args:
        layouts: where each layer's experts lie; a layer is named by its index here.
        banks: (layer indices, slots) for each bank. The layers of one bank must have equal
            `tensors`. A bank with room for all its experts gives each layer its own rows.
        reader: reads the bytes.
        policy: makes the eviction policy of one bank.
        check: compare experts that have a checksum with it, when they are first read.
        debug: check the bookkeeping on every claim (slow).

    Threads may take turns, or run a model side by side: what another one still has to evaluate
    keeps its memory, and this one starts with new memory. `generate` takes turns token by token.

    Attributes:
        trace: if set, called as `trace(layer, ids [..., k])` with the routing of every layer call.
        usage: if set, learns which experts decoding needs.
        bets_allowed: whether layers may bet at all.

    Raises:
        ValueError: layers of one bank whose experts differ in their tensors.
        BudgetError: a bank without a slot.
    """

    # ---- slot numbers in the graph -----------------------------------------------------------

    def lookup(self, layer: int) -> mx.array:
        """[E] uint32: `table(layer)` for graphs, 0 for experts that are not in memory.

        The same object until the table changes, then another one.
        """
        bank = self._bank_of[layer]
        found = bank.lookups.get(layer)
        if found is None:
            self._memory(bank)
            found = mx.array([max(slot, 0) for slot in bank.tables[layer]], mx.uint32)
            bank.lookups[layer] = found
        return found

    def is_complete(self, layer: int) -> bool:
        """Whether all experts of `layer` are in memory at this moment."""
        return -1 not in self._bank_of[layer].tables[layer]

    def saw(self, layer: int, ids: Sequence[int], lookup: mx.array) -> bool:
        """A call took its slots from `lookup`: whether that gave it all of `ids`. Then they are
        counted as hits, and used just now.
        """
        bank = self._bank_of[layer]
        table = bank.tables[layer]
        if bank.lookups.get(layer) is not lookup or any([table[e] < 0 for e in ids]):
            return False
        self._used(layer, ids)
        return True

    def saw_later(self, layer: int, indices: mx.array) -> None:
        """A call of a complete layer took these experts; the host reads that when it next waits."""
        self._unread.append((layer, indices, threading.get_ident()))
        if len(self._unread) > len(self.layouts):
            self.catch_up()

    def catch_up(self) -> None:
        """Count what `saw_later` was told. By now it has been evaluated, nearly always."""
        unread, self._unread = self._unread, []
        me = threading.get_ident()
        for layer, indices, thread in unread:
            if thread != me:  # it may be evaluating them at this moment: see _settle
                continue
            try:
                ids = np.array(indices).ravel().tolist()
            except Exception:  # built by another thread, and never evaluated: see _settle
                continue
            self._used(layer, ids)

    def _used(self, layer: int, ids: Sequence[int]) -> None:
        bank, stats = self._bank_of[layer], self.stats.layers[layer]
        keys = dict.fromkeys([(layer, e) for e in ids])
        if self.usage is not None:
            self.usage.saw(keys)
        for key in keys:
            if key in bank.policy:
                bank.policy.touch(key)
        early = 0
        if bank.landed:
            landed = {key for key in bank.landed if key[0] == layer}
            bank.landed -= landed
            early = len(landed & keys.keys())
            self.stats.bets.used += early
            self.stats.bets.wasted += len(landed) - early
        stats.hits += len(keys) - early
        stats.misses += early
        stats.calls += 1
        stats.waves += 1
        self._claimed = keys.keys()

    def land(self, layer: int) -> None:
        """Wait for what was bet on for `layer`, which comes next; enter it.

        A bet that cannot be read is given up: a claim that needs the expert will say why.
        """
        bank = self._bank_of[layer]
        experts = self.bet_on(layer)
        if not experts:
            return
        stats = self.stats.layers[layer]
        try:
            self._settle()
            before = stats.misses, stats.missed_calls
            self._finish(self._start(bank, layer, experts))
            stats.misses, stats.missed_calls = before  # `saw` tells who was needed
            bank.landed.update((layer, e) for e in experts)
        except SmoeError:
            self._recover()
        except BaseException:
            self._recover()
            raise

    # ---- bets --------------------------------------------------------------------------------

    def may_bet(self, layer: int) -> bool:
        """Whether `prefetch` for this layer is worth a prediction now, going by earlier ones."""
        return not self._bets_are_read(layer) and self.bets_pay(layer)

    def bets_pay(self, layer: int) -> bool:
        """The same, whatever is being read at this moment."""
        if self._bank_of[layer].holds_all or not self.reader.slow or not self.bets_allowed:
            return False
        return self._judges[layer].allows(self.reader.waiting)

    def may_prefetch(self, layer: int) -> bool:
        """Whether `prefetch` for this layer can read anything while something else is done."""
        holds_all = self._bank_of[layer].holds_all
        return not holds_all and self.reader.slow and not self._bets_are_read(layer)

    def _bets_are_read(self, layer: int) -> bool:
        """Then the disk is busy."""
        return not all(bet.reading.done for bet in list(self._bank_of[layer].bets.values()))

    def bet_on(self, layer: int) -> list[int]:
        """The experts of `layer` that are being read, or were, and no claim has asked for yet."""
        return [e for i, e in self._bank_of[layer].bets if i == layer]

    def prefetch(
        self, layer: int, experts: Sequence[int], judged: bool = True, settle: bool = True
    ) -> None:
        """Start to read those of these experts of a coming layer that are not in memory.

        They take free slots and those of the least recently used experts, but none of the last
        claim; no other read waits for them. Call it between `claim_few` and `hold`.

        Args:
            judged: whether `may_bet` learns from how it went.
            settle: False if all that was built, and is not evaluated yet, reads slots of the last
                claim alone.
        """
        bank = self._bank_of[layer]
        if bank.holds_all:  # since `may_bet` was asked
            return
        table = bank.tables[layer]
        busy = self._claimed | bank.bets.keys()
        missing = [e for e in dict.fromkeys(experts) if table[e] < 0 and (layer, e) not in busy]
        if not missing:
            return
        # If that cannot be done, it is not for a bet to decide what becomes of it: see _settle.
        if settle and not self._evaluate():
            return
        keep = self._claimed | {(layer, e) for e in experts}
        try:
            for e in missing:
                slot = self._take_slot(bank, keep, demand=False)
                reading = self.reader.reading(self._requests(bank, layer, {e: slot}), bet=True)
                bank.bets[layer, e] = Bet(slot, reading, counts=judged)
                self.reader.start(reading)
                self.stats.bets.issued += 1
        except LookupError:  # too few slots for bets
            pass
        except BaseException:
            self._repair(self._loading)  # the claim goes on
            raise

    # ---- idle time ---------------------------------------------------------------------------

    def prewarm(self, keys: Iterable[Key]) -> int:
        """Read these experts into free slots, the first ones first; returns how many were read.

        For idle time, from any thread. It ends when a layer is called: each expert is read by
        itself under `lock`, so that a call waits for the end of one. Nothing is evicted for them,
        and they are the first to go, the last ones before the others.

        Raises:
            ExpertReadError, CheckpointChangedError: an expert could not be read.
        """
        count = 0
        claimed = self._claimed  # every claim makes a new one
        for layer, e in keys:
            bank = self._bank_of[layer]
            with self.lock:
                if self._claimed is not claimed:
                    break
                there = bank.tables[layer][e] >= 0 or (layer, e) in bank.bets
                if there or not bank.free or bank.holds_all:
                    continue
                self._read_early(bank, layer, e)
            count += 1
            time.sleep(GIVE_WAY_SECONDS)
        return count

    def _read_early(self, bank: Bank, layer: int, expert: int) -> None:
        waited = self.reader.stats.wait_seconds
        try:
            slot = bank.free.pop()  # nothing that is still to be evaluated reads from it
            self.reader.read(self._requests(bank, layer, {expert: slot}))
            self._enter(bank, layer, expert, slot)
            bank.policy.demote((layer, expert))
        except BaseException:
            bank.place(layer, expert, -1)
            bank.policy.discard((layer, expert))
            self._repair(self._loading)
            raise
        if self._debug:
            self.check()
        self.stats.prewarmed += 1
        self.reader.stats.wait_seconds = waited  # no model waited for it

    # ---- whole layers, one after the other ---------------------------------------------------

    def fits(self, layer: int) -> bool:
        """Whether all experts of `layer` can be in memory at once, whatever else is pinned."""
        bank = self._bank_of[layer]
        return self.layouts[layer].num_experts + len(bank.pinned) <= bank.slots

    def keep_most_used(self, layer: int, ids: np.ndarray) -> None:
        """Let all but the experts most frequent in `ids` go first when others need their slots.

        As many are kept as every layer can while the others pass through.
        """
        bank = self._bank_of[layer]
        keep = self._kept(bank)
        if keep > 0:
            counts = np.bincount(ids, minlength=self.layouts[layer].num_experts)
            for e in np.argsort(-counts, kind="stable")[keep:].tolist():
                if (layer, e) in bank.policy:
                    bank.policy.demote((layer, e))

    def room_ahead(self, layer: int, beside: int) -> int:
        """How many experts of a coming layer can be in memory while one with `beside` experts
        computes, and nothing has to go that `keep_most_used` kept."""
        bank = self._bank_of[layer]
        kept = self._kept(bank) * len(bank.layouts)
        return max(0, bank.slots - len(bank.pinned) - beside - kept)

    def _kept(self, bank: Bank) -> int:
        """How many experts of each layer `keep_most_used` keeps."""
        largest = max(x.num_experts for x in bank.layouts.values())
        beyond = bank.slots - len(bank.pinned) - largest  # what one layer does not need
        if self.reader.threads:  # the next one is read ahead: all of it, or into half of the rest
            beyond -= largest if beyond >= largest else beyond // 2
        return max(0, beyond // len(bank.layouts))

    # ---- pins --------------------------------------------------------------------------------

    def pin(self, layer: int, experts: Sequence[int]) -> None:
        """Load experts and keep them until `unpin`. At least one slot of the bank stays free.

        Raises:
            BudgetError: they would leave no slot for anything else.
        """
        with self.lock:
            bank = self._bank_of[layer]
            if bank.holds_all:
                return
            keys = {(layer, e) for e in experts}
            if len(bank.pinned | keys) >= bank.slots:
                raise BudgetError(
                    f"pinning {len(bank.pinned | keys)} experts leaves none of {bank.slots} slots "
                    f"for the rest. Pin fewer, or give the cache more memory."
                )
            try:
                for e in dict.fromkeys(experts):
                    self.claim(layer, [e])  # one by one: what comes before is pinned already
                    bank.pinned.add((layer, e))
                    bank.policy.discard((layer, e))
            except BaseException:
                self._repair(self._loading)
                raise

    def unpin(self, layer: int, experts: Sequence[int]) -> None:
        """Let experts be evicted again."""
        with self.lock:
            bank = self._bank_of[layer]
            try:
                for e in experts:
                    if (layer, e) in bank.pinned:
                        bank.pinned.discard((layer, e))
                        bank.policy.touch((layer, e))
            except BaseException:
                self._repair(self._loading)
                raise

    def pin_only(self, keys: Collection[Key]) -> None:
        """Pin these in place of those of the call before.

        Raises:
            BudgetError: as `pin`.
        """
        with self.lock:
            for key in sorted(self._hot.difference(keys)):
                self.unpin(key[0], [key[1]])
                self._hot.discard(key)
            for key in sorted(set(keys) - self._hot):
                self.pin(key[0], [key[1]])
                self._hot.add(key)

    # ---- resizing ----------------------------------------------------------------------------

    @property
    def bank_slots(self) -> list[int]:
        """The slots of each bank."""
        return [b.slots for b in self._banks]

    def resize(self, slots: Sequence[int]) -> None:
        """Give each bank another number of slots; any thread may, while another runs the model.

        Of the experts in memory, those stay that the policy would evict last. They are copied to
        new memory: what was built before reads the old arrays, which nobody writes to any more. So
        nothing has to be evaluated here, and no result changes. A bank that comes to hold all of
        its experts starts empty, as after loading.

        Raises:
            BudgetError: a bank has fewer slots than its pins need. Nothing has changed then.
        """
        with self.lock, mx.stream(self._device):
            for bank, n in zip(self._banks, slots, strict=True):
                if n < 1 or (n <= len(bank.pinned) and n < bank.experts):
                    raise BudgetError(
                        f"{n} slots are too few beside {len(bank.pinned)} pinned experts."
                    )
            if self._loading is not None:  # an interrupt came between claim_few and finish_few
                self._recover()
            for bank, n in zip(self._banks, slots, strict=True):
                if min(n, bank.experts) != bank.slots:
                    self._resize(bank, min(n, bank.experts))
        mx.clear_cache()

    def _resize(self, bank: Bank, slots: int) -> None:
        try:
            self._move(bank, slots)
        except BaseException:  # the tables may be of other memory
            self._abandon([bank])
            raise

    def _move(self, bank: Bank, slots: int) -> None:
        for key in list(bank.bets):
            self._drop(bank, key)
        bank.landed.clear()
        self._claimed = set()
        if bank.memory is None or slots == bank.experts:
            bank.slots = slots
            self._abandon([bank])
            return
        if bank.holds_all:  # nothing could be evicted, so the policy knows of no expert
            for layer, e in sorted(bank.owners().values(), key=lambda key: key[::-1]):
                if (layer, e) not in bank.pinned:
                    bank.policy.touch((layer, e))
        while len(owners := bank.owners()) > slots:
            self._evict(bank, set())
        rows = sorted(owners)
        bank.memory = bank.memory.moved(slots, rows)
        for to, at in enumerate(rows):
            bank.place(*owners[at], to)
        bank.lookups.clear()
        bank.resident.clear()
        bank.slots, bank.holds_all = slots, False
        bank.free = list(range(len(rows), slots))[::-1]
        self._load_pins(bank)
        if self._debug:
            self.check()
