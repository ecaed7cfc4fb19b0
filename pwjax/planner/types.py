"""What goes into the planner and what comes out: frozen dataclasses over NumPy arrays, no JAX.

Shapes: `n = num_layers * num_experts * 2` linear-blocks, index `i = (moe_layer * num_experts + expert) * 2 + unit` with
unit 0 = gate_up and 1 = down. Column j of an `[n, 6]` array is bit-width `3 + j`. Column j of an `[n, 5]` array is the
one-bit step between `4 + j` and `3 + j` bits. All memory is counted in arena slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pwjax.errors import UserError
from pwjax.planner.ablation import NO_ABLATION, Ablation
from pwjax.planner.policy import Policy

MIN_BITS = 3
MAX_BITS = 8
NUM_BITS = MAX_BITS - MIN_BITS + 1
NUM_STEPS = NUM_BITS - 1
UNITS = 2
BF16_BYTES = 2

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]
BoolArray = NDArray[np.bool_]
Reason = Literal["offload", "reload", "exchange", "none"]


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """What was measured before serving: the paper's Omega_off.

    Attributes:
        sensitivity: float64 [n, 6], s_i^b of equation 2: predicted loss increase (nats a token) of serving linear-block
            i at b bits, at the mean traffic of an expert.
        policy: buckets, floors and the other hyperparameters of the planner.
        residual: heads of equation 5; None means that every prompt residual is 1 (see `damage.prompt_residual`).
        ablation: parts that are switched off; `residual` False makes every prompt residual 1.
    """

    sensitivity: FloatArray
    num_layers: int
    num_experts: int
    policy: Policy
    residual: object | None = None
    ablation: Ablation = NO_ABLATION

    def __post_init__(self) -> None:
        expected = (self.num_layers * self.num_experts * UNITS, NUM_BITS)
        if self.sensitivity.shape != expected:
            raise UserError(
                f"planner calibration: sensitivity has shape {self.sensitivity.shape}; {self.num_layers} layers of "
                f"{self.num_experts} experts need {expected}; run prepare again"
            )
        if not np.all(np.isfinite(self.sensitivity)):
            raise UserError("planner calibration: sensitivity is not finite everywhere; run prepare again")

    @property
    def num_linear_blocks(self) -> int:
        """The number n of linear-blocks."""
        return self.sensitivity.shape[0]

    @functools.cached_property
    def step_damage(self) -> FloatArray:
        """float64 [n, 5]: g_i of equation 4 for the step from 4 + j to 3 + j bits."""
        # Kept by columns: the arithmetic on [n, 5] arrays is several times faster along n than along 5.
        s = np.ascontiguousarray(self.sensitivity.T, np.float64)
        return np.maximum(s[:-1] - s[1:], 0.0).T


@dataclasses.dataclass(frozen=True, eq=False)
class TableView:
    """What the planner may see of the weight page table at one boundary. The arrays are read, never written.

    Attributes:
        committed: int8 [n], q_i, what the kernels use now.
        desired: int8 [n], d_i, where moves in flight will lead.
        initial: int8 [n], the assignment that serving started with; depth caps count from it.
        slots: int64 [n, 6], M_i^b: slots of pages 3..b as allocated; increasing in b.
        weights: int64 [n], N * K.
        movable: bool [n], False while a page of the linear-block is in flight.
        max_bits: the most bits that serving may use.
        slot_bytes: size of a slot; with it, a bit-width whose M_i^b reaches the bytes of bf16 is not legal. 0 skips
            that check.
    """

    committed: IntArray
    desired: IntArray
    initial: IntArray
    slots: IntArray
    weights: IntArray
    movable: BoolArray
    max_bits: int
    slot_bytes: int = 0

    def __post_init__(self) -> None:
        n = self.committed.shape[0]
        if self.slots.shape != (n, NUM_BITS):
            raise ValueError(f"slots has shape {self.slots.shape}; {n} linear-blocks need {(n, NUM_BITS)}")
        for name in ("desired", "initial", "weights", "movable"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; expected {(n,)}")
        if not MIN_BITS <= self.max_bits <= MAX_BITS:
            raise UserError(f"--max-bits is {self.max_bits}; it must be {MIN_BITS} to {MAX_BITS}")

    @functools.cached_property
    def step_slots(self) -> IntArray:
        """int64 [n, 5]: slots that the step between 4 + j and 3 + j bits releases or takes (equation 3)."""
        return np.diff(np.ascontiguousarray(self.slots.T), axis=0).T

    @functools.cached_property
    def top_bits(self) -> IntArray:
        """int8 [n]: the highest legal bit-width of every linear-block, the top of B_i."""
        return top_bits(self.slots, self.weights, self.max_bits, self.slot_bytes)


def top_bits(slots: IntArray, weights: IntArray, max_bits: int, slot_bytes: int = 0) -> IntArray:
    """The highest bit-width in B_i: at most `max_bits`, and smaller in memory than bf16 where `slot_bytes` is given.

    Args:
        slots: [n, 6], M_i^b in slots.
        weights: [n], N * K.

    Returns:
        int8 [n], never below 3: the base page is what serving can't do without.
    """
    top = np.full(slots.shape[0], max_bits, np.int8)
    if slot_bytes:
        smaller = slots * slot_bytes < weights[:, None] * BF16_BYTES
        # M_i^b grows with b, so the legal widths are the first few columns.
        top = np.minimum(top, MIN_BITS - 1 + smaller.sum(axis=1)).astype(np.int8)
    return np.maximum(top, MIN_BITS).astype(np.int8)


@dataclasses.dataclass(frozen=True, eq=False)
class Observation:
    """What the engine knows at one boundary; only tokens before it have been counted.

    Attributes:
        free_slots: free now, after moves in flight and the needs of the next step; negative when these don't fit.
        growth_slots: KV growth of the next 32 steps.
        block_slots: slots of one KV block (of one of each layer type, where a model has several).
        routing_mass: [R, num_layers, num_experts], sums of routing weights by active request since its first token
            (the numerator of equation 1); zeros, or R = 0, when nothing has been observed.
        kv_blocks: [R], KV blocks that each request holds.
        moving_slots: most slots that this boundary's raises may take (what the mover can still take into flight); None
            is no limit.
        features: routed-input features of equation 5; None until prompt residuals exist.
    """

    free_slots: int
    growth_slots: int
    block_slots: int
    low_watermark_blocks: int
    high_watermark_blocks: int
    total_slots: int
    routing_mass: FloatArray
    kv_blocks: FloatArray
    moving_slots: int | None = None
    features: object | None = None

    def __post_init__(self) -> None:
        if self.block_slots < 1:
            raise ValueError(f"block_slots is {self.block_slots}; it must be at least 1")
        if not 0 <= self.low_watermark_blocks <= self.high_watermark_blocks:
            raise UserError(
                f"watermarks: low is {self.low_watermark_blocks} and high {self.high_watermark_blocks} blocks; "
                "low must be at least 0 and at most high"
            )
        if self.routing_mass.ndim != 3 or self.kv_blocks.shape != self.routing_mass.shape[:1]:
            raise ValueError(
                f"routing_mass has shape {self.routing_mass.shape} and kv_blocks {self.kv_blocks.shape}; "
                "expected [R, layers, experts] and [R]"
            )


@dataclasses.dataclass(frozen=True)
class Move:
    """One linear-block from `from_bits` to `to_bits`.

    Attributes:
        slots: + released, - taken.
        damage: predicted change of damage (nats a token): + when bits fall, - when they rise.
    """

    index: int
    from_bits: int
    to_bits: int
    slots: int
    damage: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Moves for one boundary, most worthwhile first, so that a mover that can't take all takes a prefix.

    In an exchange, the moves down come right before the move up that needs their slots: no prefix takes more than it
    released.

    Attributes:
        released_slots: sum of the moves' slots: positive for an offload, negative for a reload.
        damage: sum of the moves' damage.
        target_slots: D of equation 7 for an offload; the slots that a reload may take; 0 for the others.
        satisfied: an offload releases at least D; True for the others.
        relaxed: depth caps had to be exceeded.
    """

    moves: tuple[Move, ...]
    reason: Reason
    released_slots: int
    damage: float
    target_slots: int
    satisfied: bool
    relaxed: bool


NO_PLAN = Plan(moves=(), reason="none", released_slots=0, damage=0.0, target_slots=0, satisfied=True, relaxed=False)
