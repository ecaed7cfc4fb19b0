"""Predicted damage of one-bit steps (equations 4, 6 and 8), and Algorithm 1's ScoreActions.

The paper scores actions (i, b -> b'); here an action is a chain of one-bit steps, whose damages add up to the action's
(exactly, except where equation 8's epsilon or equation 4's max takes effect on a single step).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pwjax.planner.routing import RoutingTerms, assign_buckets, batch_mass, bucket_multipliers, routing_terms
from pwjax.planner.types import (
    MIN_BITS,
    NUM_STEPS,
    BoolArray,
    Calibration,
    FloatArray,
    IntArray,
    Observation,
    TableView,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Scored:
    """All one-bit steps at one boundary: what ScoreActions returns, for all floor stages at once.

    Only the floor differs between stages, and it only cuts off the far end of a linear-block's chain of steps, so that
    damages, bytes and their order are shared.

    Attributes:
        damage: float64 [n, 5], d of equation 8 for the step between 4 + j and 3 + j bits (either direction).
        slots: int64 [n, 5], Delta of equation 3 for the same step.
        bits: int8 [n], where every chain begins: the committed bits.
        movable: bool [n].
        floors: int8 [stages, n].
        cap_floor: int8 [n], initial bits less the depth cap, at least 3.
        top: int8 [n], top of B_i.
    """

    damage: FloatArray
    slots: IntArray
    bits: IntArray
    movable: BoolArray
    floors: IntArray
    cap_floor: IntArray
    top: IntArray


def global_damage(sensitivity: FloatArray, from_bits: IntArray, to_bits: IntArray) -> FloatArray:
    """g = max(s^b' - s^b, 0) (equation 4) of the action from b to b' < b, for every linear-block.

    Args:
        sensitivity: [n, 6].
        from_bits: [n], b.
        to_bits: [n], b'.

    Returns:
        float64 [n].
    """
    rows = np.arange(sensitivity.shape[0])
    s = np.asarray(sensitivity, np.float64)
    return np.maximum(s[rows, np.asarray(to_bits) - MIN_BITS] - s[rows, np.asarray(from_bits) - MIN_BITS], 0.0)


def prompt_residual(calibration: Calibration, features: object | None) -> FloatArray:
    """eta of equation 6, [n, 5]; ones, since there are no heads (equation 5) yet.

    An expert that was never routed has no features and keeps eta = 1.
    """
    if calibration.residual is not None or features is not None:
        raise NotImplementedError(
            "prompt residuals (equations 5 and 6) are not calibrated yet; leave residual and features None"
        )
    return np.broadcast_to(np.float64(1.0), (calibration.num_linear_blocks, NUM_STEPS))


def step_damages(calibration: Calibration, multiplier: FloatArray, eta: FloatArray) -> FloatArray:
    """d = max(epsilon, mu g eta) (equation 8), float64 [n, 5].

    Args:
        multiplier: [n], mu of the routing bucket.
        eta: [n, 5].
    """
    return np.maximum(calibration.policy.epsilon, calibration.step_damage.T * multiplier * eta.T).T


def observe_routing(observation: Observation, calibration: Calibration) -> RoutingTerms:
    """Merges the batch's routing mass once, buckets it once (equation 1 and the paper's batched serving)."""
    expected = (calibration.num_layers, calibration.num_experts)
    if observation.routing_mass.shape[1:] != expected:
        raise ValueError(f"routing_mass is by {observation.routing_mass.shape[1:]}; the calibration is by {expected}")
    mass = batch_mass(observation.routing_mass, observation.kv_blocks)
    buckets = assign_buckets(mass, calibration.policy)
    observed = observation.routing_mass.sum(axis=(0, 2))
    return routing_terms(buckets, bucket_multipliers(mass, buckets, observed, calibration.policy), calibration.policy)


def score_actions(table: TableView, observation: Observation, calibration: Calibration) -> Scored:
    """Algorithm 1, line 6, for every floor stage."""
    if table.committed.shape[0] != calibration.num_linear_blocks:
        raise ValueError(
            f"{table.committed.shape[0]} linear-blocks in the table, {calibration.num_linear_blocks} calibrated"
        )
    routing = observe_routing(observation, calibration)
    eta = prompt_residual(calibration, observation.features)
    return Scored(
        damage=step_damages(calibration, routing.multiplier, eta),
        slots=table.step_slots,
        bits=np.asarray(table.committed, np.int8),
        movable=table.movable,
        floors=routing.floors,
        cap_floor=np.maximum(table.initial - routing.depth_caps, MIN_BITS).astype(np.int8),
        top=table.top_bits,
    )
