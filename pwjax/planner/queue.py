"""The plan queue of Algorithm 1: one prepared plan a floor stage, refreshed by later observations.

A queued plan is a list of one-bit steps, worthwhile first: those within the depth caps, then (only if these can't
release enough) those beyond. It is prepared for D plus the growth to come; what is carried out is the shortest prefix
that meets the D of the moment. A prefix goes beyond the caps only when all that the caps allow is already in it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pwjax.planner.damage import Scored
from pwjax.planner.select import Steps, lowering_order, prefix_for, step_ratio
from pwjax.planner.types import MIN_BITS, BoolArray, FloatArray, IntArray, Move, Plan


@dataclasses.dataclass(frozen=True, eq=False)
class QueuedPlan:
    """Steps of one floor stage with what they release and cost under the latest observation.

    Attributes:
        slots: int64 [m], released by each step.
        damage: float64 [m], of each step.
        beyond_cap: bool [m], False then True.
    """

    steps: Steps
    slots: IntArray
    damage: FloatArray
    beyond_cap: BoolArray


@dataclasses.dataclass(frozen=True, eq=False)
class PlanQueue:
    """Plans by floor stage, protective first; empty before the first refresh. Never changed, only replaced."""

    plans: tuple[QueuedPlan, ...] = ()


@dataclasses.dataclass(frozen=True, order=True)
class _Worth:
    """How good a plan's prefix is for a target; the smaller the better.

    Meeting the target comes first. Among plans that meet it: within the depth caps, then least damage. Among the
    others: most slots, then least damage.
    """

    misses: bool
    relaxed_or_slots: int
    damage: float


def plan_stages(scored: Scored, target: int) -> tuple[QueuedPlan, ...]:
    """GreedySelect for every floor stage (Algorithm 1, lines 5 to 7); one sort serves all of them.

    Args:
        target: slots that each plan should release.
    """
    ratio = step_ratio(scored.damage, scored.slots)
    lowest = np.where(scored.movable, scored.floors.min(axis=0), scored.bits)
    order = lowering_order(ratio, scored.bits, lowest)
    slots = scored.slots[order.index, order.column]
    step_bits = order.column + MIN_BITS  # after the step
    capped = step_bits >= scored.cap_floor[order.index]
    plans = []
    for floors in scored.floors:
        legal = capped & (step_bits >= floors[order.index])
        plans.append(_plan_stage(scored, ratio, floors, order, np.where(legal, slots, 0), target))
    return tuple(plans)


def _plan_stage(
    scored: Scored, ratio: FloatArray, floors: IntArray, order: Steps, legal_slots: IntArray, target: int
) -> QueuedPlan:
    """The shortest prefix of the legal steps that meets the target, then steps beyond the caps if all don't."""
    count = prefix_for(legal_slots, target)
    chosen = order.where(np.flatnonzero(legal_slots[:count]))
    missing = target - int(legal_slots[:count].sum())
    if missing > 0:
        # Chains go on where the caps (or a floor above them) stopped the first pass.
        start = np.minimum(scored.bits, np.maximum(scored.cap_floor, floors))
        beyond = lowering_order(ratio, start, np.where(scored.movable, floors, start))
        slots = scored.slots[beyond.index, beyond.column]
        chosen = chosen.then(beyond.where(np.arange(prefix_for(slots, missing))))
    return _evaluate(chosen, scored)


def _evaluate(steps: Steps, scored: Scored) -> QueuedPlan:
    """Slots, damages and caps of steps under the present observation."""
    return QueuedPlan(
        steps=steps,
        slots=scored.slots[steps.index, steps.column],
        damage=scored.damage[steps.index, steps.column],
        beyond_cap=steps.column + MIN_BITS < scored.cap_floor[steps.index],
    )


def revalidate(plan: QueuedPlan, floors: IntArray, scored: Scored) -> QueuedPlan:
    """A queued plan as it stands now: illegal steps dropped, damages recomputed, steps beyond today's caps put last.

    A step stays legal while its linear-block may move, its end is not below the floor, and its chain still begins at
    the committed bits: steps already taken drop out; where bits have risen above the chain's beginning, all of it
    does.

    Args:
        floors: int8 [n] of the plan's stage.
    """
    index, column = plan.steps.index, plan.steps.column
    from_bits = column + MIN_BITS + 1
    chain_start = np.zeros(scored.bits.shape[0], np.int64)
    np.maximum.at(chain_start, index, from_bits)
    bits = scored.bits[index]
    legal = (from_bits <= bits) & (chain_start[index] >= bits)
    legal &= scored.movable[index] & (from_bits - 1 >= floors[index])
    kept = _evaluate(plan.steps.where(legal), scored)
    order = np.argsort(kept.beyond_cap, kind="stable")  # a chain's later steps are never nearer to its cap
    return _evaluate(kept.steps.where(order), scored)


def refresh_queue(queue: PlanQueue, fresh: tuple[QueuedPlan, ...], scored: Scored, target: int) -> PlanQueue:
    """RefreshPlanQueue (Algorithm 1, line 8): by stage, the better of the new plan and of the old one as it stands now.

    A queue with another number of stages belongs to another policy and is replaced.
    """
    if len(queue.plans) != len(fresh):
        return PlanQueue(fresh)
    plans = []
    for old, new, floors in zip(queue.plans, fresh, scored.floors, strict=True):
        standing = revalidate(old, floors, scored)
        plans.append(standing if _worth(standing, target)[0] < _worth(new, target)[0] else new)
    return PlanQueue(tuple(plans))


def revalidate_queue(queue: PlanQueue, scored: Scored) -> PlanQueue:
    """The queue as it stands now, without new plans: for a boundary that can't wait for a refresh."""
    if len(queue.plans) != scored.floors.shape[0]:
        return PlanQueue()
    pairs = zip(queue.plans, scored.floors, strict=True)
    return PlanQueue(tuple(revalidate(plan, floors, scored) for plan, floors in pairs))


def select_best(queue: PlanQueue, target: int, scored: Scored) -> Plan:
    """SelectBestPlan (Algorithm 1, line 11): least damage that meets the target, else the most slots.

    Plans within the depth caps come before relaxed ones; the more protective stage wins ties.
    """
    best: tuple[_Worth, QueuedPlan, int] | None = None
    for plan in queue.plans:
        worth, count = _worth(plan, target)
        if best is None or worth < best[0]:
            best = worth, plan, count
    if best is None:
        return Plan((), "offload", 0, 0.0, target, target <= 0, False)
    worth, plan, count = best
    moves = lowering_moves(plan, count, scored)
    released = sum(move.slots for move in moves)
    relaxed = bool(plan.beyond_cap[:count].any())
    return Plan(moves, "offload", released, sum(move.damage for move in moves), target, not worth.misses, relaxed)


def _worth(plan: QueuedPlan, target: int) -> tuple[_Worth, int]:
    """The worth of the shortest prefix that meets a target, and the length of that prefix."""
    count = prefix_for(plan.slots, target)
    released = int(plan.slots[:count].sum())
    damage = float(plan.damage[:count].sum())
    if released >= target:
        return _Worth(False, int(plan.beyond_cap[:count].any()), damage), count
    return _Worth(True, -released, damage), count


def lowering_moves(plan: QueuedPlan, count: int, scored: Scored) -> tuple[Move, ...]:
    """The first `count` steps of a plan, one move a linear-block, in order of each one's first step."""
    slots: dict[int, int] = {}
    damage: dict[int, float] = {}
    steps: dict[int, int] = {}
    rows = zip(plan.steps.index[:count].tolist(), plan.slots.tolist(), plan.damage.tolist(), strict=False)
    for index, step_slots, step_damage in rows:
        slots[index] = slots.get(index, 0) + step_slots
        damage[index] = damage.get(index, 0.0) + step_damage
        steps[index] = steps.get(index, 0) + 1
    bits = scored.bits
    return tuple(Move(i, int(bits[i]), int(bits[i]) - steps[i], slots[i], damage[i]) for i in slots)
