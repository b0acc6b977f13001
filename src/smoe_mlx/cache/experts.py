"""SharedExpertCache: which experts are in memory, who is evicted, when a slot may be rewritten.

This is the one place that decides slot lifetime. MLX is lazy: an operation sees a slot's bytes when
it is evaluated, not when it is built. So a slot is rewritten only after every output that was
computed from this cache has been evaluated (`hold`, `_settle`).
"""

import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..errors import BudgetError, SmoeError, VaultError
from ..store.layout import ExpertLayout
from ..store.reader import ExpertReader, ReadRequest
from ..store.streamer import Reading
from .bank import SlotBank
from .bets import Bet, BetStats, Judge
from .policy import LRU, Key, Policy
from .usage import Usage

Arrays = dict[tuple[str, str], mx.array]
SETTLE_EVERY = 8  # outputs that are held before a look at which are evaluated
GIVE_WAY_SECONDS = 0.001  # after each prewarmed expert: whoever waits for the lock takes it


@dataclass
class LayerStats:
    """Counters of one layer.

    A hit or a miss is one distinct expert that one call of the layer needed. Layers that hold all
    their experts are read as a whole and look nothing up: only `resident_calls` counts there.
    """

    hits: int = 0
    misses: int = 0
    missed_calls: int = 0
    calls: int = 0
    waves: int = 0
    resident_calls: int = 0


@dataclass
class CacheStats:
    """Counters since the cache was made."""

    layers: list[LayerStats]
    evictions: int = 0
    abandoned: int = 0
    prewarmed: int = 0
    bets: BetStats = field(default_factory=BetStats)

    @property
    def hits(self) -> int:
        return sum(x.hits for x in self.layers)

    @property
    def misses(self) -> int:
        return sum(x.misses for x in self.layers)

    @property
    def missed_calls(self) -> int:
        """Layer calls that lacked at least one expert."""
        return sum(x.missed_calls for x in self.layers)


class _Bank:
    """A slot bank, shared by the layers whose experts have one geometry, and its bookkeeping.

    `tables` and `bets` are the truth; `free` and `policy` follow from them and can be made anew.
    """

    def __init__(self, layouts: dict[int, ExpertLayout], slots: int, policy: Policy):
        self.layouts, self.slots, self.policy = layouts, slots, policy
        # layer -> [E]: the slot of each expert, or -1. Lists: faster than arrays for a few ids.
        self.tables = {i: [-1] * x.num_experts for i, x in layouts.items()}
        self.lookups: dict[int, mx.array] = {}  # layer -> its table for graphs, while it holds
        self.pinned: set[Key] = set()
        self.bets: dict[Key, Bet] = {}
        self.landed: set[Key] = set()  # bets that were entered before anybody needed them
        self.forget()

    @property
    def experts(self) -> int:
        return sum(x.num_experts for x in self.layouts.values())

    def place(self, layer: int, expert: int, slot: int) -> None:
        """An expert is in `slot` now, or in none (-1)."""
        self.lookups.pop(layer, None)
        self.tables[layer][expert] = slot

    def forget(self) -> None:
        """Empty, with no memory: it is allocated when it is first needed.

        Tables first: an interrupt must not leave slots of memory that is not there.
        """
        self.lookups.clear()
        for layer, table in self.tables.items():
            for e, slot in enumerate(table):
                if slot >= 0:
                    self.policy.discard((layer, e))
            table[:] = [-1] * len(table)
        self.memory: SlotBank | None = None
        self.resident: dict[int, Arrays] = {}  # layer -> its own rows
        self.holds_all = self.slots >= self.experts
        self.free = list(range(self.slots))[::-1]

    def owners(self) -> dict[int, Key]:
        """slot -> (layer, expert), of the slots in use."""
        return {
            slot: (layer, e)
            for layer, table in self.tables.items()
            for e, slot in enumerate(table)
            if slot >= 0
        }

    def repair(self, coming: Collection[int] = ()) -> None:
        """Make `free`, `policy` and pins follow again after an interruption; `coming` slots are
        read."""
        owners = self.owners()
        self.pinned &= set(owners.values())
        taken = {*owners, *coming, *(bet.slot for bet in self.bets.values())}
        self.free = [slot for slot in range(self.slots)[::-1] if slot not in taken]
        for layer, table in self.tables.items():
            for e, slot in enumerate(table):
                key = (layer, e)
                if slot < 0 or key in self.pinned:
                    self.policy.discard(key)
                elif key not in self.policy:
                    self.policy.touch(key)


@dataclass
class _Loading:
    """Experts of one layer that are being read: their slots, and the readings to wait for."""

    bank: _Bank
    layer: int
    slots: dict[int, int] = field(default_factory=dict)  # expert -> slot
    readings: list[Reading] = field(default_factory=list)
    hits: int = 0


class SharedExpertCache:
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
    """

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
        self._device = mx.default_device()
        self.trace: Callable[[int, np.ndarray], None] | None = None
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
        self._loading: _Loading | None = None
        self._judges = [Judge() for _ in self.layouts]
        self._banks = []
        for layers, slots in banks:
            group = {i: self.layouts[i] for i in layers}
            if len({x.tensors for x in group.values()}) != 1:
                raise ValueError("the layers of one bank must have experts of one geometry")
            if slots < 1:
                raise BudgetError("a bank needs at least one slot")
            total = sum(x.num_experts for x in group.values())
            self._banks.append(_Bank(group, min(slots, total), policy()))
        if sorted(i for b in self._banks for i in b.layouts) != list(range(len(self.layouts))):
            raise ValueError("every layer must belong to one bank")
        self._bank_of = {i: b for b in self._banks for i in b.layouts}
        self._names = [tuple(t.name for t in x.tensors) for x in self.layouts]

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

    def _load_resident(self, bank: _Bank, layer: int) -> Arrays:
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
        # A contiguous slice shares the bank's memory.
        rows = {k: a[start : start + count] for k, a in memory.arrays.items()}
        mx.eval(list(rows.values()))
        bank.tables[layer][:] = range(start, start + count)
        bank.resident[layer] = rows
        return rows

    def _memory(self, bank: _Bank) -> SlotBank:
        if bank.memory is None:
            tensors = next(iter(bank.layouts.values())).tensors
            bank.memory = SlotBank(tensors, bank.slots)
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
            loading = self._begin(bank, layer, experts)
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
            ahead: return while experts are still being read, if some are there and reads are slow.
                `finish_few` must follow, whatever happens.

        Returns:
            (the slot of each id, the experts that are still being read), or None if there is not
            room for all of them at once.
        """
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
            loading = self._begin(bank, layer, [e for _, e in keys], ahead)
            if loading is not None and (not ahead or not loading.hits):
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

    def _begin(
        self, bank: _Bank, layer: int, experts: Sequence[int], ahead: bool = False
    ) -> _Loading | None:
        """Count hits as used, and start to read what is missing."""
        table, stats = bank.tables[layer], self.stats.layers[layer]
        missing = [e for e in experts if table[e] < 0]
        if missing:
            self._settle()  # may lose what is in memory: look again
            if bank.bets:
                self._land(bank, layer, experts)
            missing = [e for e in experts if table[e] < 0]
        self._claimed = {(layer, e) for e in experts}
        for e in experts:  # hits count as used before any miss evicts
            if table[e] >= 0 and (layer, e) not in bank.pinned:
                bank.policy.touch((layer, e))
        if not missing:
            stats.hits += len(experts)
            return None
        loading = self._start(bank, layer, missing, ahead)
        loading.hits = len(experts) - len(missing)
        return loading

    def _start(
        self, bank: _Bank, layer: int, experts: Sequence[int], ahead: bool = False
    ) -> _Loading:
        """Start to read missing experts into slots, evicting others than those just claimed.

        Nothing may still read the slots.
        """
        if self._loading is not None:  # an interrupt came between claim_few and finish_few
            self._recover()
        self._loading = loading = _Loading(bank, layer)
        for e in experts:
            bet = bank.bets.get((layer, e))
            if bet is not None:
                loading.slots[e] = bet.slot
                loading.readings.append(bet.reading)
                del bank.bets[layer, e]
        new = {}
        for e in experts:
            if e not in loading.slots:
                loading.slots[e] = new[e] = self._take_slot(bank, self._claimed, demand=True)
        if new:
            reading = self.reader.reading(self._requests(bank, layer, new))
            loading.readings.insert(0, reading)
            if ahead or len(loading.readings) > 1:
                self.reader.start(reading)
        return loading

    def _finish(self, loading: _Loading) -> None:
        """Wait until experts are there, and enter them into the table."""
        self.reader.finish(*loading.readings)
        for e, slot in loading.slots.items():
            self._enter(loading.bank, loading.layer, e, slot)
        stats = self.stats.layers[loading.layer]
        stats.hits += loading.hits
        stats.misses += len(loading.slots)
        stats.missed_calls += 1
        self._loading = None

    def _enter(self, bank: _Bank, layer: int, expert: int, slot: int) -> None:
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
        self._loading = None  # last: an interrupt on the way leaves it to the next `_start`

    def _repair(self, loading: _Loading | None) -> None:
        """Make all that follows from the tables follow again; `loading` goes on."""
        for bank in self._banks:
            coming = loading is not None and loading.bank is bank
            bank.repair(loading.slots.values() if loading is not None and coming else ())
        self._hot = {key for key in self._hot if key in self._bank_of[key[0]].pinned}

    def _take_slot(self, bank: _Bank, keep: Set[Key], demand: bool) -> int:
        """A slot to read into: a free one, one of a bet that was not needed, or an evicted one.

        A demand may take that of any bet. Raises LookupError if there is none.
        """
        if not bank.free:
            over = next(
                (k for k, b in bank.bets.items() if b.judged and b.reading.done and k not in keep),
                None,
            )
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

    def _evict(self, bank: _Bank, keep: Set[Key]) -> None:
        key = bank.policy.victim(keep)
        layer, expert = key
        slot = bank.tables[layer][expert]
        bank.policy.discard(key)  # first: what is not there must never be a victim
        bank.place(layer, expert, -1)
        bank.free.append(slot)
        self.stats.evictions += 1

    def _requests(self, bank: _Bank, layer: int, slots: dict[int, int]) -> list[ReadRequest]:
        """What is to be read for experts of `layer` to come into slots (expert -> slot)."""
        layout, memory, names = self.layouts[layer], self._memory(bank), self._names[layer]
        requests: list[ReadRequest] = []
        for e, slot in slots.items():
            expert, path = layout.name(e), layout.path
            labels = [(name, expert, path) for name in names]
            files, offsets = layout.file_ids[:, e].tolist(), layout.offsets[:, e].tolist()
            requests += zip(files, offsets, memory.rows(slot), labels, strict=True)
        return requests

    def _compare(self, layer: int, expert: int, rows: list[memoryview]) -> None:
        """Compare the bytes of an expert, just read, with its checksum."""
        layout = self.layouts[layer]
        if (layer, expert) in self._checked or layout.checksums is None:
            return
        crc = 0
        for row in rows:
            crc = zlib.crc32(row, crc)
        if crc != layout.checksums[expert]:
            raise VaultError(
                f"the record of {layout.name(expert)} of {layout.path} is damaged. "
                "Make the vault again (smoe-mlx shatter)."
            )
        self._checked.add((layer, expert))

    # ---- slot numbers in the graph -------------------------------------------------------------

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
        experts = [e for i, e in bank.bets if i == layer]
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
        """Whether `prefetch` for this layer is worth a prediction now."""
        bank = self._bank_of[layer]
        return (
            not bank.holds_all
            and bank.memory is not None
            and self.reader.slow
            and all(bet.reading.done for bet in list(bank.bets.values()))  # else the disk is busy
            and self._judges[layer].allows()
        )

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Start to read those of these experts of a coming layer that are not in memory.

        They take free slots and those of the least recently used experts, but none of the last
        claim; no other read waits for them. Call it between `claim_few` and `hold`.
        """
        bank = self._bank_of[layer]
        if bank.holds_all:  # since `may_bet` was asked
            return
        table = bank.tables[layer]
        busy = self._claimed | bank.bets.keys()
        missing = [e for e in dict.fromkeys(experts) if table[e] < 0 and (layer, e) not in busy]
        if not missing:
            return
        if not self._evaluate():  # not for a bet to decide what becomes of it: see _settle
            return
        keep = self._claimed | {(layer, e) for e in experts}
        try:
            for e in missing:
                slot = self._take_slot(bank, keep, demand=False)
                reading = self.reader.reading(self._requests(bank, layer, {e: slot}), bet=True)
                bank.bets[layer, e] = Bet(slot, reading)
                self.reader.start(reading)
                self.stats.bets.issued += 1
        except LookupError:  # too few slots for bets
            pass
        except BaseException:
            self._repair(self._loading)  # the claim goes on
            raise

    def _land(self, bank: _Bank, layer: int, needed: Sequence[int]) -> None:
        """A layer's turn has come: enter its bets that are there, drop those not even begun."""
        judge, stats = self._judges[layer], self.stats.bets
        for key in [k for k in bank.bets if k[0] == layer]:
            bet, expert = bank.bets[key], key[1]
            judge.saw(bet, expert in needed)
            if expert not in needed:
                if not bet.reading.begun:
                    self._drop(bank, key)
            elif bet.reading.done and bet.reading.error is None:
                stats.used += 1
                del bank.bets[key]  # if anything fails from here on, `_recover` frees its slot
                self.reader.finish(bet.reading)
                self._enter(bank, layer, expert, bet.slot)
            else:
                stats.late += 1

    def _drop(self, bank: _Bank, key: Key) -> None:
        """Give up a bet and free its slot."""
        bet = bank.bets[key]
        if bet.reading.begun:
            self.stats.bets.wasted += 1
        else:
            self.stats.bets.cancelled += 1
        self.reader.cancel(bet.reading)
        del bank.bets[key]
        bank.free.append(bet.slot)

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

    def _read_early(self, bank: _Bank, layer: int, expert: int) -> None:
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
        if others and others & {t.ident for t in threading.enumerate()}:
            return False
        try:
            mx.eval(self._pending)
        except Exception:
            return False
        self._pending = []
        self._holders.clear()
        return True

    def _abandon(self, banks: Sequence[_Bank], drop_pending: bool = False) -> None:
        """Leave the memory of banks to whatever may still read it, and start with new memory."""
        interrupt = None
        while True:
            try:
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

    def _load_pins(self, bank: _Bank) -> None:
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

    # ---- whole layers, one after the other -----------------------------------------------------

    def fits(self, layer: int, beside: int = 0) -> bool:
        """Whether all experts of `layer` can be in memory at once, whatever else is pinned.

        Args:
            beside: others that are in the same bank at the same time.
        """
        bank = self._bank_of[layer]
        return self.layouts[layer].num_experts + beside + len(bank.pinned) <= bank.slots

    def keep_most_used(self, layer: int, ids: np.ndarray) -> None:
        """Let all but the experts most frequent in `ids` go first when others need their slots.

        As many are kept as every layer can while all experts of another one pass through.
        """
        bank = self._bank_of[layer]
        largest = max(x.num_experts for x in bank.layouts.values())
        room = bank.slots - len(bank.pinned)
        # Two pass through at a time where the next one may be read ahead.
        passing = 2 * largest if self.reader.threads and room >= 2 * largest else largest
        keep = (room - passing) // len(bank.layouts)
        if keep > 0:
            counts = np.bincount(ids, minlength=self.layouts[layer].num_experts)
            for e in np.argsort(-counts, kind="stable")[keep:].tolist():
                if (layer, e) in bank.policy:
                    bank.policy.demote((layer, e))

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

    def _resize(self, bank: _Bank, slots: int) -> None:
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
        try:
            bank.memory = bank.memory.moved(slots, rows)
        except BaseException:
            self._abandon([bank])
            raise
        for to, at in enumerate(rows):
            bank.place(*owners[at], to)
        bank.lookups.clear()
        bank.resident.clear()
        bank.slots, bank.holds_all = slots, False
        bank.free = list(range(len(rows), slots))[::-1]
        self._load_pins(bank)
        if self._debug:
            self.check()

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
