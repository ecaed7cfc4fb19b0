"""Policies: JSON round trip, refusals that say what to change, measured multipliers, no import of JAX."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from pwjax.errors import UserError
from pwjax.planner import Policy, default_policy, fit_multipliers
from pwjax.planner.policy import bucket_ends


def test_round_trip_through_json() -> None:
    policy = default_policy()
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bucket_shares": (0.5, 0.5, 1.0)}, "rise"),
        ({"bucket_shares": (0.5, 0.7, 0.9)}, "exactly 1"),
        ({"multipliers": (1.0, 2.0)}, "multipliers has 2 entries for 3"),
        ({"multipliers": (1.0, 0.5, 2.0)}, "not fall"),
        ({"depth_caps": (1, 1)}, "depth_caps"),
        ({"depth_caps": (1, -1, 1)}, "negative"),
        ({"floor_stages": ()}, "empty"),
        ({"floor_stages": ((3, 3, 4),)}, "all 3"),
        ({"floor_stages": ((3, 3, 3), (3, 3, 4), (3, 3, 3))}, "protects more"),
        ({"floor_stages": ((3, 3), (3, 3, 3))}, "entries"),
        ({"floor_stages": ((3, 3, 9), (3, 3, 3))}, "3 to 8"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"alpha": -1.0}, "alpha"),
        ({"exchange_gain": 1.0}, "exchange_gain"),
        ({"exchange_moves": -1}, "exchange_moves"),
        ({"exchange_min_mass": -1.0}, "exchange_min_mass"),
        ({"multiplier_mass": -1.0}, "multiplier_mass"),
        ({"traffic_exponent": 3.0}, "traffic_exponent"),
    ],
)
def test_refuses(change: dict, message: str) -> None:
    good = Policy((0.5, 0.75, 1.0), (0.5, 1.0, 2.0), ((3, 3, 3),), (2, 2, 2), 1.0, 1e-9, 0.1, 4, 0.0, 16.0, 0.5)
    with pytest.raises(UserError, match=message):
        dataclasses.replace(good, **change)


def test_refuses_unknown_and_missing_keys() -> None:
    values = default_policy().to_dict()
    values["mu"] = values.pop("multipliers")
    with pytest.raises(UserError, match=r"missing keys \['multipliers'\], unknown keys \['mu'\]"):
        Policy.from_dict(values)


def test_default_multipliers_average_to_one() -> None:
    policy = default_policy()
    widths = np.diff([0.0, *policy.bucket_shares])
    assert np.isclose(widths @ policy.multipliers, 1.0)


@pytest.mark.parametrize(
    ("experts", "ends"), [(32, (8, 16, 24, 28, 32)), (60, (15, 30, 45, 53, 60)), (8, (2, 4, 6, 7, 8))]
)
def test_bucket_ends(experts: int, ends: tuple[int, ...]) -> None:
    assert bucket_ends(default_policy().bucket_shares, experts) == ends


def test_fit_multipliers_measures_relative_traffic() -> None:
    policy = Policy((0.5, 1.0), (1.0, 1.0), ((3, 3),), (5, 5), 1.0, 1e-9, 0.1, 4, 0.0, 16.0, 0.5)
    shares = np.array([[0.4, 0.1, 0.3, 0.2], [2.0, 2.0, 8.0, 4.0], [0.0, 0.0, 0.0, 0.0]])
    # Sorted: (.1 .2 | .3 .4) and (.125 .125 | .25 .5), each times 4; the row without mass has no say.
    fitted = fit_multipliers(policy, shares)
    np.testing.assert_allclose(fitted.multipliers, [(0.6 + 0.5) / 2, (1.4 + 1.5) / 2])
    assert fit_multipliers(policy, np.zeros((2, 4))) == policy


def test_importing_the_planner_does_not_import_jax() -> None:
    program = (
        "import sys, pwjax.planner; sys.exit(any(name.split('.')[0] in ('jax', 'jaxlib') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
