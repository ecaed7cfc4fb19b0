"""Nesting: every further bit splits each cluster of a sorted row in two, exactly.

The best border of a cluster maximises the between term `s^2 / w_l + s^2 / w_r`, where `w_l` and `w_r` are the sums of
`w` on either side and `s` is the sum of `w (x - mean)` to the left. The maximum of every cluster is found by one
running maximum over the row of the key (cluster, gain), 7 + 25 bits in a uint32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pwjax.anyprec.seed import SEED_CLUSTERS, Sums, prefix_sums, search, seed_clusters, take

MAX_PARENTS = 128  # clusters before the last split
NUM_SPLITS = 5  # from 3 to 8 bits
GAIN_BITS = 25


def _next(values: jax.Array, fill: float) -> jax.Array:
    """Each element's right neighbour."""
    return jnp.pad(values[:, 1:], ((0, 0), (0, 1)), constant_values=fill)


def _safe(values: jax.Array) -> jax.Array:
    """For divisions whose result isn't used where `values` is not positive."""
    return jnp.where(values > 0, values, 1.0)


def _best_borders(
    x: jax.Array, sums: Sums, cluster: jax.Array, edges: jax.Array, means: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where each cluster splits: int32 `[R, 128]` elements to the left of the border, and whether it can split."""
    first, last = edges[:, :-1], edges[:, 1:]
    weight, moment, square = sums.between(first, last)
    spread = jnp.maximum(square - moment * means, jnp.finfo(jnp.float64).tiny)
    of_element = functools.partial(take, index=cluster)
    left = sums.weight[:, 1:] - of_element(take(sums.weight, first))
    right = of_element(weight) - left
    offset = sums.moment[:, 1:] - of_element(take(sums.moment, first)) - of_element(means) * left
    # Equal values stay together: that is never worse, and the result doesn't depend on the order of equal values.
    legal = (cluster == _next(cluster, -1)) & (x != _next(x, jnp.inf)) & (left > 0) & (right > 0)
    share = offset * offset / _safe(left) * of_element(weight / spread) / _safe(right)
    share = jnp.clip(share, 0.0, 1.0).astype(jnp.float32)
    key = jnp.where(legal, 1 + (share * (2**GAIN_BITS - 2)).astype(jnp.uint32), jnp.uint32(0))
    best = lax.cummax(key | (cluster.astype(jnp.uint32) << GAIN_BITS), axis=1)
    best_of_cluster = take(best, jnp.maximum(last - 1, 0))
    can_split = (first < last) & ((best_of_cluster & (2**GAIN_BITS - 1)) > 0)
    return jnp.where(can_split, search(best, best_of_cluster, "left") + 1, last), can_split


def _split(
    x: jax.Array, sums: Sums, state: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
    """One more bit. `state`: cluster of each element, edges `[R, 129]`, means `[R, 128]`.

    Returns the next state (whose edges and means hold the first 128 children) and the means of all 256 children.
    """
    cluster, edges, means = state
    rows = len(x)
    first, last = edges[:, :-1], edges[:, 1:]
    middle, can_split = _best_borders(x, sums, cluster, edges, means)
    halves = (sums.between(first, middle), sums.between(middle, last))
    child_means = [jnp.where(can_split, half.moment / _safe(half.weight), means) for half in halves]
    child_means = jnp.stack(child_means, axis=-1).reshape(rows, -1)
    child_edges = jnp.stack([first, middle], axis=-1).reshape(rows, -1)[:, : MAX_PARENTS + 1]
    position = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    cluster = 2 * cluster + (position >= take(middle, cluster)).astype(jnp.int32)
    return (cluster, child_edges, child_means[:, :MAX_PARENTS]), child_means


def fit_sorted(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Nested clusters of sorted rows. Trace it with `jax.enable_x64(True)`.

    Args:
        x, w: float32 `[R, M]` as for `seed_clusters`.

    Returns:
        codes uint8 `[R, M]`, ascending in each row, whose top b bits are the b-bit codes;
        means float64 `[R, 6, 256]`: entry `j < 2**b` of row `b - 3` is the mean of cluster `j` at b bits (an empty
        cluster has its parent's), the rest is unspecified.
    """
    size = x.shape[1]
    sums = prefix_sums(x, w)
    seed_edges, seed_means = seed_clusters(x, w, sums)
    position = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    cluster = jnp.zeros(x.shape, jnp.int32)
    for border in range(1, SEED_CLUSTERS):
        cluster += (position >= seed_edges[:, border, None]).astype(jnp.int32)
    pad = ((0, 0), (0, MAX_PARENTS - SEED_CLUSTERS))
    edges = jnp.pad(seed_edges, pad, constant_values=size)
    state = (cluster, edges, jnp.pad(seed_means, pad))
    (codes, _, _), means = lax.scan(lambda carry, _: _split(x, sums, carry), state, length=NUM_SPLITS)
    seed_row = jnp.pad(seed_means, ((0, 0), (0, 2 * MAX_PARENTS - SEED_CLUSTERS)))
    return codes.astype(jnp.uint8), jnp.concatenate([seed_row[:, None], jnp.moveaxis(means, 0, 1)], axis=1)
