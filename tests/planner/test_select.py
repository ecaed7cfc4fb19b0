"""The sorted orders equal the heap greedy's, ties and non-convex chains included; prefixes and fills."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from planner_cases import heap_lowering, heap_raising

from pwjax.planner.select import fill, lowering_order, prefix_for, raising_order, step_ratio

N = 7
# Few distinct values, so that ties and chains that fall as well as rise are common.
RATIOS = hnp.arrays(np.float32, (N, 5), elements=st.sampled_from([0.0, 1.0, 2.0, 2.5, 3.0, 1e-20, 7.0]))
BITS = hnp.arrays(np.int8, N, elements=st.integers(3, 8))


@given(RATIOS, BITS, BITS)
def test_lowering_order_is_the_heap_greedy(ratio: np.ndarray, bits: np.ndarray, floor: np.ndarray) -> None:
    order = lowering_order(ratio, bits, floor)
    assert list(zip(order.index.tolist(), (order.column + 3).tolist(), strict=True)) == heap_lowering(
        ratio, bits, floor
    )


@given(RATIOS, BITS, BITS)
def test_raising_order_is_the_heap_greedy(ratio: np.ndarray, bits: np.ndarray, top: np.ndarray) -> None:
    order = raising_order(ratio, bits, top)
    assert list(zip(order.index.tolist(), (order.column + 3).tolist(), strict=True)) == heap_raising(ratio, bits, top)


def test_a_cheap_step_behind_a_dear_one_waits_for_it() -> None:
    # 5 -> 4 costs 5 and 4 -> 3 costs 1 in linear-block 0; linear-block 1 has one step of 3.
    ratio = np.array([[1.0, 5.0, 0, 0, 0], [3.0, 0, 0, 0, 0]], np.float32)
    order = lowering_order(ratio, np.array([5, 4]), np.array([3, 3]))
    assert order.index.tolist() == [1, 0, 0]
    assert (order.column + 3).tolist() == [3, 4, 3]


def test_ratio_is_damage_a_slot() -> None:
    np.testing.assert_array_equal(
        step_ratio(np.array([[6.0, 1.0]]), np.array([[3, 4]])), np.array([[2.0, 0.25]], np.float32)
    )


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(-5, 900))
def test_prefix_is_the_shortest_that_meets_the_target(slots: list[int], target: int) -> None:
    count = prefix_for(np.array(slots, np.int64), target)
    assert sum(slots[:count]) >= target or count == len(slots)
    assert count == 0 or sum(slots[: count - 1]) < target


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), max_size=25), st.integers(0, 300))
def test_fill_takes_steps_in_order_and_passes_over_chains_that_do_not_fit(
    steps: list[tuple[int, int]], capacity: int
) -> None:
    index, cost = np.array([s[0] for s in steps], int), np.array([s[1] for s in steps], int)
    taken, room, closed = [], capacity, set()
    for block, price in steps:  # the same rule, one step at a time
        fits = block not in closed and price <= room
        taken.append(fits)
        room -= price if fits else 0
        if not fits:
            closed.add(block)
    assert fill(index, cost, capacity).tolist() == taken
