"""Exchange: never takes more than it releases, lowers predicted damage by more than asked, is bounded, settles."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import POLICY, Case, cases, check_plan, make_case

from pwjax.planner import Plan
from pwjax.planner.damage import score_actions
from pwjax.planner.exchange import plan_exchange


def exchange(case: Case, limit: int | None = None) -> Plan:
    scored = score_actions(case.table, case.observation, case.calibration)
    return plan_exchange(scored, case.calibration.policy, limit)


@given(cases(), st.floats(0.0, 0.9), st.integers(0, 6))
def test_slots_are_conserved_and_damage_falls(case: Case, gain: float, moves: int) -> None:
    policy = dataclasses.replace(POLICY, exchange_gain=gain, exchange_moves=moves)
    case = case.with_policy(policy)
    plan = exchange(case)
    check_plan(case, plan)
    assert all(abs(move.to_bits - move.from_bits) == 1 for move in plan.moves)
    assert sum(move.slots < 0 for move in plan.moves) <= moves
    spare = np.cumsum([move.slots for move in plan.moves])
    assert np.all(spare >= 0)  # no prefix takes what has not been released
    if not plan.moves:
        assert plan.reason == "none"
        return
    assert plan.reason == "exchange" and plan.damage < 0
    avoided = -sum(move.damage for move in plan.moves if move.slots < 0)
    cost = sum(move.damage for move in plan.moves if move.slots > 0)
    assert avoided - cost > gain * avoided - 1e-12


@given(cases())
def test_steps_down_obey_floors_and_caps(case: Case) -> None:
    scored = score_actions(case.table, case.observation, case.calibration)
    for move in exchange(case).moves:
        if move.slots > 0:
            assert move.to_bits >= max(scored.floors[0, move.index], scored.cap_floor[move.index])
        else:
            assert move.to_bits <= scored.top[move.index]


def equal_case(mass: list[float], bits: list[int]) -> Case:
    """One layer; all linear-blocks of one size and one sensitivity, so that only routing tells them apart."""
    experts = len(mass)
    case = make_case(1, layers=1, experts=experts)
    n = experts * 2
    slots = np.tile(np.arange(1, 7) * 10, (n, 1))
    table = dataclasses.replace(case.table, slots=slots, movable=np.ones(n, bool), max_bits=6, initial=np.array(bits))
    calibration = dataclasses.replace(case.calibration, sensitivity=np.tile(4.0 ** -np.arange(6), (n, 1)))
    observation = dataclasses.replace(case.observation, routing_mass=np.array([[mass]]), kv_blocks=np.ones(1))
    return Case(table, observation, calibration).at(np.array(bits))


def test_cold_bits_go_to_hot_experts() -> None:
    case = equal_case([0.1, 0.6, 0.0, 0.3], [4, 4, 3, 3, 3, 3, 3, 3])
    plan = exchange(case)
    moves = [(move.index, move.to_bits) for move in plan.moves]
    assert moves == [(0, 3), (2, 4), (1, 3), (3, 4)]
    assert plan.released_slots == 0
    gain = (3.0 - 0.25) * (1 - 0.25)  # mu of hottest and coldest, s^3 - s^4
    assert np.isclose(plan.damage, -2 * gain)
    after = check_plan(case, plan)
    assert exchange(case.at(after)).reason == "none"


def test_no_exchange_without_a_reason_or_a_permission() -> None:
    even = equal_case([0.0] * 4, [4, 4, 3, 3, 3, 3, 3, 3])
    assert exchange(even).reason == "none"
    worth = equal_case([0.1, 0.6, 0.0, 0.3], [4, 4, 3, 3, 3, 3, 3, 3])
    assert exchange(worth.with_policy(dataclasses.replace(POLICY, exchange_moves=0))).reason == "none"
    assert exchange(worth.with_policy(dataclasses.replace(POLICY, exchange_gain=0.95))).reason == "none"
    assert exchange(worth.with_policy(POLICY.without_routing())).reason == "none"
    assert [move.index for move in exchange(worth, limit=15).moves] == [0, 2]


def test_a_large_page_pays_for_two_small_ones() -> None:
    case = equal_case([0.1, 0.6, 0.0, 0.3], [4, 3, 3, 3, 3, 3, 3, 3])
    slots = np.array(case.table.slots)
    slots[0] = np.arange(1, 7) * 20
    case = dataclasses.replace(case, table=dataclasses.replace(case.table, slots=slots))
    plan = exchange(case)
    assert [(move.index, move.slots) for move in plan.moves] == [(0, 20), (2, -10), (3, -10)]
    assert plan.released_slots == 0


@given(st.integers(0, 2**32 - 1))
def test_repeated_exchanges_settle(seed: int) -> None:
    case = make_case(seed)
    seen = 0
    while (plan := exchange(case)).moves:
        case = case.at(check_plan(case, plan))
        seen += 1
        assert seen < 200
