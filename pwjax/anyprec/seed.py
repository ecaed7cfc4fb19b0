"""The 3-bit seed: weighted 1-D k-means of sorted rows, vectorised over the rows.

Lloyd's iteration on sorted values needs only prefix sums: a cluster is a range, its mean a difference of prefix sums,
and its borders the midpoints of neighbouring means. The sums are float64 (the caller traces with `jax.enable_x64`),
because importances span many orders of magnitude and float32 sums would lose the light elements behind a heavy one.

Two deterministic starts are iterated together, and the better of a row is kept:

* the exact optimum (dynamic programming) over borders limited to 64 bins of equal `w^(1/3) dx^(2/3)`, which is the best
  density of levels at high resolution (Panter and Dite, 1951);
* borders at the seven largest terms of that sum, which is right when a few values stand far apart.

A row with at most eight distinct values gets one cluster for each, exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SEED_CLUSTERS = 8
NUM_BINS = 64
MAX_ITERATIONS = 300


class Sums(NamedTuple):
    """Exclusive prefix sums of `w`, `w x` and `w x^2`, float64 `[R, M + 1]`."""

    weight: jax.Array
    moment: jax.Array
    square: jax.Array

    def between(self, first: jax.Array, last: jax.Array) -> Sums:
        """Sums of the elements `first .. last - 1`; int32 `[R, ...]`."""
        return Sums(*(take(prefix, last) - take(prefix, first) for prefix in self))


def prefix_sums(x: jax.Array, w: jax.Array) -> Sums:
    """Of float32 `[R, M]` rows."""
    x, w = x.astype(jnp.float64), w.astype(jnp.float64)
    return Sums(*(jnp.pad(jnp.cumsum(values, axis=1), ((0, 0), (1, 0))) for values in (w, w * x, w * x * x)))


def take(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[r, index[r, ...]]` for `[R, T]` and int32 `[R, ...]`, without a bounds check."""
    flat = index.reshape(index.shape[0], -1)
    return jnp.take_along_axis(table, flat, axis=1, mode="promise_in_bounds").reshape(index.shape)


def search(sorted_rows: jax.Array, queries: jax.Array, side: str) -> jax.Array:
    """`searchsorted` row by row: `[R, M]` and `[R, ...]` to int32 of the queries' shape."""
    flat = queries.reshape(queries.shape[0], -1)
    found = jax.vmap(lambda row, query: jnp.searchsorted(row, query, side=side))(sorted_rows, flat)
    return found.astype(jnp.int32).reshape(queries.shape)


def _cluster_means(x: jax.Array, sums: Sums, edges: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means and squared errors of the ranges between `edges` `[R, S, 9]`; both `[R, S, 8]`.

    An empty range has the value at its place in the sorted row, so that means never decrease.
    """
    first, last = edges[..., :-1], edges[..., 1:]
    weight, moment, square = sums.between(first, last)
    first_value = take(x, jnp.minimum(first, x.shape[1] - 1))
    last_value = jnp.maximum(first_value, take(x, jnp.maximum(last - 1, 0)))
    mean = jnp.where(weight > 0, moment / jnp.where(weight > 0, weight, 1.0), first_value)
    return jnp.clip(mean, first_value, last_value), jnp.maximum(square - moment * mean, 0.0)


def _binned_optimum(sums: Sums, bins: jax.Array) -> jax.Array:
    """Interior borders `[R, 7]` of the least-error partition whose borders are among `bins` `[R, NUM_BINS + 1]`."""
    # cost[r, i, j]: squared error of bins i .. j - 1 as one cluster.
    weight, moment, square = ((at[:, None, :] - at[:, :, None]) for at in (take(prefix, bins) for prefix in sums))
    forward = jnp.triu(jnp.ones((NUM_BINS + 1, NUM_BINS + 1), bool))
    cost = jnp.maximum(square - moment * (moment / jnp.where(weight > 0, weight, 1.0)), 0.0)
    cost = jnp.where(forward, cost, jnp.inf).astype(jnp.float32)

    def extend(best: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        total = best[:, :, None] + cost
        return jnp.min(total, axis=1), jnp.argmin(total, axis=1).astype(jnp.int32)

    _, choices = lax.scan(extend, cost[:, 0], length=SEED_CLUSTERS - 1)

    def follow(end: jax.Array, choice: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = take(choice, end)
        return start, start

    end = jnp.full((len(bins), 1), NUM_BINS, jnp.int32)
    starts = lax.scan(follow, end, choices, reverse=True)[1]
    return take(bins, jnp.moveaxis(starts[..., 0], 0, 1))


def _starts(x: jax.Array, w: jax.Array, sums: Sums) -> jax.Array:
    """Interior borders of the two starts, int32 `[R, 2, 7]` (element counts to the left of the border)."""
    size = x.shape[1]
    gaps = jnp.cbrt(0.5 * (w[:, 1:] + w[:, :-1])) * jnp.square(jnp.cbrt(x[:, 1:] - x[:, :-1]))
    running = jnp.cumsum(gaps, axis=1)
    shares = jnp.arange(1, NUM_BINS, dtype=jnp.float32) / NUM_BINS
    inner = jnp.minimum(search(running, running[:, -1:] * shares, "left") + 1, size)
    bins = jnp.pad(jnp.pad(inner, ((0, 0), (1, 0))), ((0, 0), (0, 1)), constant_values=size)

    count = min(SEED_CLUSTERS - 1, size - 1)
    largest = jnp.sort(lax.top_k(gaps, count)[1].astype(jnp.int32) + 1, axis=1)
    largest = jnp.pad(largest, ((0, 0), (0, SEED_CLUSTERS - 1 - count)), constant_values=size)
    return jnp.stack([_binned_optimum(sums, bins), largest], axis=1)


def seed_clusters(x: jax.Array, w: jax.Array, sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Weighted k-means with 8 clusters.

    Args:
        x: float32 `[R, M]`, every row sorted ascending; M at least 2.
        w: float32 `[R, M]`, weights at least 0 with a positive sum.
        sums: their prefix sums.

    Returns:
        edges int32 `[R, 9]`: cluster `j` is the elements `edges[j] .. edges[j + 1] - 1`;
        means float64 `[R, 8]`, ascending.
    """
    size = x.shape[1]

    def with_ends(borders: jax.Array) -> jax.Array:
        return jnp.pad(jnp.pad(borders, ((0, 0), (0, 0), (1, 0))), ((0, 0), (0, 0), (0, 1)), constant_values=size)

    def unfinished(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return (state[0] < MAX_ITERATIONS) & state[2]

    def iterate(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        count, borders, _ = state
        means, _ = _cluster_means(x, sums, with_ends(borders))
        moved = search(x, (0.5 * (means[..., 1:] + means[..., :-1])).astype(jnp.float32), "right")
        return count + 1, moved, jnp.any(moved != borders)

    borders = lax.while_loop(unfinished, iterate, (jnp.int32(0), _starts(x, w, sums), jnp.bool_(True)))[1]
    edges = with_ends(borders)
    error = jnp.sum(_cluster_means(x, sums, edges)[1], axis=-1)
    edges = jnp.take_along_axis(edges, jnp.argmin(error, axis=1)[:, None, None], axis=1)[:, 0]
    edges = jnp.where(_few_values_mask(x), _few_values_edges(x), edges)
    return edges, _cluster_means(x, sums, edges[:, None])[0][:, 0]


def _ranks(x: jax.Array) -> jax.Array:
    """How many distinct values precede each element, int32 `[R, M]`."""
    changes = (x[:, 1:] != x[:, :-1]).astype(jnp.int32)
    return jnp.pad(jnp.cumsum(changes, axis=1), ((0, 0), (1, 0)))


def _few_values_mask(x: jax.Array) -> jax.Array:
    return (_ranks(x)[:, -1] < SEED_CLUSTERS)[:, None]


def _few_values_edges(x: jax.Array) -> jax.Array:
    """One cluster a distinct value, `[R, 9]`."""
    ranks = _ranks(x)
    wanted = jnp.broadcast_to(jnp.arange(SEED_CLUSTERS + 1, dtype=jnp.int32), (x.shape[0], SEED_CLUSTERS + 1))
    return search(ranks, wanted, "left")
