"""The slot allocator against a dictionary."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pwjax.paging.allocator import Owner, SlotAllocator

NUM_SLOTS = 24
OWNERS = st.sampled_from([Owner.WEIGHTS, Owner.KV, Owner.IN_FLIGHT])


class AllocatorMachine(RuleBasedStateMachine):
    """Holdings are `(slots, owner)` lists that came from one call."""

    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(NUM_SLOTS)
        self.owners: dict[int, Owner] = {}

    @rule(target=holdings, count=st.integers(0, NUM_SLOTS), owner=OWNERS)
    def allocate(self, count, owner):
        free = NUM_SLOTS - 1 - len(self.owners)
        if count > free:
            with pytest.raises(MemoryError, match=f"{count} slots asked for, {free} of {NUM_SLOTS - 1} are free"):
                self.allocator.allocate(count, owner)
            return []
        slots = self.allocator.allocate(count, owner).tolist()
        assert len(slots) == count and not set(slots) & set(self.owners)
        self.owners |= dict.fromkeys(slots, owner)
        return slots

    @rule(slots=consumes(holdings))
    def release(self, slots):
        owner = self.owners[slots[0]] if slots else Owner.KV
        self.allocator.release(np.array(slots, np.int32), owner)
        for slot in slots:
            del self.owners[slot]
        if slots:
            with pytest.raises(ValueError, match="belongs to FREE"):
                self.allocator.release(np.array(slots, np.int32), owner)

    @rule(target=holdings, slots=consumes(holdings), owner=OWNERS)
    def transfer(self, slots, owner):
        source = self.owners[slots[0]] if slots else Owner.KV
        self.allocator.transfer(np.array(slots, np.int32), source, owner)
        self.owners |= dict.fromkeys(slots, owner)
        return slots

    @rule(slots=holdings, owner=OWNERS)
    def refuse_wrong_owner(self, slots, owner):
        if slots and self.owners[slots[0]] != owner:
            with pytest.raises(ValueError, match=f"slot {slots[0]} belongs to"):
                self.allocator.release(np.array(slots, np.int32), owner)

    @invariant()
    def counts_add_up(self):
        used = [self.allocator.used_slots(owner) for owner in (Owner.WEIGHTS, Owner.KV, Owner.IN_FLIGHT)]
        assert used == [list(self.owners.values()).count(o) for o in (Owner.WEIGHTS, Owner.KV, Owner.IN_FLIGHT)]
        assert self.allocator.free_slots + sum(used) == self.allocator.usable_slots == NUM_SLOTS - 1
        assert 0 not in self.owners


AllocatorMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAllocator = AllocatorMachine.TestCase


def test_alternating_takes_never_fail_while_the_sum_fits():
    """Sizes that differ, an arena at 95%: a pool with fragmentation would fail here."""
    allocator, rng = SlotAllocator(1001), np.random.default_rng(0)
    held: list[np.ndarray] = []
    for _ in range(2000):
        size = int(rng.integers(1, 40))
        while allocator.free_slots < 50 or (held and rng.random() < 0.3):
            allocator.release(held.pop(int(rng.integers(len(held)))), Owner.WEIGHTS)
        held.append(allocator.allocate(size, Owner.WEIGHTS))
    held.append(allocator.allocate(allocator.free_slots, Owner.WEIGHTS))
    assert sorted(np.concatenate(held).tolist()) == list(range(1, 1001))


def test_a_failed_call_changes_nothing():
    allocator = SlotAllocator(8)
    slots = allocator.allocate(3, Owner.KV)
    with pytest.raises(MemoryError):
        allocator.allocate(5, Owner.KV)
    for bad in (np.array([slots[0], slots[0]]), np.array([slots[0], 0])):
        with pytest.raises(ValueError):
            allocator.release(bad, Owner.KV)
    assert (allocator.free_slots, allocator.used_slots(Owner.KV)) == (4, 3)
    allocator.release(slots, Owner.KV)
    assert allocator.free_slots == 7


def test_an_arena_needs_a_slot_beside_the_null_slot():
    with pytest.raises(ValueError, match="arena of 1 slots"):
        SlotAllocator(1)
