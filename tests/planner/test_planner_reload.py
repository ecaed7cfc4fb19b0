"""Reload: the greedy by damage avoided a slot, within the room, and only where a linear-block may move and rise."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import Case, cases, check_plan, heap_raising, make_case

from pwjax.planner.damage import score_actions
from pwjax.planner.reload import plan_reload
from pwjax.planner.select import step_ratio


@given(cases(), st.integers(-10, 1500))
def test_reload_is_the_literal_greedy_within_the_room(case: Case, room: int) -> None:
    scored = score_actions(case.table, case.observation, case.calibration)
    plan = plan_reload(scored, room)
    after = check_plan(case, plan)
    assert -plan.released_slots <= max(room, 0)
    assert plan.damage <= 0 and all(move.to_bits > move.from_bits for move in plan.moves)
    expected, left, closed = np.array(case.table.committed), room, set()
    top = np.where(scored.movable, scored.top, 0)
    for i, before in heap_raising(step_ratio(scored.damage, scored.slots), scored.bits.astype(int), top):
        cost = int(scored.slots[i, before - 3])
        if i in closed or cost > left:
            closed.add(i)
            continue
        expected[i] += 1
        left -= cost
    np.testing.assert_array_equal(after, expected)


def test_all_the_room_raises_everything_to_the_top() -> None:
    case = make_case(7)
    scored = score_actions(case.table, case.observation, case.calibration)
    after = check_plan(case, plan_reload(scored, 10**9))
    np.testing.assert_array_equal(after, np.where(case.table.movable, case.table.max_bits, case.table.committed))


def test_hot_experts_rise_first() -> None:
    case = make_case(1, layers=1, experts=4)
    n = 8
    slots = np.tile(np.arange(1, 7) * 10, (n, 1))
    table = dataclasses.replace(case.table, slots=slots, movable=np.ones(n, bool), max_bits=4)
    case = dataclasses.replace(case, table=table).at(np.full(n, 3))
    calibration = dataclasses.replace(case.calibration, sensitivity=np.tile(4.0 ** -np.arange(6), (n, 1)))
    mass = np.array([[[0.1, 0.6, 0.0, 0.3]]])
    observation = dataclasses.replace(case.observation, routing_mass=mass, kv_blocks=np.ones(1))
    plan = plan_reload(score_actions(case.table, observation, calibration), 45)
    # Buckets of (.1 .6 0 .3): cold, hottest, cold, middle. Two raises an expert; four fit.
    assert [move.index for move in plan.moves] == [2, 3, 6, 7]
