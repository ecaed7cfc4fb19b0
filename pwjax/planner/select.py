"""Greedy selection of one-bit steps by damage a slot, in either direction, without a loop over steps.

A linear-block's steps form a chain: b -> b - 1 becomes available when b + 1 -> b has been taken. The greedy of the
paper (always the cheapest available step) is a heap that is fed as chains advance. Its pop order is known in closed
form: a step that is cheaper than one before it in its chain is popped right after that one, so sorting by the
*running maximum* of the ratios along each chain (ties by linear-block, then by place in the chain) gives the same
order. For raises, the dearest step goes first and the key is the running minimum. `tests/planner/test_select.py`
holds both against the heap.

Ratios are compared as float32, so that ratio and position fit one 64-bit integer and one plain sort orders both, the
same on every machine: equal ratios go by index.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pwjax.planner.types import MIN_BITS, NUM_STEPS, BoolArray, FloatArray, IntArray

_POSITION_BITS = 32  # of a sort key: linear-block << 3 | place in its chain
_PLACE_BITS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """One-bit steps in the order in which they are taken.

    Attributes:
        index: int64 [m], linear-block.
        column: int64 [m]; the step is between 4 + column and 3 + column bits.
    """

    index: IntArray
    column: IntArray

    def __len__(self) -> int:
        return self.index.shape[0]

    def where(self, mask: BoolArray | IntArray) -> Steps:
        """The steps under a mask or index array, in order."""
        return Steps(self.index[mask], self.column[mask])

    def then(self, other: Steps) -> Steps:
        """These steps, then the other ones."""
        return Steps(np.concatenate([self.index, other.index]), np.concatenate([self.column, other.column]))


def step_ratio(damage: FloatArray, slots: IntArray) -> FloatArray:
    """float32 [n, 5]: d / Delta, the number that the greedy compares.

    Widths that a store has no pages for take no slots; their steps are never available, but must not divide by 0.
    """
    return (damage / np.maximum(slots, 1)).astype(np.float32)


def lowering_order(ratio: FloatArray, bits: IntArray, floor: IntArray) -> Steps:
    """All steps down from `bits` to `floor`, in the greedy's order: cheapest available first.

    Args:
        ratio: float32 [n, 5] from `step_ratio`, not negative.
        bits: [n], where chains begin.
        floor: [n], where they end; a linear-block with `floor >= bits` has no steps.
    """
    columns = np.ascontiguousarray(ratio.T)[::-1]  # [5, n], in the order in which a chain meets them
    step_bits = np.arange(NUM_STEPS - 1, -1, -1, dtype=np.int8)[:, None] + np.int8(MIN_BITS)  # bits after the step
    available = (step_bits < bits) & (step_bits >= np.asarray(floor, np.int8))
    key = np.where(available, columns, np.float32(0.0))
    for place in range(1, NUM_STEPS):  # four long operations; accumulate along a short axis is slow
        np.maximum(key[place], key[place - 1], out=key[place])
    index, place = _sorted_positions(key.view(np.uint32), available)
    return Steps(index, NUM_STEPS - 1 - place)


def raising_order(ratio: FloatArray, bits: IntArray, top: IntArray) -> Steps:
    """All steps up from `bits` to `top`, in the greedy's order: most damage avoided a slot first.

    Args:
        ratio: float32 [n, 5] from `step_ratio`, not negative.
        bits: [n], where chains begin.
        top: [n], where they end; a linear-block with `top <= bits` has no steps.
    """
    columns = np.ascontiguousarray(ratio.T)
    step_bits = np.arange(NUM_STEPS, dtype=np.int8)[:, None] + np.int8(MIN_BITS)  # bits before the step
    available = (step_bits >= bits) & (step_bits < np.asarray(top, np.int8))
    key = np.where(available, columns, np.float32(np.inf))
    for place in range(1, NUM_STEPS):
        np.minimum(key[place], key[place - 1], out=key[place])
    # Descending order: complement of the bit pattern, which rises with a float that isn't negative.
    index, place = _sorted_positions(~key.view(np.uint32), available)
    return Steps(index, place)


def _sorted_positions(key: IntArray, available: BoolArray) -> tuple[IntArray, IntArray]:
    """Linear-block and place in its chain of the available entries of [5, n], by key, linear-block, place."""
    count = available.shape[1]
    entries = np.flatnonzero(available)
    place = entries // count
    position = ((entries - place * count) << _PLACE_BITS) | place
    packed = (key.reshape(-1)[entries].astype(np.uint64) << np.uint64(_POSITION_BITS)) | position.astype(np.uint64)
    position = (np.sort(packed) & np.uint64((1 << _POSITION_BITS) - 1)).astype(np.int64)
    return position >> _PLACE_BITS, position & ((1 << _PLACE_BITS) - 1)


def prefix_for(slots: IntArray, target: int) -> int:
    """How many of the steps, taken in order, release at least `target` slots; all of them if they can't."""
    if target <= 0:
        return 0
    return min(int(np.searchsorted(np.cumsum(slots), target)) + 1, slots.shape[0])


def fill(index: IntArray, cost: IntArray, capacity: int) -> BoolArray:
    """Which steps of an order to take so that their cost stays within a capacity.

    Takes steps in order; one that doesn't fit is passed over together with the rest of its chain, and smaller ones
    behind it may still use what is left.

    Args:
        index: [m], linear-block of each step, chains in order.
        cost: [m], above 0.

    Returns:
        bool [m].
    """
    taken = np.zeros(index.shape[0], bool)
    rest = np.arange(index.shape[0])
    first_misfit = np.full(int(index.max()) + 1 if index.size else 0, index.shape[0])
    # Every round removes all steps as dear as the one that didn't fit: at most one round for each distinct cost.
    while rest.size:
        total = np.cumsum(cost[rest])
        fits = int(np.searchsorted(total, capacity, side="right"))
        taken[rest[:fits]] = True
        capacity -= int(total[fits - 1]) if fits else 0
        rest = rest[fits:]
        misfits = rest[cost[rest] > capacity]
        np.minimum.at(first_misfit, index[misfits], misfits)
        rest = rest[rest < first_misfit[index[rest]]]
    return taken
