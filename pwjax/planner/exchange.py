"""Exchange: without pressure, cold linear-blocks go down one bit so that hot ones go up one, in equal bytes.

So routing matters in a steady state too, where neither offload nor reload has a reason. This is not in the paper.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pwjax.planner.damage import Scored
from pwjax.planner.policy import Policy
from pwjax.planner.select import Steps, lowering_order, raising_order, step_ratio
from pwjax.planner.types import MIN_BITS, NO_PLAN, BoolArray, FloatArray, IntArray, Move, Plan

_CANDIDATES_PER_MOVE = 4  # steps down looked at for each step up that may be made


@dataclasses.dataclass
class _Downs:
    """The cheapest steps down, one a linear-block, and which of them are still unused."""

    index: IntArray
    slots: IntArray
    damage: FloatArray
    unused: BoolArray

    def cheapest(self, need_slots: int, forbidden: int) -> tuple[IntArray, float]:
        """Positions of unused steps that release `need_slots` or more, and their damage; infinite if there are none.

        The better of one step that is large enough and of several small ones, cheapest a slot first. `forbidden` is the
        linear-block that is to rise.
        """
        usable = np.flatnonzero(self.unused & (self.index != forbidden))
        total = np.cumsum(self.slots[usable])
        count = int(np.searchsorted(total, need_slots)) + 1
        several, several_damage = usable[:count], float("inf")
        if count <= usable.size:
            several_damage = float(self.damage[several].sum())
        large = usable[self.slots[usable] >= need_slots]
        if large.size:
            one = large[np.argmin(self.damage[large])]
            if self.damage[one] < several_damage:
                return np.array([one]), float(self.damage[one])
        return several, several_damage


def plan_exchange(scored: Scored, policy: Policy, limit_slots: int | None = None) -> Plan:
    """Trades of steps down for a step up that lower predicted damage by more than `exchange_gain` of what it avoids.

    Bounded: at most `exchange_moves` linear-blocks rise, and every linear-block moves by one bit at most. The steps
    down obey the most protective floor stage and the depth caps. At no prefix of the moves has more been taken than
    released; what a larger page leaves over is used by later trades, and the rest (less than one page a trade) stays
    free.

    Args:
        limit_slots: most slots that all raises together may take; None is no limit.

    Returns:
        A plan with reason "exchange"; "none" when no trade is worth it.
    """
    if policy.exchange_moves == 0:
        return NO_PLAN
    ratio = step_ratio(scored.damage, scored.slots)
    downs, ups = _candidates(scored, ratio, policy.exchange_moves)
    moves: list[Move] = []
    spare_slots = taken_slots = raised = 0
    fallen: set[int] = set()
    for index, column in zip(ups.index.tolist(), ups.column.tolist(), strict=True):
        need, avoided = int(scored.slots[index, column]), float(scored.damage[index, column])
        if index in fallen or (limit_slots is not None and taken_slots + need > limit_slots):
            continue
        chosen, cost = _cover(downs, need - spare_slots, index)
        if not avoided - cost > policy.exchange_gain * avoided:
            continue
        falling = _lower(downs, chosen, scored.bits)
        fallen.update(move.index for move in falling)
        downs.unused[downs.index == index] = False
        spare_slots += sum(move.slots for move in falling) - need
        taken_slots += need
        bits = int(scored.bits[index])
        moves += [*falling, Move(index, bits, bits + 1, -need, -avoided)]
        raised += 1
        if raised == policy.exchange_moves:
            break
    if not moves:
        return NO_PLAN
    return Plan(tuple(moves), "exchange", spare_slots, sum(move.damage for move in moves), 0, True, False)


def _cover(downs: _Downs, need_slots: int, forbidden: int) -> tuple[IntArray, float]:
    """Steps down that release what is needed; none when slots left over by earlier trades are enough."""
    if need_slots <= 0:
        return np.zeros(0, np.int64), 0.0
    return downs.cheapest(need_slots, forbidden)


def _lower(downs: _Downs, chosen: IntArray, bits: IntArray) -> list[Move]:
    """Marks the chosen steps as used, and gives their moves."""
    downs.unused[chosen] = False
    rows = zip(downs.index[chosen].tolist(), downs.slots[chosen].tolist(), downs.damage[chosen].tolist(), strict=True)
    return [Move(i, int(bits[i]), int(bits[i]) - 1, slots, damage) for i, slots, damage in rows]


def _candidates(scored: Scored, ratio: FloatArray, moves: int) -> tuple[_Downs, Steps]:
    """First steps of the chains in both directions: the cheapest a slot down, the dearest a slot up."""
    bits = scored.bits
    one_down = np.maximum(np.maximum(scored.floors[0], scored.cap_floor), bits - 1)
    down = lowering_order(ratio, bits, np.where(scored.movable, one_down, bits))
    down = down.where(np.arange(min(len(down), _CANDIDATES_PER_MOVE * moves)))
    one_up = np.minimum(scored.top, bits + 1)
    up = raising_order(ratio, bits, np.where(scored.movable, one_up, MIN_BITS))
    up = up.where(np.arange(min(len(up), _CANDIDATES_PER_MOVE * moves)))
    slots = scored.slots[down.index, down.column]
    damage = scored.damage[down.index, down.column]
    return _Downs(down.index, slots, damage, np.ones(len(down), bool)), up
