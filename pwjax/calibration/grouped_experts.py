"""Routed experts over many tokens with dense weights: tokens grouped by expert, one tile of one expert at a time.

Work is that of the chosen experts plus half a tile an expert, against E / k times as much for the plain loop of
`models.forward.expert_loop`. The weights of one expert are read where they lie, in their own dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pwjax.models.forward import ExpertWeights
from pwjax.models.layers import linear

TILE_TOKENS = 128


class RoutedSums(NamedTuple):
    """Sums over routed tokens, by expert; r is the routing weight.

    Attributes:
        gate_up: float32 `[E, H]`, `sum r^2 x_j^2` of the experts' input x.
        down: float32 `[E, I]`, `sum r^2 a_j^2` of `a = silu(gate) * up`.
        tokens: int32 `[E]`, how many tokens.
    """

    gate_up: jax.Array
    down: jax.Array
    tokens: jax.Array


def grouped_experts(
    h: jax.Array, ids: jax.Array, weights: jax.Array, experts: ExpertWeights
) -> tuple[jax.Array, RoutedSums]:
    """Weighted sum of each token's experts, and the sums that importance is made of.

    Args:
        h: `[..., H]`.
        ids: int32 `[..., k]`, each below E.
        weights: float32 `[..., k]`.
        experts: gate_up `[E, 2I, H]` (gate rows first) and down `[E, H, I]`.

    Returns:
        routed output `[..., H]` in the dtype of `h`; the sums.
    """
    gate_up, down = experts
    num_experts, hidden, width = down.shape
    top_k = ids.shape[-1]
    x, flat_weights = h.reshape(-1, hidden), weights.reshape(-1)
    place = _places(ids.reshape(-1), num_experts)
    # A padding row of a tile reads token `len(x)` and choice `len(flat_weights)`, both filled with zeros.
    choice_at = jnp.full(place.num_places, ids.size, jnp.int32).at[place.of_choice].set(jnp.arange(ids.size))

    def tile_step(tile: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        out, sum_gate_up, sum_down = carry
        start, expert = tile * TILE_TOKENS, place.expert_of_tile[tile]
        choices = jax.lax.dynamic_slice_in_dim(choice_at, start, TILE_TOKENS)
        rows = jnp.take(x, choices // top_k, axis=0, mode="fill", fill_value=0)
        r = jnp.take(flat_weights, choices, mode="fill", fill_value=0)[:, None]
        gate, up = jnp.split(linear(rows, gate_up[expert]), 2, axis=-1)
        a = jax.nn.silu(gate) * up
        y = linear(a, down[expert]) * r
        out = jax.lax.dynamic_update_slice_in_dim(out, y.astype(out.dtype), start, axis=0)
        sum_gate_up = sum_gate_up.at[expert].add(jnp.sum((r * rows) ** 2, axis=0, dtype=jnp.float32))
        sum_down = sum_down.at[expert].add(jnp.sum((r * a) ** 2, axis=0, dtype=jnp.float32))
        return out, sum_gate_up, sum_down

    start = (
        jnp.zeros((place.num_places, hidden), h.dtype),
        jnp.zeros((num_experts, hidden), jnp.float32),
        jnp.zeros((num_experts, width), jnp.float32),
    )
    out, sum_gate_up, sum_down = jax.lax.fori_loop(0, place.num_tiles, tile_step, start)
    routed = out[place.of_choice].reshape(-1, top_k, hidden).sum(1)
    return routed.reshape(h.shape), RoutedSums(sum_gate_up, sum_down, place.counts)


class _Places(NamedTuple):
    """Where each choice goes when every expert's choices start on a tile boundary."""

    of_choice: jax.Array  # int32 [A], distinct places
    counts: jax.Array  # int32 [E]
    expert_of_tile: jax.Array  # int32 [num_places / TILE_TOKENS]
    num_tiles: jax.Array  # int32, tiles in use
    num_places: int


def _places(ids: jax.Array, num_experts: int) -> _Places:
    """ids: int32 `[A]`, the expert of every (token, choice)."""
    order = jnp.argsort(ids, stable=True)
    counts = jnp.bincount(ids, length=num_experts)
    tiles = -(-counts // TILE_TOKENS)
    last_tile = jnp.cumsum(tiles)
    rank = jnp.arange(ids.size) - (jnp.cumsum(counts) - counts)[ids[order]]  # within the expert
    place = (last_tile - tiles)[ids[order]] * TILE_TOKENS + rank
    max_tiles = ids.size // TILE_TOKENS + num_experts  # each expert wastes less than a tile
    expert_of_tile = jnp.searchsorted(last_tile, jnp.arange(max_tiles), side="right")
    return _Places(
        of_choice=jnp.zeros(ids.size, jnp.int32).at[order].set(place.astype(jnp.int32)),
        counts=counts.astype(jnp.int32),
        expert_of_tile=expert_of_tile.astype(jnp.int32),
        num_tiles=last_tile[-1],
        num_places=max_tiles * TILE_TOKENS,
    )
