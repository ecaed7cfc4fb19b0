"""Routing mass (equation 1), its average over a batch, and the buckets that give multipliers, floors and depth caps."""

from __future__ import annotations

import dataclasses

import numpy as np

from pwjax.planner.policy import Policy, bucket_ends
from pwjax.planner.types import UNITS, FloatArray, IntArray

UNOBSERVED = -1
"""Bucket of the experts of a layer where nothing has been routed yet."""


@dataclasses.dataclass(frozen=True, eq=False)
class RoutingTerms:
    """What routing says about every linear-block; the two linear-blocks of an expert are always alike.

    Attributes:
        multiplier: float64 [n], mu of equation 8.
        floors: int8 [stages, n], the lowest bits a move may reach.
        depth_caps: int8 [n], most bits below the initial assignment.
    """

    multiplier: FloatArray
    floors: IntArray
    depth_caps: IntArray


def batch_mass(routing_mass: FloatArray, kv_blocks: FloatArray) -> FloatArray:
    """m of equation 1 for the batch: each request's mass over its layer's sum, averaged with KV-block weights.

    A request that has routed nothing in a layer has no say there. Where all that have routed hold no KV block, they
    count alike.

    Args:
        routing_mass: [R, L, E], sums of routing weights by request.
        kv_blocks: [R].

    Returns:
        float64 [L, E]; a layer sums to 1, or to 0 when nothing has been observed.
    """
    mass = np.asarray(routing_mass, np.float64)
    totals = mass.sum(axis=2)  # [R, L]
    seen = totals > 0
    weight = np.asarray(kv_blocks, np.float64)[:, None] * seen
    weight = np.where(weight.sum(axis=0) > 0, weight, seen)
    weight_sum = weight.sum(axis=0)  # [L]
    per_request = np.divide(
        weight, totals * np.where(weight_sum > 0, weight_sum, 1.0), where=seen, out=np.zeros_like(totals)
    )
    return np.einsum("rle,rl->le", mass, per_request)


def observed_mass(routing_mass: FloatArray) -> float:
    """How much has been seen: routing mass of all requests, by layer, averaged over layers.

    Args:
        routing_mass: [R, L, E], sums of routing weights by request.
    """
    return float(np.sum(routing_mass) / routing_mass.shape[1])


def assign_buckets(mass: FloatArray, policy: Policy) -> IntArray:
    """beta of every expert: its place among its layer's experts by mass; equal ones by index.

    An expert with no mass is in the coldest bucket, however many there are: among the never-routed, rank means nothing.

    Args:
        mass: [L, E].

    Returns:
        int8 [L, E], 0 (coldest) to `policy.num_buckets - 1`; `UNOBSERVED` throughout a layer without any mass.
    """
    num_experts = mass.shape[1]
    by_rank = np.searchsorted(bucket_ends(policy.bucket_shares, num_experts), np.arange(num_experts), side="right")
    order = np.argsort(mass, axis=1, kind="stable")
    buckets = np.empty(mass.shape, np.int8)
    np.put_along_axis(buckets, order, np.broadcast_to(by_rank.astype(np.int8), mass.shape), axis=1)
    buckets[mass <= 0] = 0
    buckets[~np.any(mass > 0, axis=1)] = UNOBSERVED
    return buckets


def bucket_multipliers(mass: FloatArray, buckets: IntArray, observed: FloatArray, policy: Policy) -> FloatArray:
    """mu of every layer and bucket: the policy's number, drawn towards what this batch shows.

    What a batch shows is a bucket's traffic over its layer's mean, to the power `traffic_exponent`. How uneven routing
    is differs between layers and texts (busiest experts at 1.9 times the mean in one layer and 3.7 in another, on the
    demo model), so the policy's numbers are only where it starts: they count as `multiplier_mass` of routing mass.

    Args:
        mass: [L, E], m of equation 1 for the batch.
        buckets: [L, E] from `assign_buckets`.
        observed: [L], routing mass seen in each layer.

    Returns:
        float64 [L, buckets]; rows of layers without any mass are not used.
    """
    prior = np.array(policy.multipliers, np.float64)
    traffic = (mass * mass.shape[1]) ** policy.traffic_exponent
    members = buckets[:, None, :] == np.arange(policy.num_buckets)[:, None]  # [L, buckets, E]
    counts = members.sum(axis=2)
    mean = np.divide(
        (members * traffic[:, None, :]).sum(axis=2), counts, out=np.tile(prior, (len(mass), 1)), where=counts > 0
    )
    weight = (observed / np.maximum(observed + policy.multiplier_mass, 1e-30))[:, None]
    return weight * mean + (1 - weight) * prior


def routing_terms(buckets: IntArray, multipliers: FloatArray, policy: Policy) -> RoutingTerms:
    """Multipliers, floors and caps by linear-block.

    Where nothing has been observed, routing constrains nothing: multiplier 1, a stage's lowest floor, the widest cap.

    Args:
        buckets: [L, E] from `assign_buckets`.
        multipliers: [L, buckets] from `bucket_multipliers`.
    """
    flat = np.repeat(buckets.reshape(-1), UNITS)
    # `UNOBSERVED` is -1, so the value for it is the last entry of each table.
    padded = np.concatenate([multipliers, np.ones((len(multipliers), 1))], axis=1)
    multiplier = np.repeat(np.take_along_axis(padded, buckets.astype(np.int64), axis=1).reshape(-1), UNITS)
    floors = np.array([[*stage, min(stage)] for stage in policy.floor_stages], np.int8)
    caps = np.array([*policy.depth_caps, max(policy.depth_caps)], np.int8)
    return RoutingTerms(multiplier=multiplier, floors=floors[:, flat], depth_caps=caps[flat])
