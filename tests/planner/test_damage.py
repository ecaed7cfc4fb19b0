"""Equations 4 and 8 by hand; chains of one-bit steps against whole actions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from planner_cases import POLICY, Case, cases, make_case

from pwjax.errors import UserError
from pwjax.planner import Calibration
from pwjax.planner.damage import global_damage, prompt_residual, score_actions, step_damages

SENSITIVITY = np.array([[0.9, 0.4, 0.5, 0.1, 0.05, 0.0], [0.8, 0.2, 0.1, 0.1, 0.1, 0.1]])


def test_equation_4() -> None:
    # Row 0 from 6 to 3 bits: .9 - .1; row 1 from 8 to 6: 0. Row 0 from 5 to 4 would be negative: 0.
    np.testing.assert_allclose(global_damage(SENSITIVITY, np.array([6, 8]), np.array([3, 6])), [0.8, 0.0])
    np.testing.assert_allclose(global_damage(SENSITIVITY, np.array([5, 4]), np.array([4, 3])), [0.0, 0.6])


def test_equation_8() -> None:
    calibration = Calibration(SENSITIVITY, 1, 1, dataclasses.replace(POLICY, epsilon=0.01))
    eta = np.ones((2, 5))
    eta[1, 0] = 2.0
    damage = step_damages(calibration, np.array([0.25, 3.0]), eta)
    expected = [[0.25 * 0.5, 0.01, 0.25 * 0.4, 0.25 * 0.05, 0.25 * 0.05], [3 * 0.6 * 2, 3 * 0.1, 0.01, 0.01, 0.01]]
    np.testing.assert_allclose(damage, expected)


def test_residual_is_one_and_its_place_refuses_what_is_not_there_yet() -> None:
    calibration = Calibration(SENSITIVITY, 1, 1, POLICY)
    assert prompt_residual(calibration, None).shape == (2, 5)
    assert np.all(prompt_residual(calibration, None) == 1.0)
    with pytest.raises(NotImplementedError, match="prompt residuals"):
        prompt_residual(dataclasses.replace(calibration, residual="heads"), None)


@given(cases())
def test_steps_add_up_to_actions_where_sensitivity_falls(case: Case) -> None:
    falling = np.minimum.accumulate(case.calibration.sensitivity, axis=1)
    calibration = dataclasses.replace(case.calibration, sensitivity=falling)
    n = falling.shape[0]
    whole = global_damage(falling, np.full(n, 8), np.full(n, 3))
    np.testing.assert_allclose(calibration.step_damage.sum(axis=1), whole, rtol=1e-12, atol=1e-15)


def test_refuses_wrong_calibrations_and_tables() -> None:
    with pytest.raises(UserError, match=r"\(2, 6\)"):
        Calibration(SENSITIVITY[:, :5], 1, 1, POLICY)
    with pytest.raises(UserError, match="finite"):
        Calibration(np.full((2, 6), np.nan), 1, 1, POLICY)
    case, other = make_case(0, experts=5), make_case(0, experts=4)
    with pytest.raises(ValueError, match="linear-blocks"):
        score_actions(other.table, case.observation, case.calibration)
    with pytest.raises(ValueError, match="routing_mass"):
        score_actions(case.table, other.observation, case.calibration)


def test_bits_that_cost_as_much_as_bf16_are_not_legal() -> None:
    case = make_case(3)
    # 512 weights are 1024 bytes in bf16; slots of 8 bytes: M must stay below 128 slots.
    slots = np.tile([40, 60, 80, 127, 128, 200], (case.table.weights.size, 1))
    table = dataclasses.replace(
        case.table, slots=slots, weights=np.full_like(case.table.weights, 512), max_bits=8, slot_bytes=8
    )
    assert set(table.top_bits.tolist()) == {6}
    assert set(dataclasses.replace(table, slot_bytes=0).top_bits.tolist()) == {8}
    assert set(dataclasses.replace(table, max_bits=4).top_bits.tolist()) == {4}
    assert set(dataclasses.replace(table, slot_bytes=1000).top_bits.tolist()) == {3}
