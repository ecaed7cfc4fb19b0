"""Groups (token, choice) pairs by expert, so that a weight is decoded once for all the tokens that chose it.

Shared by every implementation of the op. A *pair* is one choice of one token; pair `t * k + c` is choice `c` of token
`t`. Padding pairs have expert id `num_experts` and sort last.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MAX_COMPARED_PAIRS = 256
"""Up to here everything follows from comparing all pairs with all, without a scatter or a search."""
MAX_RANKED_PAIRS = 16384
"""Up to here a GPU ranks by comparing all with all: XLA's sort of so few takes a hundred launches."""


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
    ids = _known_ids(expert_ids, num_experts)
    # One key that holds both is unique, so the sort needs neither a second operand nor stability.
    keys = jnp.sort(ids * pairs + jnp.arange(pairs, dtype=jnp.int32))
    order = keys % pairs
    position = jnp.zeros(pairs, jnp.int32).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
    return SortedPairs(order, keys // pairs, position.reshape(expert_ids.shape))


def _known_ids(expert_ids: jax.Array, num_experts: int) -> jax.Array:
    """Of every pair, int32 `[T * k]`; what is no expert is `num_experts`."""
    ids = expert_ids.reshape(expert_ids.size)
    return jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)


def plan_tiles(expert_ids: jax.Array, num_experts: int, tile_rows: int) -> tuple[SortedPairs, Tiles]:
    """Sorted pairs of `expert_ids`, int32 `[T, k]`, and their tiles, by as few launches as the size allows."""
    pairs = expert_ids.size
    if expert_ids.shape[0] == 1 or 3 * pairs <= num_experts:
        return _one_tile_a_pair(expert_ids, num_experts)
    if pairs <= MAX_COMPARED_PAIRS:
        return _compare_pairs(expert_ids, num_experts, tile_rows)
    arrange = _rank_pairs if pairs <= MAX_RANKED_PAIRS else sort_pairs
    sorted_pairs = arrange(expert_ids, num_experts)
    return sorted_pairs, tile_pairs(sorted_pairs, num_experts, tile_rows)


def _rank_pairs(expert_ids: jax.Array, num_experts: int) -> SortedPairs:
    """As `sort_pairs`: where a pair goes is the number of pairs before it."""
    total = expert_ids.size
    ids = _known_ids(expert_ids, num_experts)
    index = jnp.arange(total, dtype=jnp.int32)
    keys = ids * total + index
    position = jnp.sum(keys[None, :] < keys[:, None], axis=1, dtype=jnp.int32)
    order = jnp.zeros(total, jnp.int32).at[position].set(index, unique_indices=True)
    return SortedPairs(order, ids[order], position.reshape(expert_ids.shape))


def _one_tile_a_pair(expert_ids: jax.Array, num_experts: int) -> tuple[SortedPairs, Tiles]:
    """Pairs stay where they are: few of them share an expert."""
    every_pair = jnp.asarray(np.arange(expert_ids.size, dtype=np.int32))  # a constant, where iota would be a launch
    ids = _known_ids(expert_ids, num_experts)
    pairs = SortedPairs(every_pair, ids, every_pair.reshape(expert_ids.shape))
    return pairs, Tiles(ids, every_pair, (ids < num_experts).astype(jnp.int32))


def _compare_pairs(expert_ids: jax.Array, num_experts: int, tile_rows: int) -> tuple[SortedPairs, Tiles]:
    """Every pair compared with every other: a few fused sums instead of a sort, searches and scatters."""
    total = expert_ids.size
    ids = _known_ids(expert_ids, num_experts)
    index = jnp.arange(total, dtype=jnp.int32)
    same = ids[:, None] == ids[None, :]
    before = same & (index[None, :] < index[:, None])
    count = lambda where: jnp.sum(where, axis=1, dtype=jnp.int32)  # noqa: E731
    rank = count(before)  # among the pairs of its expert
    position = count((ids[None, :] < ids[:, None]) | before)
    left = count(same) - rank
    leads = (rank % tile_rows == 0) & (ids < num_experts)
    number = count(leads[None, :] & (position[None, :] < position[:, None]))
    number = jnp.where(leads, number, total)
    at = lambda place, values: jnp.sum(  # noqa: E731
        jnp.where(place[None, :] == index[:, None], values[None, :], 0), axis=1, dtype=jnp.int32
    )
    used = count(number[None, :] == index[:, None]) > 0
    pairs = SortedPairs(at(position, index), at(position, ids), position.reshape(expert_ids.shape))
    tiles = Tiles(
        jnp.where(used, at(number, ids), num_experts), at(number, position), at(number, jnp.minimum(left, tile_rows))
    )
    bound = num_tiles_bound(total, num_experts, tile_rows)
    return pairs, Tiles(*(array[:bound] for array in tiles))


def num_tiles_bound(pairs: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that `pairs` pairs can need: every chosen expert may end in a partly filled one."""
    return min(pairs, -(-pairs // tile_rows) + min(num_experts, pairs))


def tile_pairs(pairs: SortedPairs, num_experts: int, tile_rows: int) -> Tiles:
    """Cuts sorted pairs into tiles, as many as `num_tiles_bound` (a static grid; the rest are empty)."""
    total = pairs.order.shape[0]
    ends = _search(pairs.experts, jnp.arange(1, num_experts + 1, dtype=jnp.int32))
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    last_tile = jnp.cumsum((ends - begins + tile_rows - 1) // tile_rows, dtype=jnp.int32)
    tile = jnp.arange(num_tiles_bound(total, num_experts, tile_rows), dtype=jnp.int32)
    expert = _search(last_tile, tile, side="right")
    known = jnp.minimum(expert, num_experts - 1)
    first_tile = jnp.where(known > 0, last_tile[known - 1], 0)
    start = begins[known] + (tile - first_tile) * tile_rows
    rows = jnp.clip(ends[known] - start, 0, tile_rows)
    return Tiles(expert, start, jnp.where(expert < num_experts, rows, 0))


def _search(values: jax.Array, queries: jax.Array, side: str = "left") -> jax.Array:
    """`jnp.searchsorted` in one launch: bisection is a loop on the device, at 10 microseconds a step on a GPU."""
    return jnp.searchsorted(values, queries, side=side, method="compare_all").astype(jnp.int32)
