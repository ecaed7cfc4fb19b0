"""The table without sensitivity: its totals, and the uniform assignments that it leads to."""

from __future__ import annotations

import numpy as np
from planner_cases import make_case

from pwjax.planner import Ablation, indifferent_sensitivity, initial_bits


def test_removed_names_the_parts() -> None:
    assert Ablation().removed == ()
    assert Ablation(residual=False, movement=False).removed == ("residual", "movement")


def test_totals_of_every_width_are_kept_and_spread_by_size() -> None:
    sensitivity = np.array([[8.0, 4, 2, 1, 0.5, 0.25], [1.0, 0.5, 0.2, 0.1, 0, 0]])
    even = indifferent_sensitivity(sensitivity, np.array([300, 100]))
    np.testing.assert_allclose(even[0], [6.75, 3.375, 1.65, 0.825, 0.375, 0.1875])
    np.testing.assert_allclose(even[0], 3 * even[1])


def test_the_greedy_goes_width_by_width() -> None:
    case = make_case(3)
    count = len(case.table.weights)
    sensitivity = np.geomspace(1, 100, count)[:, None] * 0.25 ** np.arange(6)
    slots = np.tile(np.arange(3, 9), (count, 1)) * 4
    weights = np.full(count, 100)
    capacity = int(slots[:, 1].sum()) + 4 * (count // 2)  # all at 4 bits, and one more bit for half of them
    even = initial_bits(indifferent_sensitivity(sensitivity, weights), slots, weights, capacity, 8)
    assert np.bincount(even).tolist() == [0, 0, 0, 0, count - count // 2, count // 2]
    told_apart = initial_bits(sensitivity, slots, weights, capacity, 8)
    assert set(told_apart.tolist()) - {4, 5}
