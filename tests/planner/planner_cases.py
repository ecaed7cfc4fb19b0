"""Random planner inputs and an independent greedy (a heap over single steps) for the planner's tests."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
from hypothesis import strategies as st

from pwjax.planner import Calibration, Move, Observation, Plan, Policy, TableView

POLICY = Policy(
    bucket_shares=(0.5, 0.75, 1.0),
    multipliers=(0.25, 1.0, 3.0),
    floor_stages=((3, 4, 5), (3, 3, 4), (3, 3, 3)),
    depth_caps=(3, 2, 1),
    alpha=1.0,
    epsilon=1e-9,
    exchange_gain=0.1,
    exchange_moves=4,
    exchange_min_mass=0.0,
    multiplier_mass=1e30,
    traffic_exponent=1.0,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One boundary: what `plan_step` is called with, less the queue."""

    table: TableView
    observation: Observation
    calibration: Calibration

    def observe(self, **changes: object) -> Case:
        """The same boundary with another observation."""
        return dataclasses.replace(self, observation=dataclasses.replace(self.observation, **changes))

    def at(self, bits: np.ndarray) -> Case:
        """The same boundary with other committed bits."""
        table = dataclasses.replace(self.table, committed=_frozen(bits.astype(np.int8)), desired=bits.astype(np.int8))
        return dataclasses.replace(self, table=table)

    def with_policy(self, policy: Policy) -> Case:
        """The same boundary under another policy."""
        return dataclasses.replace(self, calibration=dataclasses.replace(self.calibration, policy=policy))


def make_case(seed: int, layers: int = 2, experts: int = 5, requests: int = 2, policy: Policy = POLICY) -> Case:
    """A random boundary. Sensitivities need not be convex, nor even monotone; all arrays are read-only."""
    rng = np.random.default_rng(seed)
    n = layers * experts * 2
    max_bits = int(rng.integers(4, 9))
    page_slots = rng.integers(1, 40, (n, 6))
    page_slots[:, 0] += 40
    initial = rng.integers(3, max_bits + 1, n)
    committed = np.clip(initial + rng.integers(-2, 2, n), 3, max_bits)
    sensitivity = np.exp(rng.normal(0, 1, (n, 1))) * 3.0 ** -np.arange(6) * np.exp(rng.normal(0, 0.8, (n, 6)))
    mass = rng.exponential(1.0, (requests, layers, experts)) * (rng.random((requests, layers, experts)) < 0.8)
    table = TableView(
        committed=_frozen(committed.astype(np.int8)),
        desired=_frozen(committed.astype(np.int8)),
        initial=_frozen(initial.astype(np.int8)),
        slots=_frozen(np.cumsum(page_slots, axis=1).astype(np.int64)),
        weights=_frozen(np.tile([512, 256], n // 2).astype(np.int64)),
        movable=_frozen(rng.random(n) < 0.85),
        max_bits=max_bits,
    )
    observation = Observation(
        free_slots=int(rng.integers(-20, 400)),
        growth_slots=int(rng.integers(0, 100)),
        block_slots=int(rng.integers(1, 20)),
        low_watermark_blocks=4,
        high_watermark_blocks=8,
        total_slots=100_000,
        routing_mass=_frozen(mass),
        kv_blocks=_frozen(rng.integers(0, 50, requests).astype(np.float64)),
    )
    return Case(table, observation, Calibration(_frozen(sensitivity), layers, experts, policy))


def cases() -> st.SearchStrategy[Case]:
    """Hypothesis strategy over `make_case`."""
    return st.builds(make_case, st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 8), st.integers(0, 3))


def heap_lowering(ratio: np.ndarray, bits: np.ndarray, floor: np.ndarray) -> list[tuple[int, int]]:
    """The greedy, literally: always the cheapest available step, as (linear-block, bits after the step)."""
    heap = [(ratio[i, bits[i] - 4], i, int(bits[i]) - 1) for i in range(len(bits)) if bits[i] > floor[i]]
    heapq.heapify(heap)
    popped = []
    while heap:
        _, i, after = heapq.heappop(heap)
        popped.append((i, after))
        if after > floor[i]:
            heapq.heappush(heap, (ratio[i, after - 4], i, after - 1))
    return popped


def heap_raising(ratio: np.ndarray, bits: np.ndarray, top: np.ndarray) -> list[tuple[int, int]]:
    """Always the available step up with the largest ratio, as (linear-block, bits before the step)."""
    heap = [(-ratio[i, bits[i] - 3], i, int(bits[i])) for i in range(len(bits)) if bits[i] < top[i]]
    heapq.heapify(heap)
    popped = []
    while heap:
        _, i, before = heapq.heappop(heap)
        popped.append((i, before))
        if before + 1 < top[i]:
            heapq.heappush(heap, (-ratio[i, before - 2], i, before + 1))
    return popped


def apply_moves(bits: np.ndarray, moves: tuple[Move, ...]) -> np.ndarray:
    """Bits after the moves; fails if a move does not begin where the linear-block is."""
    after = np.array(bits)
    for move in moves:
        assert after[move.index] == move.from_bits
        after[move.index] = move.to_bits
    return after


def occupied(table: TableView, bits: np.ndarray) -> int:
    """Slots of all linear-blocks at these bits."""
    return int(table.slots[np.arange(len(bits)), np.asarray(bits, int) - 3].sum())


def check_plan(case: Case, plan: Plan) -> np.ndarray:
    """What must hold for every plan; returns the bits after it."""
    table = case.table
    after = apply_moves(table.committed, plan.moves)
    assert len({move.index for move in plan.moves}) == len(plan.moves)
    assert all(table.movable[move.index] for move in plan.moves)
    moved = after != table.committed
    assert np.all(after >= 3) and np.all(after[moved] <= table.max_bits)
    assert occupied(table, table.committed) - occupied(table, after) == plan.released_slots
    assert plan.released_slots == sum(move.slots for move in plan.moves)
    assert np.isclose(plan.damage, sum(move.damage for move in plan.moves))
    assert (plan.reason == "none") <= (not plan.moves)
    return after


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
