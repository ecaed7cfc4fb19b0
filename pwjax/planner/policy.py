"""The planner's hyperparameters: routing buckets, multipliers, floors, depth caps (paper sections 3.2 and 4).

A policy is plain data: it is stored with a prepared model as JSON and shown by `pwjax inspect`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pwjax.errors import UserError

_LOWEST, _HIGHEST = 3, 8  # bit-widths; types.py, which imports this file, has the public names


@dataclasses.dataclass(frozen=True)
class Policy:
    """Hyperparameters of the planner. Buckets go from the coldest experts to the hottest.

    Attributes:
        bucket_shares: cumulative shares of a layer's experts, rising, the last one 1: `(0.5, 0.85, 1.0)` puts the
            coldest half of the experts in bucket 0 and the hottest 15% in bucket 2.
        multipliers: mu of equation 8, by bucket, not falling.
        multiplier_mass: routing mass of a layer at which what is observed weighs as much as `multipliers`; a huge
            number keeps them fixed, as in the paper.
        traffic_exponent: damage grows with observed traffic to this power.
        floor_stages: a stage, a bucket: the lowest bits a move may reach. From protective to the last stage, all 3.
        depth_caps: most bits below the initial assignment, by bucket.
        alpha: strength of the prompt residual (equation 6).
        epsilon: smallest damage of a step (equation 8), nats a token.
        exchange_gain: an exchange must lower predicted damage by more than this share of what its raises avoid, in
            [0, 1). A share and not a number of nats, so that one default serves models of any sensitivity.
        exchange_moves: most linear-blocks that one boundary's exchange raises; 0 turns the exchange off.
        exchange_min_mass: routing mass (sum of routing weights, at most one a token) that a layer must have seen, on
            average, before anything is exchanged: the first tokens say little about which experts are hot.
    """

    bucket_shares: tuple[float, ...]
    multipliers: tuple[float, ...]
    floor_stages: tuple[tuple[int, ...], ...]
    depth_caps: tuple[int, ...]
    alpha: float
    epsilon: float
    exchange_gain: float
    exchange_moves: int
    exchange_min_mass: float
    multiplier_mass: float
    traffic_exponent: float

    def __post_init__(self) -> None:
        self._check_buckets()
        self._check_floors()
        if any(cap < 0 for cap in self.depth_caps):
            raise UserError(f"planner policy: depth_caps {self.depth_caps} must not be negative")
        if not self.epsilon > 0:
            raise UserError(f"planner policy: epsilon is {self.epsilon}; it must be above 0")
        if not self.alpha >= 0:
            raise UserError(f"planner policy: alpha is {self.alpha}; it must be at least 0")
        if not 0 <= self.exchange_gain < 1:
            raise UserError(f"planner policy: exchange_gain is {self.exchange_gain}; it must be in [0, 1)")
        if self.exchange_moves < 0:
            raise UserError(f"planner policy: exchange_moves is {self.exchange_moves}; it must be at least 0")
        if not 0 <= self.traffic_exponent <= 2:
            raise UserError(f"planner policy: traffic_exponent is {self.traffic_exponent}; it must be 0 to 2")
        if not self.multiplier_mass >= 0:
            raise UserError(f"planner policy: multiplier_mass is {self.multiplier_mass}; it must be at least 0")
        if not self.exchange_min_mass >= 0:
            raise UserError(f"planner policy: exchange_min_mass is {self.exchange_min_mass}; it must be at least 0")

    def _check_buckets(self) -> None:
        shares, buckets = self.bucket_shares, len(self.bucket_shares)
        if not buckets or shares[0] <= 0 or shares[-1] != 1.0 or any(b <= a for a, b in itertools.pairwise(shares)):
            raise UserError(f"planner policy: bucket_shares {shares} must rise from above 0 to exactly 1")
        for name in ("multipliers", "depth_caps"):
            if len(getattr(self, name)) != buckets:
                raise UserError(f"planner policy: {name} has {len(getattr(self, name))} entries for {buckets} buckets")
        mu = self.multipliers
        if not all(np.isfinite(mu)) or mu[0] < 0 or any(b < a for a, b in itertools.pairwise(mu)):
            raise UserError(f"planner policy: multipliers {mu} must be at least 0 and not fall from cold to hot")

    def _check_floors(self) -> None:
        if not self.floor_stages:
            raise UserError("planner policy: floor_stages is empty; give at least the last stage, all 3")
        for stage in self.floor_stages:
            if len(stage) != len(self.bucket_shares):
                raise UserError(f"planner policy: floor stage {stage} needs {len(self.bucket_shares)} entries")
            if any(not _LOWEST <= floor <= _HIGHEST for floor in stage):
                raise UserError(f"planner policy: floor stage {stage} must stay within {_LOWEST} to {_HIGHEST} bits")
        for before, after in itertools.pairwise(self.floor_stages):
            if any(b > a for a, b in zip(before, after, strict=True)):
                raise UserError(f"planner policy: floor stage {after} protects more than {before} before it")
        if any(floor != _LOWEST for floor in self.floor_stages[-1]):
            raise UserError(f"planner policy: the last floor stage {self.floor_stages[-1]} must be all {_LOWEST}")

    @property
    def num_buckets(self) -> int:
        """How many routing buckets a layer's experts fall into."""
        return len(self.bucket_shares)

    def to_dict(self) -> dict[str, Any]:
        """The policy as JSON types."""
        values = dataclasses.asdict(self)
        values["floor_stages"] = [list(stage) for stage in self.floor_stages]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Policy:
        """Reads what `to_dict` wrote; names missing and unknown keys."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) != names:
            missing, unknown = sorted(names - set(values)), sorted(set(values) - names)
            raise UserError(f"planner policy: missing keys {missing}, unknown keys {unknown}; run prepare again")
        return cls(
            bucket_shares=tuple(float(v) for v in values["bucket_shares"]),
            multipliers=tuple(float(v) for v in values["multipliers"]),
            floor_stages=tuple(tuple(int(v) for v in stage) for stage in values["floor_stages"]),
            depth_caps=tuple(int(v) for v in values["depth_caps"]),
            alpha=float(values["alpha"]),
            epsilon=float(values["epsilon"]),
            exchange_gain=float(values["exchange_gain"]),
            exchange_moves=int(values["exchange_moves"]),
            exchange_min_mass=float(values["exchange_min_mass"]),
            multiplier_mass=float(values["multiplier_mass"]),
            traffic_exponent=float(values["traffic_exponent"]),
        )

    def without_routing(self) -> Policy:
        """The ablation `--no-routing`: one bucket, multiplier 1, the last floor stage, no depth cap."""
        return dataclasses.replace(
            self,
            bucket_shares=(1.0,),
            multipliers=(1.0,),
            floor_stages=((_LOWEST,),),
            depth_caps=(_HIGHEST - _LOWEST,),
        )


def default_policy() -> Policy:
    """The policy where no search has been made. docs/planner.md explains the numbers.

    Five buckets, widths 1/4, 1/4, 1/4, 1/8, 1/8. A multiplier is the usual traffic of its bucket over a layer's mean
    (0.15, 0.45, 0.9, 1.6, 3.4), to the power 1/2 and scaled to average to 1 over the experts, as calibrated
    sensitivities assume mean traffic. docs/experiments.md has the power's measurement.
    """
    return Policy(
        bucket_shares=(0.25, 0.5, 0.75, 0.875, 1.0),
        multipliers=(0.5, 0.75, 1.05, 1.35, 2.05),
        floor_stages=((3, 3, 4, 4, 5), (3, 3, 3, 4, 4), (3, 3, 3, 3, 3)),
        depth_caps=(5, 4, 3, 2, 2),
        alpha=1.0,
        epsilon=1e-9,
        exchange_gain=0.5,
        exchange_moves=32,
        exchange_min_mass=32.0,
        multiplier_mass=16.0,
        traffic_exponent=0.5,
    )


def fit_multipliers(policy: Policy, routing_shares: NDArray[np.floating]) -> Policy:
    """The policy with multipliers measured: each bucket's mean traffic over a layer's mean.

    Args:
        routing_shares: [..., num_experts], routing mass by expert (equation 1) of calibration sequences and layers; one
            sequence a row, not their sum, since a single prompt is less even than a corpus.
    """
    shares = np.sort(np.asarray(routing_shares, np.float64).reshape(-1, routing_shares.shape[-1]), axis=1)
    total = shares.sum(axis=1, keepdims=True)
    kept = total[:, 0] > 0
    if not kept.any():
        return policy
    relative = (shares[kept] / total[kept]).mean(axis=0) * shares.shape[1]
    ends = bucket_ends(policy.bucket_shares, shares.shape[1])
    starts = (0, *ends[:-1])
    means = [relative[a:b].mean() if b > a else float("nan") for a, b in zip(starts, ends, strict=True)]
    # A bucket that is empty with so few experts takes its colder neighbour's multiplier; it is never used.
    filled: list[float] = []
    for mean in means:
        filled.append(float(mean) if np.isfinite(mean) else (filled[-1] if filled else 0.0))
    return dataclasses.replace(policy, multipliers=tuple(filled))


def bucket_ends(bucket_shares: tuple[float, ...], num_experts: int) -> tuple[int, ...]:
    """How many of a layer's experts, coldest first, lie in bucket b or a colder one (rounded half up)."""
    return tuple(int(np.floor(share * num_experts + 0.5)) for share in bucket_shares)
