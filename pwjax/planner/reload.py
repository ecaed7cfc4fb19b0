"""Reload: raise the bits that avoid the most damage a slot, within the room that hysteresis leaves."""

from __future__ import annotations

import numpy as np

from pwjax.planner.damage import Scored
from pwjax.planner.select import fill, raising_order, step_ratio
from pwjax.planner.types import NO_PLAN, Move, Plan


def plan_reload(scored: Scored, room_slots: int) -> Plan:
    """Raises within `room_slots`, greedy by damage avoided a slot; a page that doesn't fit lets smaller ones pass.

    Args:
        room_slots: slots that may be taken (`pressure.reload_slots`).

    Returns:
        A plan with reason "reload"; "none" when nothing can rise or fit.
    """
    if room_slots <= 0:
        return NO_PLAN
    order = raising_order(step_ratio(scored.damage, scored.slots), scored.bits, np.where(scored.movable, scored.top, 0))
    cost = scored.slots[order.index, order.column]
    steps = order.where(fill(order.index, cost, room_slots))
    if not len(steps):
        return NO_PLAN
    slots: dict[int, int] = {}
    damage: dict[int, float] = {}
    rise: dict[int, int] = {}
    taken = scored.slots[steps.index, steps.column].tolist()
    avoided = scored.damage[steps.index, steps.column].tolist()
    for index, step_slots, step_damage in zip(steps.index.tolist(), taken, avoided, strict=True):
        slots[index] = slots.get(index, 0) - step_slots
        damage[index] = damage.get(index, 0.0) - step_damage
        rise[index] = rise.get(index, 0) + 1
    bits = scored.bits
    moves = tuple(Move(i, int(bits[i]), int(bits[i]) + rise[i], slots[i], damage[i]) for i in slots)
    return Plan(moves, "reload", -sum(taken), -sum(avoided), room_slots, True, False)
