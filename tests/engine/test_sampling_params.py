"""Sampling parameters: what is refused, what is coerced, where greedy starts."""

import dataclasses
import math

import pytest

from pwjax.engine.sampling_params import SamplingParams
from pwjax.errors import UserError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1.0),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", True),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("max_tokens", None),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_a_bad_value_is_refused_in_one_line_that_names_the_field(field, value):
    with pytest.raises(UserError, match=field) as error:
        SamplingParams(**{field: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_p", 1e-9), ("top_k", 0), ("top_k", -1), ("top_k", 10**6), ("max_tokens", 0), ("seed", 2**32 - 1)],
)
def test_the_edges_of_the_ranges_are_allowed(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("given", "stored"),
    [("END", ("END",)), (["a", "b"], ("a", "b")), (None, ()), ((), ())],
)
def test_stop_becomes_a_tuple_and_a_string_is_one_stop(given, stored):
    assert SamplingParams(stop=given).stop == stored


def test_stop_token_ids_become_a_tuple():
    assert SamplingParams(stop_token_ids=[7, 8]).stop_token_ids == (7, 8)
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_greedy_below_1e_5(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_frozen_and_replaceable():
    params = SamplingParams(stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    assert dataclasses.replace(params, max_tokens=3).stop == ("x",)


def test_seeds_own_seed_wins_and_drawn_seeds_differ_but_repeat():
    assert SamplingParams(seed=11).seed_for(1, 2) == 11
    params = SamplingParams()
    drawn = [params.seed_for(engine_seed, number) for engine_seed in (0, 1) for number in range(100)]
    assert len(set(drawn)) == 200
    assert all(0 <= seed < 2**32 for seed in drawn)
    assert drawn[:100] == [params.seed_for(0, number) for number in range(100)]
