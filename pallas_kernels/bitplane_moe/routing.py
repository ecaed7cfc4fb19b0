"""Groups (token, choice) pairs by expert, so that a weight is decoded once for all the tokens that chose it.

Shared by every implementation of the op. A *pair* is one choice of one token; pair `t * k + c` is choice `c` of token
`t`. Padding pairs have expert id `num_experts` and sort last.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class SortedPairs(NamedTuple):
    """Pairs in order of expert, equal experts in order of pair."""

    order: jax.Array  # int32 [T * k]: pair at each sorted position
    experts: jax.Array  # int32 [T * k]: its expert; num_experts for padding
    position: jax.Array  # int32 [T, k]: where each pair went


class Tiles(NamedTuple):
    """Runs of at most `tile_rows` sorted pairs of one expert. Unused tiles have `rows` 0 and expert `num_experts`."""

    experts: jax.Array  # int32 [num_tiles]
    starts: jax.Array  # int32 [num_tiles]: first sorted position
    rows: jax.Array  # int32 [num_tiles]


def sort_pairs(expert_ids: jax.Array, num_experts: int) -> SortedPairs:
    """Sorts the pairs of `expert_ids`, int32 `[T, k]`; ids outside `0..num_experts-1` count as padding."""
    pairs = expert_ids.size
    ids = expert_ids.reshape(pairs)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    # One key that holds both is unique, so the sort needs neither a second operand nor stability.
    keys = jnp.sort(ids * pairs + jnp.arange(pairs, dtype=jnp.int32))
    order = keys % pairs
    position = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    return SortedPairs(order, keys // pairs, position.reshape(expert_ids.shape))


def num_tiles_bound(pairs: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that `pairs` pairs can need: every chosen expert may end in a partly filled one."""
    return min(pairs, -(-pairs // tile_rows) + min(num_experts, pairs))


def tile_pairs(pairs: SortedPairs, num_experts: int, tile_rows: int) -> Tiles:
    """Cuts sorted pairs into tiles, as many as `num_tiles_bound` (a static grid; the rest are empty)."""
    total = pairs.order.shape[0]
    ends = jnp.searchsorted(pairs.experts, jnp.arange(1, num_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    last_tile = jnp.cumsum((ends - begins + tile_rows - 1) // tile_rows, dtype=jnp.int32)
    tile = jnp.arange(num_tiles_bound(total, num_experts, tile_rows), dtype=jnp.int32)
    expert = jnp.searchsorted(last_tile, tile, side="right").astype(jnp.int32)
    known = jnp.minimum(expert, num_experts - 1)
    first_tile = jnp.where(known > 0, last_tile[known - 1], 0)
    start = begins[known] + (tile - first_tile) * tile_rows
    rows = jnp.clip(ends[known] - start, 0, tile_rows)
    return Tiles(expert, start, jnp.where(expert < num_experts, rows, 0))
