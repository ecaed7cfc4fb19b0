"""Equation 1, the batch average with KV-block weights, and buckets: all against values made by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from planner_cases import POLICY, Case, cases

from pwjax.planner import default_policy
from pwjax.planner.routing import UNOBSERVED, assign_buckets, batch_mass, bucket_multipliers, routing_terms


def test_equation_1_of_one_request() -> None:
    # Tokens route to experts (0, 2) with weights (.7, .3), then to (2, 1) with (.5, .1): sums .7, .1, .8 of 1.6.
    mass = batch_mass(np.array([[[0.7, 0.1, 0.8, 0.0]]]), np.array([3.0]))
    np.testing.assert_allclose(mass, [[0.7 / 1.6, 0.1 / 1.6, 0.8 / 1.6, 0.0]])


def test_batch_is_weighted_by_kv_blocks_not_by_tokens() -> None:
    long = [[30.0, 10.0], [0.0, 0.0]]  # nothing routed in layer 1 yet
    short = [[1.0, 3.0], [2.0, 2.0]]
    mass = batch_mass(np.array([long, short]), np.array([9.0, 1.0]))
    np.testing.assert_allclose(mass, [[0.9 * 0.75 + 0.1 * 0.25, 0.9 * 0.25 + 0.1 * 0.75], [0.5, 0.5]])


def test_requests_without_kv_blocks_count_alike() -> None:
    mass = batch_mass(np.array([[[1.0, 0.0]], [[1.0, 3.0]]]), np.array([0.0, 0.0]))
    np.testing.assert_allclose(mass, [[0.625, 0.375]])


@given(cases())
def test_mass_of_an_observed_layer_sums_to_one(case: Case) -> None:
    mass = batch_mass(case.observation.routing_mass, case.observation.kv_blocks)
    seen = case.observation.routing_mass.sum(axis=(0, 2)) > 0
    np.testing.assert_allclose(mass.sum(axis=1), seen.astype(float), atol=1e-12)


def test_buckets_by_rank_within_a_layer() -> None:
    mass = np.array([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]])
    assert assign_buckets(mass, POLICY).tolist() == [[2, 0, 1, 0], [0, 0, 1, 2]]


def test_equal_experts_go_by_index() -> None:
    assert assign_buckets(np.full((1, 4), 0.25), POLICY).tolist() == [[0, 0, 1, 2]]


def test_never_routed_experts_are_coldest_and_silent_layers_neutral() -> None:
    mass = np.array([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert assign_buckets(mass, POLICY).tolist() == [[0, 0, 0, 2], [UNOBSERVED] * 4]
    # Ranks alone would put expert 2 of the first layer, never routed, into bucket 1.


def test_terms_by_linear_block() -> None:
    buckets = np.array([[2, 0], [UNOBSERVED, UNOBSERVED]], np.int8)
    terms = routing_terms(buckets, np.tile(np.array(POLICY.multipliers), (2, 1)), POLICY)
    assert terms.multiplier.tolist() == [3.0, 3.0, 0.25, 0.25, 1.0, 1.0, 1.0, 1.0]
    assert terms.floors.tolist() == [[5, 5, 3, 3, 3, 3, 3, 3], [4, 4, 3, 3, 3, 3, 3, 3], [3] * 8]
    assert terms.depth_caps.tolist() == [1, 1, 3, 3, 3, 3, 3, 3]


@given(cases())
def test_hotter_experts_never_have_smaller_multipliers(case: Case) -> None:
    policy = default_policy()
    mass = batch_mass(case.observation.routing_mass, case.observation.kv_blocks)
    for layer, buckets in zip(mass, assign_buckets(mass, policy), strict=True):
        assert np.all(np.diff(buckets[np.argsort(layer, kind="stable")]) >= 0)


def test_multipliers_go_from_the_policy_to_what_is_observed() -> None:
    """Hand computed: buckets of one cold, one middle and one hot expert at 0.2, 0.8 and 2 times the mean."""
    policy = dataclasses.replace(
        POLICY,
        bucket_shares=(1 / 3, 2 / 3, 1.0),
        multipliers=(0.5, 1.0, 3.0),
        multiplier_mass=10.0,
        traffic_exponent=1.0,
    )
    mass = np.array([[0.2, 0.8, 2.0]]) / 3
    buckets = assign_buckets(mass, policy)
    got = bucket_multipliers(mass, buckets, np.array([30.0]), policy)
    np.testing.assert_allclose(got, [[0.75 * 0.2 + 0.25 * 0.5, 0.75 * 0.8 + 0.25, 0.75 * 2.0 + 0.25 * 3.0]])
    fixed = bucket_multipliers(mass, buckets, np.array([30.0]), dataclasses.replace(policy, multiplier_mass=1e30))
    np.testing.assert_allclose(fixed, [policy.multipliers])
    root = dataclasses.replace(policy, multiplier_mass=0.0, traffic_exponent=0.5)
    np.testing.assert_allclose(
        bucket_multipliers(mass, buckets, np.array([30.0]), root), [np.sqrt([0.2, 0.8, 2.0])], rtol=1e-12
    )


def test_without_routing_every_expert_counts_alike() -> None:
    policy = POLICY.without_routing()
    mass = np.array([[0.9, 0.1]])
    buckets = assign_buckets(mass, policy)
    terms = routing_terms(buckets, bucket_multipliers(mass, buckets, np.array([5.0]), policy), policy)
    assert set(terms.multiplier.tolist()) == {1.0}
    assert dataclasses.replace(policy, alpha=POLICY.alpha).num_buckets == 1
