"""Bits to start with: within the capacity or the mean, better than chance, seeded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import Case, cases, heap_raising, make_case, occupied

from pwjax.errors import UserError
from pwjax.planner import (
    assigned_slots,
    capacity_for_mean_bits,
    initial_bits,
    mean_bits,
    random_bits,
    static_bits,
    uniform_bits,
)


def test_mean_is_weighted_by_size() -> None:
    assert mean_bits(np.array([3, 6], np.int8), np.array([200, 100])) == 4.0


@given(cases(), st.integers(0, 3000))
def test_initial_bits_are_the_greedy_within_the_capacity(case: Case, more: int) -> None:
    table, s = case.table, case.calibration.sensitivity
    capacity = int(table.slots[:, 0].sum()) + more
    bits = initial_bits(s, table.slots, table.weights, capacity, table.max_bits)
    assert occupied(table, bits) == assigned_slots(bits, table.slots) <= capacity
    ratio = (np.maximum(s[:, :-1] - s[:, 1:], 1e-30) / np.diff(table.slots, axis=1)).astype(np.float32)
    expected, left, closed = np.full(len(bits), 3), more, set()
    for i, before in heap_raising(ratio, expected.copy(), np.full(len(bits), table.max_bits)):
        cost = int(table.slots[i, before - 2] - table.slots[i, before - 3])
        if i in closed or cost > left:
            closed.add(i)
            continue
        expected[i] += 1
        left -= cost
    np.testing.assert_array_equal(bits, expected)


def test_initial_bits_refuse_a_capacity_below_three_bits() -> None:
    case = make_case(0)
    base = int(case.table.slots[:, 0].sum())
    with pytest.raises(UserError, match=f"need {base} slots at 3 bits"):
        initial_bits(case.calibration.sensitivity, case.table.slots, case.table.weights, base - 1, 6)


@given(cases(), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_means_are_hit_within_one_step(case: Case, share: float, seed: int) -> None:
    table = case.table
    mean = 3 + share * (table.max_bits - 3)
    step = table.weights.max() / table.weights.sum()
    static = static_bits(case.calibration.sensitivity, table.slots, table.weights, mean, table.max_bits)
    random = random_bits(seed, table.slots, table.weights, mean, table.max_bits)
    for bits in (static, random):
        assert bits.dtype == np.int8 and bits.min() >= 3 and bits.max() <= table.max_bits
        assert mean - step < mean_bits(bits, table.weights) <= mean + 1e-6
    capacity = capacity_for_mean_bits(case.calibration.sensitivity, table.slots, table.weights, mean, table.max_bits)
    assert capacity == occupied(table, static)


def test_random_is_seeded_and_spreads_over_all() -> None:
    case = make_case(0, layers=4, experts=8)
    slots, weights = case.table.slots, case.table.weights
    assert np.array_equal(random_bits(3, slots, weights, 3.5, 6), random_bits(3, slots, weights, 3.5, 6))
    draws = np.array([random_bits(seed, slots, weights, 3.5, 6) for seed in range(200)])
    assert len({tuple(draw) for draw in draws}) == 200
    assert np.all(np.abs(draws.mean(axis=0) - 3.5) < 0.25)  # 5 standard errors of a mean of 200


def test_static_is_better_than_random_at_the_same_mean() -> None:
    case = make_case(0, layers=4, experts=8)
    s = np.minimum.accumulate(case.calibration.sensitivity, axis=1)
    slots, weights, rows = case.table.slots, case.table.weights, np.arange(s.shape[0])
    for mean in (3.25, 3.5, 4.0):
        static = s[rows, static_bits(s, slots, weights, mean, 6) - 3].sum()
        random = [s[rows, random_bits(seed, slots, weights, mean, 6) - 3].sum() for seed in range(5)]
        assert static < min(random)


def test_extremes() -> None:
    case = make_case(4)
    s, slots, weights = case.calibration.sensitivity, case.table.slots, case.table.weights
    assert set(static_bits(s, slots, weights, 3, 6).tolist()) == {3}
    assert set(static_bits(s, slots, weights, 6, 6).tolist()) == {6}
    assert set(random_bits(0, slots, weights, 6, 6).tolist()) == {6}
    assert set(initial_bits(s, slots, weights, 10**9, 5).tolist()) == {5}
    assert uniform_bits(4, 8).tolist() == [8] * 4


def test_refuses_means_and_widths_that_cannot_be() -> None:
    case = make_case(4)
    s, slots, weights = case.calibration.sensitivity, case.table.slots, case.table.weights
    with pytest.raises(UserError, match=r"mean bits is 6\.5"):
        static_bits(s, slots, weights, 6.5, 6)
    with pytest.raises(UserError, match=r"mean bits is 2\.9"):
        random_bits(0, slots, weights, 2.9, 6)
    with pytest.raises(UserError, match="uniform:9"):
        uniform_bits(4, 9)
    with pytest.raises(UserError, match="--max-bits is 9"):
        initial_bits(s, slots, weights, 10**9, 9)
