"""The arithmetic of the memory budget."""

import re

import jax
import jax.numpy as jnp
import pytest

from pwjax.engine.memory import FixedMemory, arena_slots, measured_peak_bytes, round_slots, workspace_bytes
from pwjax.errors import UserError

FIXED = FixedMemory(dense_bytes=1000, tables_bytes=200, staging_bytes=30, workspace_bytes=4)


@pytest.mark.parametrize("slots", [0, 1, 255, 256, 257, 1000, 10**6, 12345678])
def test_rounding_loses_less_than_a_percent(slots):
    rounded = round_slots(slots)
    assert rounded <= slots and slots - rounded <= slots / 128
    assert round_slots(rounded) == rounded


def test_the_arena_takes_what_is_left():
    assert FIXED.total_bytes == 1234
    slots = arena_slots(1234 + 100 * 64 + 63, FIXED, 64, least_slots=10)
    assert slots == 100


@pytest.mark.parametrize("least", [10, 257, 511, 100001])
def test_a_budget_too_small_names_one_that_will_do(least):
    with pytest.raises(UserError, match="--memory-budget 1300 is too small") as error:
        arena_slots(1300, FIXED, 64, least)
    assert "dense 1000 + tables 200 + staging 30 + workspace 4" in str(error.value)
    needed = int(re.search(r"(\d+) bytes are needed", str(error.value))[1])
    assert arena_slots(needed, FIXED, 64, least) >= least
    with pytest.raises(UserError):
        arena_slots(needed - 64, FIXED, 64, least)


def test_an_arena_too_small_is_named_as_such():
    with pytest.raises(UserError, match="--arena 640 is too small: 704 bytes are needed"):
        arena_slots(640, None, 64, 11)


def test_a_budget_below_the_fixed_parts_is_refused():
    with pytest.raises(UserError, match="too small"):
        arena_slots(100, FIXED, 64, 1)


def test_workspace_counts_temporaries_and_unaliased_outputs():
    arena = jax.ShapeDtypeStruct((1024,), jnp.float32)
    in_place = jax.jit(lambda a: a.at[3].set(1.0), donate_argnums=0).lower(arena).compile()
    copied = jax.jit(lambda a: a.at[3].set(1.0)).lower(arena).compile()
    assert workspace_bytes(in_place) < 1024
    assert workspace_bytes(copied) >= 4096


def test_measured_peak_is_none_where_the_device_does_not_tell():
    assert measured_peak_bytes(jax.devices("cpu")[0]) is None


@pytest.mark.gpu
def test_measured_peak_counts_what_is_allocated():
    held = jnp.zeros(2**20, jnp.uint8).block_until_ready()
    assert measured_peak_bytes(jax.devices()[0]) >= held.nbytes
