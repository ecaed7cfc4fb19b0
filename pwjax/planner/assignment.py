"""Bits to start serving with: greedy on sensitivity alone, random raises, or one width for all.

Traffic plays no part here: nothing has been routed yet. All assignments start from all-3, the base pages.
"""

from __future__ import annotations

import numpy as np

from pwjax.errors import UserError
from pwjax.planner.select import fill, raising_order, step_ratio
from pwjax.planner.types import MAX_BITS, MIN_BITS, NUM_BITS, NUM_STEPS, FloatArray, IntArray, top_bits

_TINY = 1e-30  # so that a step without any damage still has an order, by size


def mean_bits(bits: IntArray, weights: IntArray) -> float:
    """Sum of q N K over sum of N K.

    Args:
        bits: [n], q.
        weights: [n], N * K.
    """
    total = np.asarray(weights, np.int64)
    return float((total * bits).sum() / total.sum())


def assigned_slots(bits: IntArray, slots: IntArray) -> int:
    """Slots that an assignment occupies: the sum of M_i^q.

    Args:
        bits: [n].
        slots: [n, 6].
    """
    return int(slots[np.arange(slots.shape[0]), np.asarray(bits, np.int64) - MIN_BITS].sum())


def initial_bits(
    sensitivity: FloatArray, slots: IntArray, weights: IntArray, capacity_slots: int, max_bits: int, slot_bytes: int = 0
) -> IntArray:
    """The best bits that fit a capacity: greedy on sensitivity, most damage avoided a slot first.

    Args:
        sensitivity: [n, 6], s_i^b.
        slots: [n, 6], M_i^b.
        weights: [n], N * K.
        capacity_slots: what all weight pages together may occupy.
        max_bits: most bits of any linear-block.
        slot_bytes: see `TableView.slot_bytes`.

    Returns:
        int8 [n].

    Raises:
        UserError: not even 3 bits fit.
    """
    _check_max_bits(max_bits)
    base = int(slots[:, 0].sum())
    if base > capacity_slots:
        raise UserError(
            f"memory budget: expert weights need {base} slots at {MIN_BITS} bits, {capacity_slots} are left for them; "
            "raise --memory-budget or lower --max-model-len or --max-num-seqs"
        )
    top = top_bits(slots, weights, max_bits, slot_bytes)
    return _raise_greedily(sensitivity, slots, top, np.diff(slots, axis=1), capacity_slots - base)


def static_bits(
    sensitivity: FloatArray, slots: IntArray, weights: IntArray, mean: float, max_bits: int, slot_bytes: int = 0
) -> IntArray:
    """`static:<mean>`: as `initial_bits`, up to a mean of bits instead of a capacity, less than one step below it.

    `static:<budget>` is `initial_bits` with the capacity that the budget leaves.

    Raises:
        UserError: the mean is outside what 3 to `max_bits` bits can give.
    """
    _check_max_bits(max_bits)
    top = top_bits(slots, weights, max_bits, slot_bytes)
    room = _mean_room(mean, weights, top)
    cost = np.repeat(np.asarray(weights, np.int64)[:, None], NUM_STEPS, axis=1)
    return _raise_greedily(sensitivity, slots, top, cost, room)


def random_bits(
    seed: int, slots: IntArray, weights: IntArray, mean: float, max_bits: int, slot_bytes: int = 0
) -> IntArray:
    """`random:<mean>`, the control: from all-3, one more bit for a random linear-block that has room, again and again.

    Stops at the first raise that would exceed the mean, so the result is less than one step below it. The same seed
    gives the same bits.

    Raises:
        UserError: the mean is outside what 3 to `max_bits` bits can give.
    """
    _check_max_bits(max_bits)
    top = top_bits(slots, weights, max_bits, slot_bytes).astype(np.int64)
    room = _mean_room(mean, weights, top)
    bits = np.full(slots.shape[0], MIN_BITS, np.int64)
    open_blocks = np.flatnonzero(bits < top)
    count = open_blocks.size
    rng = np.random.default_rng(seed)
    while count:
        place = int(rng.integers(count))
        block = int(open_blocks[place])
        if weights[block] > room:
            break
        bits[block] += 1
        room -= int(weights[block])
        if bits[block] == top[block]:
            count -= 1
            open_blocks[place] = open_blocks[count]
    return bits.astype(np.int8)


def uniform_bits(num_linear_blocks: int, bits: int) -> IntArray:
    """`uniform:b`: int8 [n], all the same."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UserError(f"--method uniform:{bits}: bits must be {MIN_BITS} to {MAX_BITS}")
    return np.full(num_linear_blocks, bits, np.int8)


def capacity_for_mean_bits(
    sensitivity: FloatArray, slots: IntArray, weights: IntArray, mean: float, max_bits: int, slot_bytes: int = 0
) -> int:
    """`--mean-bits`: slots that the weight pages of `static:<mean>` occupy; the budget derives from it."""
    return assigned_slots(static_bits(sensitivity, slots, weights, mean, max_bits, slot_bytes), slots)


def _raise_greedily(sensitivity: FloatArray, slots: IntArray, top: IntArray, cost: IntArray, room: int) -> IntArray:
    """From all-3, the greedy by damage avoided a slot; each step also costs `cost[i, j]` of `room`."""
    if sensitivity.shape != slots.shape or slots.shape[1] != NUM_BITS:
        raise ValueError(
            f"sensitivity has shape {sensitivity.shape} and slots {slots.shape}; both must be [n, {NUM_BITS}]"
        )
    s = np.asarray(sensitivity, np.float64)
    avoided = np.maximum(s[:, :-1] - s[:, 1:], _TINY)
    base = np.full(slots.shape[0], MIN_BITS, np.int8)
    order = raising_order(step_ratio(avoided, np.diff(slots, axis=1)), base, top)
    taken = order.where(fill(order.index, cost[order.index, order.column], room))
    return (base + np.bincount(taken.index, minlength=base.size)).astype(np.int8)


def _mean_room(mean: float, weights: IntArray, top: IntArray) -> int:
    """How many weights may get one more bit than 3, counted with multiplicity, for a mean."""
    highest = mean_bits(top, weights)
    if not MIN_BITS <= mean <= highest:
        raise UserError(f"mean bits is {mean}; it must be {MIN_BITS} to {highest:g} (raise --max-bits for more)")
    total = int(np.asarray(weights, np.int64).sum())
    # The small addition keeps a mean that is met exactly from being lost to rounding of the product.
    return int((mean - MIN_BITS) * total + 1e-6)


def _check_max_bits(max_bits: int) -> None:
    if not MIN_BITS <= max_bits <= MAX_BITS:
        raise UserError(f"--max-bits is {max_bits}; it must be {MIN_BITS} to {MAX_BITS}")
