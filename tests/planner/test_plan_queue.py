"""Stages against a literal greedy, refreshes after table changes, and the choice of the best plan."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import Case, cases, check_plan, heap_lowering, make_case

from pwjax.planner.damage import Scored, score_actions
from pwjax.planner.queue import (
    PlanQueue,
    QueuedPlan,
    plan_stages,
    refresh_queue,
    revalidate,
    revalidate_queue,
    select_best,
)
from pwjax.planner.select import step_ratio

TARGETS = st.integers(0, 1500)


def score(case: Case) -> Scored:
    return score_actions(case.table, case.observation, case.calibration)


def steps_of(plan: QueuedPlan) -> list[tuple[int, int]]:
    return list(zip(plan.steps.index.tolist(), (plan.steps.column + 3).tolist(), strict=True))


def literal_stage(scored: Scored, floors: np.ndarray, target: int) -> list[tuple[int, int]]:
    """One stage with heaps: steps within the caps until the target is met, then steps beyond them."""
    ratio = step_ratio(scored.damage, scored.slots)
    bits = scored.bits.astype(int)
    capped = np.maximum(scored.cap_floor, floors)
    first = heap_lowering(ratio, bits, np.where(scored.movable, capped, 9))
    start = np.minimum(bits, capped)
    second = heap_lowering(ratio, start, np.where(scored.movable, floors, 9))
    taken, released = [], 0
    for i, after in first + second:
        if released >= target:
            break
        taken.append((i, after))
        released += int(scored.slots[i, after - 3])
    return taken


@given(cases(), TARGETS)
def test_stages_are_the_literal_greedy(case: Case, target: int) -> None:
    scored = score(case)
    for plan, floors in zip(plan_stages(scored, target), scored.floors, strict=True):
        assert steps_of(plan) == literal_stage(scored, floors, target)


@given(cases(), TARGETS)
def test_a_plan_meets_its_target_or_all_legal_steps_are_in_it(case: Case, target: int) -> None:
    scored = score(case)
    plan = select_best(PlanQueue(plan_stages(scored, target)), target, scored)
    after = check_plan(case, plan)
    if plan.satisfied:
        assert plan.released_slots >= target
    else:
        assert np.all(after[scored.movable] == 3)


@given(cases(), TARGETS)
def test_caps_are_exceeded_only_where_they_cannot_give_enough(case: Case, target: int) -> None:
    scored = score(case)
    plan = select_best(PlanQueue(plan_stages(scored, target)), target, scored)
    floor = np.minimum(scored.bits, scored.cap_floor)
    within = np.where(scored.movable, floor, scored.bits) - 3
    rows = np.arange(within.size)
    most = int((case.table.slots[rows, scored.bits - 3] - case.table.slots[rows, within]).sum())
    assert plan.relaxed == any(move.to_bits < scored.cap_floor[move.index] for move in plan.moves)
    if plan.relaxed:
        assert most < target
    if most >= target:
        assert plan.satisfied and not plan.relaxed


@given(cases(), TARGETS, st.integers(0, 400))
def test_one_stage_is_monotone_in_the_target(case: Case, target: int, more: int) -> None:
    case = case.with_policy(dataclasses.replace(case.calibration.policy, floor_stages=((3, 3, 3),)))
    scored = score(case)
    queue = PlanQueue(plan_stages(scored, target + more))
    small, large = select_best(queue, target, scored), select_best(queue, target + more, scored)
    assert small.released_slots <= large.released_slots and small.damage <= large.damage + 1e-12
    lower = {move.index: move.to_bits for move in large.moves}
    assert all(lower[move.index] <= move.to_bits for move in small.moves)


@given(cases(), TARGETS, st.integers(0, 400))
def test_a_larger_target_never_releases_less_than_asked_nor_misses_what_a_smaller_one_missed(
    case: Case, target: int, more: int
) -> None:
    scored = score(case)
    small = select_best(PlanQueue(plan_stages(scored, target)), target, scored)
    large = select_best(PlanQueue(plan_stages(scored, target + more)), target + more, scored)
    assert large.satisfied <= small.satisfied
    assert large.released_slots >= min(target + more, small.released_slots)


def test_the_best_plan_costs_least_and_the_more_protective_one_wins_ties() -> None:
    scored = score(make_case(11, layers=3, experts=8))
    stages = plan_stages(scored, 100)
    plan = select_best(PlanQueue(stages), 100, scored)
    assert plan.satisfied
    enough = [float(s.damage.sum()) for s in stages if s.slots.sum() >= 100 and not s.beyond_cap.any()]
    assert np.isclose(plan.damage, min(enough))
    twice = select_best(PlanQueue((stages[-1], stages[-1])), 100, scored)
    assert twice == select_best(PlanQueue((stages[-1],)), 100, scored)


@given(cases(), TARGETS, st.integers(0, 2**32 - 1))
def test_revalidated_plans_are_legal_after_the_table_changed(case: Case, target: int, seed: int) -> None:
    queue = PlanQueue(plan_stages(score(case), target))
    rng = np.random.default_rng(seed)
    n = case.table.committed.size
    bits = np.clip(case.table.committed + rng.integers(-1, 2, n), 3, case.table.max_bits)
    later = case.at(bits).observe(routing_mass=rng.exponential(1.0, case.observation.routing_mass.shape))
    later = dataclasses.replace(later, table=dataclasses.replace(later.table, movable=rng.random(n) < 0.7))
    scored = score(later)
    for plan, floors in zip(revalidate_queue(queue, scored).plans, scored.floors, strict=True):
        chain = scored.bits.astype(int)
        for place, (i, after) in enumerate(steps_of(plan)):
            assert scored.movable[i] and after == chain[i] - 1 and after >= floors[i]
            chain[i] = after
            assert plan.damage[place] == scored.damage[i, after - 3]
            assert plan.beyond_cap[place] == (after < scored.cap_floor[i])
        assert np.all(np.diff(plan.beyond_cap.astype(int)) >= 0)
        check_plan(later, select_best(PlanQueue((plan,)), target, scored))


def test_steps_already_taken_drop_out_and_risen_chains_are_dropped_whole() -> None:
    case = make_case(5).with_policy(make_case(5).calibration.policy.without_routing())
    n = case.table.committed.size
    table = dataclasses.replace(case.table, movable=np.ones(n, bool), initial=np.full(n, 6), max_bits=7)
    case = dataclasses.replace(case, table=table).at(np.full(n, 6))
    scored = score(case)
    (plan,) = plan_stages(scored, 10**9)
    bits = np.full(n, 6)
    bits[0], bits[1] = 4, 7  # block 0 went down by two, block 1 was reloaded
    now = score(case.at(bits))
    standing = steps_of(revalidate(plan, now.floors[0], now))
    assert [after for i, after in standing if i == 0] == [3]
    assert not [after for i, after in standing if i == 1]
    assert [after for i, after in standing if i == 2] == [5, 4, 3]


@given(cases(), TARGETS, st.integers(0, 2**32 - 1))
def test_a_refresh_keeps_the_better_plan_of_every_stage(case: Case, target: int, seed: int) -> None:
    old = PlanQueue(plan_stages(score(case), target))
    mass = np.random.default_rng(seed).exponential(1.0, case.observation.routing_mass.shape)
    scored = score(case.observe(routing_mass=mass))
    fresh = plan_stages(scored, target)
    for kept, new in zip(refresh_queue(old, fresh, scored, target).plans, fresh, strict=True):
        best = select_best(PlanQueue((kept,)), target, scored)
        alternative = select_best(PlanQueue((new,)), target, scored)
        assert best.satisfied >= alternative.satisfied
        if best.satisfied == alternative.satisfied and best.relaxed == alternative.relaxed and best.satisfied:
            assert best.damage <= alternative.damage + 1e-12


def test_a_queue_of_another_policy_is_replaced() -> None:
    case = make_case(2)
    scored = score(case)
    fresh = plan_stages(scored, 50)
    assert refresh_queue(PlanQueue(fresh[:1]), fresh, scored, 50).plans == fresh
    assert revalidate_queue(PlanQueue(fresh[:1]), scored).plans == ()
    assert not select_best(PlanQueue(), 50, scored).satisfied
