"""Slots of the arena: who owns which. Pure bookkeeping; nothing here touches the device.

Invariant: every slot but slot 0 is free or has exactly one owner, and the counts per owner add up to the arena.
Slot 0 is the null slot: nothing ever lives there, so a table entry that was never written is harmless to read.
"""

from __future__ import annotations

import enum

import numpy as np


class Owner(enum.IntEnum):
    """What a slot is used for."""

    FREE = 0
    WEIGHTS = 1
    KV = 2
    IN_FLIGHT = 3  # belongs to the mover until its copy has been committed
    NULL = 4


class SlotAllocator:
    """A stack of free slots. Allocation is O(slots asked for); there is nothing to fragment.

    Args:
        num_slots: slots of the arena, the null slot included.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"an arena of {num_slots} slots has no room beside the null slot")
        self.num_slots = num_slots
        self._owner = np.zeros(num_slots, np.uint8)
        self._owner[0] = Owner.NULL
        self._stack = np.arange(num_slots - 1, 0, -1, dtype=np.int32)
        self._free = num_slots - 1
        self._counts = dict.fromkeys(Owner, 0)

    @property
    def usable_slots(self) -> int:
        return self.num_slots - 1

    @property
    def free_slots(self) -> int:
        return self._free

    def used_slots(self, owner: Owner) -> int:
        return self._counts[owner]

    def allocate(self, count: int, owner: Owner) -> np.ndarray:
        """Takes `count` free slots: int32 `[count]`. Raises MemoryError, taking none, if fewer are free."""
        if count > self._free:
            raise MemoryError(f"{count} slots asked for, {self._free} of {self.usable_slots} are free")
        slots = self._stack[self._free - count : self._free].copy()
        self._free -= count
        self._owner[slots] = owner
        self._counts[owner] += count
        return slots

    def release(self, slots: np.ndarray, owner: Owner) -> None:
        """Gives slots back. Raises ValueError if one of them is not `owner`'s (a double free, say)."""
        self._check(slots, owner)
        self._owner[slots] = Owner.FREE
        self._counts[owner] -= len(slots)
        self._stack[self._free : self._free + len(slots)] = slots[::-1]
        self._free += len(slots)

    def transfer(self, slots: np.ndarray, source: Owner, target: Owner) -> None:
        """Changes the owner of slots in use."""
        self._check(slots, source)
        self._owner[slots] = target
        self._counts[source] -= len(slots)
        self._counts[target] += len(slots)

    def _check(self, slots: np.ndarray, owner: Owner) -> None:
        if len(slots) and not (self._owner[slots] == owner).all():
            wrong = slots[self._owner[slots] != owner][0]
            raise ValueError(f"slot {wrong} belongs to {Owner(self._owner[wrong]).name}, not to {owner.name}")
        if len(np.unique(slots)) != len(slots):
            raise ValueError("a slot is listed twice")
