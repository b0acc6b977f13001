"""Which slot each expert of a bank is in, and which experts are on their way."""

from collections.abc import Collection
from dataclasses import dataclass, field

import mlx.core as mx

from ..store.layout import ExpertLayout
from ..store.streamer import Reading
from .bank import SlotBank
from .bets import Bet
from .policy import Key, Policy

Arrays = dict[tuple[str, str], mx.array]  # (projection, kind) -> [slots, ...]


class Bank:
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
class Loading:
    """Experts of one layer that are being read: their slots, and the readings to wait for."""

    bank: Bank
    layer: int
    slots: dict[int, int] = field(default_factory=dict)  # expert -> slot
    readings: list[Reading] = field(default_factory=list)
    hits: int = 0
