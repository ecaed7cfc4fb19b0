"""Sorting pairs by expert and cutting them into tiles, against a loop in plain Python."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane_moe.activation import gated
from pallas_kernels.bitplane_moe.routing import (
    SortedPairs,
    Tiles,
    num_tiles_bound,
    plan_tiles,
    sort_pairs,
    tile_pairs,
)

SHAPES = [(1, 1, 1, 16), (5, 6, 8, 16), (130, 2, 5, 16), (40, 3, 60, 4)]  # tokens, top_k, experts, rows of a tile
PADDING = [0.0, 0.3, 1.0]


def random_ids(tokens: int, top_k: int, experts: int, padding: float) -> np.ndarray:
    rng = np.random.default_rng(tokens + experts)
    ids = rng.integers(0, experts, (tokens, top_k)).astype(np.int32)
    ids[rng.random(ids.shape) < padding] = experts
    return ids


@pytest.mark.parametrize("tokens, top_k, experts, rows", SHAPES)
@pytest.mark.parametrize("padding", PADDING)
def test_tiles_cover_every_real_pair_once(tokens: int, top_k: int, experts: int, rows: int, padding: float) -> None:
    ids = random_ids(tokens, top_k, experts, padding)
    pairs = jax.jit(functools.partial(sort_pairs, num_experts=experts))(jnp.asarray(ids))
    tiles = jax.jit(functools.partial(tile_pairs, num_experts=experts, tile_rows=rows))(pairs)
    assert_sorted(pairs, ids)
    assert len(tiles.rows) == num_tiles_bound(ids.size, experts, rows)
    assert_covered(tiles, pairs, ids, experts, rows)


@pytest.mark.parametrize("tokens, top_k, experts, rows", [*SHAPES, (85, 3, 7, 16), (86, 3, 7, 16), (5, 4, 60, 16)])
@pytest.mark.parametrize("padding", PADDING)
def test_every_plan_covers_every_real_pair_once(
    tokens: int, top_k: int, experts: int, rows: int, padding: float
) -> None:
    """A tile a pair, all pairs compared, or sorted: by size."""
    ids = random_ids(tokens, top_k, experts, padding)
    plan = jax.jit(functools.partial(plan_tiles, num_experts=experts, tile_rows=rows))
    pairs, tiles = plan(jnp.asarray(ids))
    if tokens > 1 and 3 * ids.size > experts:
        assert_sorted(pairs, ids)
    assert_covered(tiles, pairs, ids, experts, rows)


def assert_sorted(pairs: SortedPairs, ids: np.ndarray) -> None:
    order = np.argsort(ids.reshape(-1), kind="stable")
    np.testing.assert_array_equal(pairs.order, order)
    np.testing.assert_array_equal(pairs.experts, ids.reshape(-1)[order])


def assert_covered(tiles: Tiles, pairs: SortedPairs, ids: np.ndarray, experts: int, rows: int) -> None:
    np.testing.assert_array_equal(np.asarray(pairs.order)[np.asarray(pairs.position)].reshape(-1), np.arange(ids.size))
    covered = []
    for expert, start, count in zip(*map(np.asarray, tiles), strict=True):
        assert 0 <= count <= rows
        covered += [(int(pairs.order[start + i]), int(expert)) for i in range(count)]
    assert sorted(covered) == [(pair, int(e)) for pair, e in enumerate(ids.reshape(-1)) if e < experts]


def test_ids_out_of_range_are_padding() -> None:
    pairs = sort_pairs(jnp.array([[-1, 2, 99]], jnp.int32), 3)
    np.testing.assert_array_equal(pairs.experts, [2, 3, 3])


def test_activations() -> None:
    x = np.random.default_rng(0).normal(size=(4, 10)).astype(np.float32) * 3
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    tanh = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    np.testing.assert_allclose(gated(jnp.asarray(x), "gelu_tanh"), tanh, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(gated(jnp.asarray(x), "silu"), gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="relu"):
        gated(jnp.asarray(x), "relu")
