"""SlotCache: which experts are in memory, who is evicted, when a slot may be rewritten.

This is the one place that decides slot lifetime. MLX is lazy: an operation sees a slot's bytes when
it is evaluated, not when it is built. So a slot is rewritten only after every output that was
computed from this cache has been evaluated (`hold`, `_settle`).
"""

import operator
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence, Set

import mlx.core as mx
import numpy as np

from ..errors import BudgetError, SmoeError, VaultError
from ..handover import make_handover
from ..store.layout import ExpertLayout
from ..store.reader import ExpertReader, ReadRequest
from .bank import SlotBank
from .bets import Judge
from .bookkeeping import Arrays, Bank, Loading
from .policy import LRU, Key, Policy
from .stats import CacheStats, LayerStats
from .usage import Usage

SETTLE_EVERY = 8  # outputs that are held before a look at which are evaluated

_ident = operator.attrgetter("ident")


class SlotCache:
    """What every use of `SharedExpertCache` rests on: claims, and the lifetime of slots."""

    def __init__(
        self,
        layouts: Sequence[ExpertLayout],
        banks: Iterable[tuple[Sequence[int], int]],
        reader: ExpertReader,
        policy: Callable[[], Policy] = LRU,
        check: bool = False,
        debug: bool = False,
    ):
        self.layouts = list(layouts)
        self.reader = reader
        self.lock = threading.RLock()
        self.stats = CacheStats([LayerStats() for _ in self.layouts])
        self.handover = make_handover()
        self._device = mx.default_device()
        # Called with (layer, ids, x, bets) of each call of a switch module, before it is computed.
        self.trace: Callable[..., None] | None = None
        self.usage: Usage | None = None
        self._check, self._checked = check, set[Key]()
        self._debug = debug
        # While a prompt goes layer by layer: what switch modules call in place of computing.
        self.defer: Callable[..., mx.array | None] | None = None
        self._pending: list[mx.array] = []
        self._holders = set[int]()  # the threads that these outputs are of
        self._unread: list[tuple[int, mx.array, int]] = []
        self._hot = set[Key]()  # what `pin_only` pinned
        self._claimed: Set[Key] = set()  # what the last claim needs: no bet evicts it
        self._loading: Loading | None = None
        self.bets_allowed = True
        self._judges = [Judge() for _ in self.layouts]
        self._banks = []
        for layers, slots in banks:
            group = {i: self.layouts[i] for i in layers}
            if len({x.tensors for x in group.values()}) != 1:
                raise ValueError("the layers of one bank must have experts of one geometry")
            if slots < 1:
                raise BudgetError("a bank needs at least one slot")
            total = sum(x.num_experts for x in group.values())
            self._banks.append(Bank(group, min(slots, total), policy()))
        if sorted(i for b in self._banks for i in b.layouts) != list(range(len(self.layouts))):
            raise ValueError("every layer must belong to one bank")
        self._bank_of = {i: b for b in self._banks for i in b.layouts}

    # ---- what is in memory -------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """Slots of all banks together."""
        return sum(b.slots for b in self._banks)

    @property
    def holds_all(self) -> bool:
        """Whether every expert has a slot, so that nothing is ever evicted."""
        return all(b.holds_all for b in self._banks)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, allocated or not yet."""
        return sum(b.slots * next(iter(b.layouts.values())).expert_nbytes for b in self._banks)

    def table(self, layer: int) -> np.ndarray:
        """[E] int32: the slot of each expert of `layer` now, or -1. Take it under `lock`."""
        return np.array(self._bank_of[layer].tables[layer], np.int32)

    def places(self, layer: int) -> Sequence[int]:
        """[E] the same, as it is at any time: no copy."""
        return self._bank_of[layer].tables[layer]

    def arrays(self, layer: int) -> Arrays:
        """The slot bank of `layer`: (projection, kind) -> [slots, ...]."""
        return self._memory(self._bank_of[layer]).arrays

    def resident(self, layer: int) -> Arrays | None:
        """The layer's own rows [E, ...], in the order of its experts, if its bank holds them all.

        They are read on the first call, all at once, and never move: such a layer needs neither a
        look at the routing nor slot numbers. None if experts of this layer may be evicted.
        """
        bank = self._bank_of[layer]
        if not bank.holds_all:
            return None
        rows = bank.resident.get(layer)
        if rows is None:
            with self.lock:
                if not bank.holds_all:  # slots were given back meanwhile
                    return None
                rows = self._load_resident(bank, layer)
        self.stats.layers[layer].resident_calls += 1
        return rows

    def _load_resident(self, bank: Bank, layer: int) -> Arrays:
        memory = self._memory(bank)
        start = 0
        for i, layout in bank.layouts.items():
            if i == layer:
                break
            start += layout.num_experts
        count = self.layouts[layer].num_experts
        self.reader.read(self._requests(bank, layer, {e: start + e for e in range(count)}))
        if self._check:
            for e in range(count):
                self._compare(layer, e, memory.rows(start + e))
        memory.forget_rows()
        # A contiguous slice shares the bank's memory.
        rows = {k: a[start : start + count] for k, a in memory.arrays.items()}
        mx.eval(list(rows.values()))
        bank.tables[layer][:] = range(start, start + count)
        bank.resident[layer] = rows
        return rows

    def _memory(self, bank: Bank) -> SlotBank:
        if bank.memory is None:
            tensors = next(iter(bank.layouts.values())).tensors
            bank.memory = SlotBank(tensors, bank.slots, self.reader.uploader)
        return bank.memory

    # ---- claims ------------------------------------------------------------------------------

    def waves(self, layer: int, ids: np.ndarray) -> list[list[int]]:
        """The distinct experts among `ids`, in groups that fit into memory one after the other.

        Experts that are in memory already come first, so that no wave evicts what a later one
        needs. Nearly always there is one group.
        """
        bank = self._bank_of[layer]
        wanted = np.unique(ids).tolist()
        if len(wanted) + len(bank.pinned) <= bank.slots:
            return [wanted]
        table, room = bank.tables[layer], bank.slots - len(bank.pinned)
        wanted.sort(key=lambda e: table[e] < 0)
        movable = [e for e in wanted if (layer, e) not in bank.pinned]
        waves = [movable[i : i + room] for i in range(0, len(movable), room)] or [[]]
        waves[0] += [e for e in wanted if (layer, e) in bank.pinned]
        return waves

    def claim(self, layer: int, experts: Sequence[int]) -> None:
        """Have these distinct experts in memory; `table(layer)` then gives their slots.

        They stay until the next claim, and their slots' bytes until everything passed to `hold`
        has been evaluated. Call it with `lock` held, which must last until `hold`.

        Raises:
            ExpertReadError, CheckpointChangedError: nothing was claimed; the cache stays usable.
        """
        bank = self._bank_of[layer]
        if bank.holds_all:
            self.resident(layer)
            return
        try:
            loading = self._begin(bank, layer, dict.fromkeys([(layer, e) for e in experts]).keys())
            if loading is not None:
                self._finish(loading)
        except BaseException:
            self._recover()
            raise
        if self._debug:
            self.check()

    def claim_few(
        self, layer: int, ids: Sequence[int], ahead: bool = False
    ) -> tuple[list[int], Collection[int]] | None:
        """`claim` for a few ids, repetitions among them. What decoding calls for each layer: every
        microsecond counts.

        Args:
            ahead: return while experts are still being read, if reads are slow.
                `finish_few` must follow, whatever happens.

        Returns:
            (the slot of each id, the experts that are still being read), or None if there is not
            room for all of them at once.
        """
        if self._loading is not None:  # an interrupt came between claim_few and finish_few
            self._recover()
        bank = self._bank_of[layer]
        table = bank.tables[layer]
        slots = [table[e] for e in ids]
        keys = dict.fromkeys([(layer, e) for e in ids])
        if self.usage is not None:
            self.usage.saw(keys)
        if -1 not in slots and not bank.pinned and not bank.bets and not self._debug:
            for key in keys:
                bank.policy.touch(key)
            self.stats.layers[layer].hits += len(keys)
            self._claimed = keys.keys()
            return slots, ()
        if bank.holds_all:
            self.resident(layer)
            return [table[e] for e in ids], ()
        if len(keys) + len(bank.pinned) > bank.slots:
            return None
        ahead = ahead and self.reader.worth_waking()
        try:
            loading = self._begin(bank, layer, keys.keys(), ahead)
            if loading is not None and not ahead:
                self._finish(loading)
                loading = None
            if self._debug and loading is None:
                self.check()
            coming = {} if loading is None else loading.slots
            return [coming[e] if e in coming else table[e] for e in ids], coming.keys()
        except BaseException:
            self._recover()
            raise

    def finish_few(self) -> None:
        """Return when what `claim_few` left behind is there; raises as `claim`."""
        try:
            if self._loading is not None:
                self._finish(self._loading)
        except BaseException:
            self._recover()
            raise
        if self._debug:
            self.check()

    def _begin(self, bank: Bank, layer: int, keys: Set[Key], ahead: bool = False) -> Loading | None:
        """Count hits as used, and start to read what is missing."""
        table = bank.tables[layer]
        if any([table[e] < 0 for _, e in keys]):
            self._settle()  # may lose what is in memory: look again
            if bank.bets:
                self._land(bank, layer, [e for _, e in keys])
        self._claimed = keys
        missing = []
        for key in keys:  # hits count as used before any miss evicts
            if table[key[1]] < 0:
                missing.append(key[1])
            elif key not in bank.pinned:
                bank.policy.touch(key)
        if not missing:
            self.stats.layers[layer].hits += len(keys)
            return None
        loading = self._start(bank, layer, missing, ahead)
        loading.hits = len(keys) - len(missing)
        return loading

    def _start(
        self, bank: Bank, layer: int, experts: Sequence[int], ahead: bool = False
    ) -> Loading:
        """Start to read missing experts into slots, evicting others than those just claimed.

        Nothing may still read the slots.
        """
        if self._loading is not None:  # as in claim_few
            self._recover()
        self._loading = loading = Loading(bank, layer)
        for e in experts:
            bet = bank.bets.get((layer, e))
            # Given up, and then an interrupt came; or it failed, which says nothing of a next time.
            if bet is not None and (bet.given_up or bet.reading.error is not None):
                self._drop(bank, (layer, e))
            elif bet is not None:
                loading.slots[e] = bet.slot
                loading.readings.append(bet.reading)
                del bank.bets[layer, e]
        new = {}
        for e in experts:
            if e not in loading.slots:
                loading.slots[e] = new[e] = self._take_slot(bank, self._claimed, demand=True)
        if new:
            requests = self._requests(bank, layer, new)
            reading = self.reader.reading(requests, apart=self.layouts[layer].apart)
            loading.readings.insert(0, reading)
            if ahead or len(loading.readings) > 1:
                self.reader.start(reading)
        return loading

    def _finish(self, loading: Loading) -> None:
        """Wait until experts are there, and enter them into the table."""
        self.reader.finish(*loading.readings)
        for e, slot in loading.slots.items():
            self._enter(loading.bank, loading.layer, e, slot)
        stats = self.stats.layers[loading.layer]
        stats.hits += loading.hits
        stats.misses += len(loading.slots)
        stats.missed_calls += 1
        self._loading = None

    def _enter(self, bank: Bank, layer: int, expert: int, slot: int) -> None:
        if self._check:
            self._compare(layer, expert, self._memory(bank).rows(slot))
        bank.place(layer, expert, slot)
        bank.policy.touch((layer, expert))

    def _recover(self) -> None:
        """After a failed read, or an interruption anywhere: what was being read is not there."""
        loading = self._loading
        if loading is not None:
            for reading in loading.readings:
                self.reader.cancel(reading)
            for e in loading.slots:
                loading.bank.place(loading.layer, e, -1)
                loading.bank.policy.discard((loading.layer, e))
        self._repair(None)
        self._loading = None  # last: an interrupt on the way leaves it to the next claim

    def _repair(self, loading: Loading | None) -> None:
        """Make all that follows from the tables follow again; `loading` goes on."""
        for bank in self._banks:
            coming = loading is not None and loading.bank is bank
            bank.repair(loading.slots.values() if loading is not None and coming else ())
        self._hot = {key for key in self._hot if key in self._bank_of[key[0]].pinned}

    def _take_slot(self, bank: Bank, keep: Set[Key], demand: bool) -> int:
        """A slot to read into: a free one, one of a bet that was not needed, or an evicted one.

        A demand may take that of any bet. Raises LookupError if there is none.
        """
        if not bank.free:
            bets = bank.bets.items()
            passed = [k for k, b in bets if b.judged and b.reading.done and k not in keep]
            over = passed[0] if passed else None
            if over is None:
                try:
                    self._evict(bank, keep)
                except LookupError:  # all others are being bet on
                    if not (demand and bank.bets):
                        raise
                    over = next(iter(bank.bets))
            if over is not None:
                self._drop(bank, over)
        return bank.free.pop()

    def _evict(self, bank: Bank, keep: Set[Key]) -> None:
        key = bank.policy.victim(keep)
        layer, expert = key
        slot = bank.tables[layer][expert]
        bank.policy.discard(key)  # first: what is not there must never be a victim
        bank.place(layer, expert, -1)
        bank.free.append(slot)
        self.stats.evictions += 1

    def _requests(self, bank: Bank, layer: int, slots: dict[int, int]) -> list[ReadRequest]:
        """What is to be read for experts of `layer` to come into slots (expert -> slot)."""
        layout, memory = self.layouts[layer], self._memory(bank)
        return [r for e, slot in slots.items() for r in layout.reads(e, memory.rows(slot))]

    def _compare(self, layer: int, expert: int, rows: list[memoryview]) -> None:
        """Compare the bytes of an expert, just read, with its checksum."""
        layout = self.layouts[layer]
        if (layer, expert) in self._checked or layout.checksums is None:
            return
        crc, uploader = 0, self.reader.uploader
        for row in rows:
            crc = zlib.crc32(row if uploader is None else uploader.download(row), crc)
        if crc != layout.checksums[expert]:
            raise VaultError(
                f"the record of {layout.name(expert)} of {layout.path} is damaged. "
                "Make the vault again (smoe-mlx shatter)."
            )
        self._checked.add((layer, expert))

    # ---- bets whose layer has come -----------------------------------------------------------

    def _land(self, bank: Bank, layer: int, needed: Sequence[int]) -> None:
        """A layer's turn has come: enter its bets that are there, drop those not even begun."""
        judge, stats = self._judges[layer], self.stats.bets
        for key in [k for k in bank.bets if k[0] == layer]:
            bet, expert = bank.bets[key], key[1]
            judge.saw(bet, expert in needed)
            if expert not in needed:
                if not bet.reading.begun:
                    self._drop(bank, key)
            elif bet.reading.done and bet.reading.error is None and not bet.given_up:
                stats.used += 1
                del bank.bets[key]  # if anything fails from here on, `_recover` frees its slot
                self.reader.finish(bet.reading)
                self._enter(bank, layer, expert, bet.slot)
            else:
                stats.late += 1

    def _drop(self, bank: Bank, key: Key) -> None:
        """Give up a bet and free its slot."""
        bet = bank.bets[key]
        bet.given_up = True  # first: what is not read any more must never be taken for read
        if bet.reading.begun:
            self.stats.bets.wasted += 1
        else:
            self.stats.bets.cancelled += 1
        self.reader.cancel(bet.reading)
        del bank.bets[key]
        bank.free.append(bet.slot)

    # ---- slot lifetime -----------------------------------------------------------------------

    def hold(self, y: mx.array) -> None:
        """Rewrite no slot before `y`, computed from this cache's arrays, has been evaluated."""
        self._pending.append(y)
        self._holders.add(threading.get_ident())

    def settle(self) -> None:
        """Evaluate all outputs that still read from slots."""
        with self.lock:
            self._settle()

    def look_after(self) -> None:
        """Now and then let go of held outputs, nearly all of which have been evaluated by now."""
        if len(self._pending) >= SETTLE_EVERY:
            self._settle()

    def _settle(self) -> None:
        if not self._pending or self._evaluate():
            return
        # They may yet be evaluated, and then their slots must have their bytes: leave the memory
        # to them, and start with new.
        try:
            self.stats.abandoned += 1
            self._abandon([b for b in self._banks if not b.holds_all], drop_pending=True)
        except BaseException:
            self._recover()
            raise

    def _evaluate(self) -> bool:
        """Evaluate all held outputs. False if that cannot be done here.

        Those of another thread may be under evaluation there, and MLX does not bear two threads at
        that; or they never were, and no other thread can. Or they cannot be evaluated at all.
        """
        others = self._holders - {threading.get_ident()}
        if others and not others.isdisjoint(map(_ident, threading.enumerate())):
            return False
        try:
            mx.eval(self._pending)
        except Exception:
            return False
        self._pending = []
        self._holders.clear()
        return True

    def _abandon(self, banks: Sequence[Bank], drop_pending: bool = False) -> None:
        """Leave the memory of banks to whatever may still read it, and start with new memory."""
        interrupt = None
        while True:
            try:
                if self._loading is not None:  # an interrupt left it: its slots are of this memory
                    self._recover()
                for bank in banks:
                    for key in list(bank.bets):
                        self._drop(bank, key)
                    bank.forget()
                if drop_pending:
                    self._pending = []
                    self._holders.clear()
                break
            except KeyboardInterrupt as e:  # not half of it
                interrupt = e
        if interrupt is not None:
            raise interrupt
        for bank in banks:
            self._load_pins(bank)

    def _load_pins(self, bank: Bank) -> None:
        """Read pinned experts that are not in memory. (A bank that holds all reads its layers.)

        What cannot be read is pinned no more: a claim that needs it will say why.
        """
        pinned = () if bank.holds_all else bank.pinned
        lacking = [(i, e) for i, e in pinned if bank.tables[i][e] < 0]
        try:
            for layer in {layer for layer, _ in lacking}:
                experts = [e for i, e in lacking if i == layer]
                self._finish(self._start(bank, layer, experts))
                for e in experts:
                    bank.policy.discard((layer, e))
        except SmoeError:
            self._recover()

    # ---- self-check --------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless tables, free slots and pins agree."""
        for bank in self._banks:
            if bank.holds_all:
                continue
            used = [slot for table in bank.tables.values() for slot in table if slot >= 0]
            used += [bet.slot for bet in bank.bets.values()]
            assert len(set(used)) == len(used), "two experts are in one slot"
            assert len(set(bank.free)) == len(bank.free), "a slot is free twice"
            assert not set(bank.free) & set(used), "a free slot is in use"
            assert len(bank.free) + len(used) == bank.slots, "slots were lost"
            for layer, table in bank.tables.items():
                for e, slot in enumerate(table):
                    absent = slot < 0 and (layer, e) in bank.policy
                    assert not absent, f"{(layer, e)} could be evicted, but is not in memory"
            for key in bank.owners().values():
                assert (key in bank.pinned) != (key in bank.policy), f"{key} is lost to eviction"
            assert bank.pinned <= set(bank.owners().values()), "a pinned expert is not in memory"
