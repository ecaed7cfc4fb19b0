"""One step of the runtime planner: Algorithm 1 of the paper, with reload and exchange where there is no pressure.

`plan_step` does all of it. `prepare` and `decide` are its two halves, for an engine that prepares plans beside the
step and decides at the boundary.
"""

from __future__ import annotations

from pwjax.planner.damage import Scored, score_actions
from pwjax.planner.exchange import plan_exchange
from pwjax.planner.pressure import prepare_slots, pressure_triggered, reload_slots, target_slots
from pwjax.planner.queue import PlanQueue, plan_stages, refresh_queue, revalidate_queue, select_best
from pwjax.planner.reload import plan_reload
from pwjax.planner.routing import observed_mass
from pwjax.planner.types import Calibration, Observation, Plan, TableView


def plan_step(
    table: TableView, observation: Observation, calibration: Calibration, queue: PlanQueue
) -> tuple[PlanQueue, Plan]:
    """PlanStep of Algorithm 1: refreshes the queue, and plans the moves of this boundary.

    Args:
        table: the page table at this boundary.
        observation: what is known at it.
        calibration: Omega_off.
        queue: what the step before returned; `PlanQueue()` at first.

    Returns:
        The next queue, and a plan with reason "offload" under pressure; else "reload" if there is room above the high
        watermark, else "exchange" if a trade pays, else "none". An offload that can't meet its target is the largest
        safe one, with `satisfied` False.
    """
    scored = score_actions(table, observation, calibration)
    queue = _refresh(scored, observation, queue)
    return queue, _decide(scored, observation, calibration, queue)


def prepare(table: TableView, observation: Observation, calibration: Calibration, queue: PlanQueue) -> PlanQueue:
    """Lines 2 to 9 of Algorithm 1: the refreshed queue alone."""
    return _refresh(score_actions(table, observation, calibration), observation, queue)


def decide(table: TableView, observation: Observation, calibration: Calibration, queue: PlanQueue) -> Plan:
    """Lines 10 to 12 of Algorithm 1, from a queue that was prepared at an earlier boundary.

    The queue is taken as it stands now; should it not meet the target any more, plans are made anew.
    """
    scored = score_actions(table, observation, calibration)
    plan = _decide(scored, observation, calibration, revalidate_queue(queue, scored))
    if plan.reason == "offload" and not plan.satisfied:
        return _decide(scored, observation, calibration, _refresh(scored, observation, queue))
    return plan


def _refresh(scored: Scored, observation: Observation, queue: PlanQueue) -> PlanQueue:
    target = prepare_slots(observation)
    return refresh_queue(queue, plan_stages(scored, target), scored, target)


def _decide(scored: Scored, observation: Observation, calibration: Calibration, queue: PlanQueue) -> Plan:
    if pressure_triggered(observation):
        return select_best(queue, target_slots(observation), scored)
    limit = observation.moving_slots
    room = reload_slots(observation)
    plan = plan_reload(scored, room if limit is None else min(room, limit))
    if plan.moves or observed_mass(observation.routing_mass) < calibration.policy.exchange_min_mass:
        return plan
    return plan_exchange(scored, calibration.policy, limit)
