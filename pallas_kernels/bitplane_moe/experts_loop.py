"""One expert after another, each weight built once: the loop under the XLA forms of both MoE ops.

The number of trips is the number of distinct experts that the batch chose, so a small batch pays for few of them, and
no more than one expert's weights exist at a time. A row's result depends on its own values, its own experts and the
number of rows only, never on what the other rows hold.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitplane_moe.activation import gated, row_norms
from pallas_kernels.bitplane_moe.routing import sort_pairs

TILE_TOKENS = 64

ExpertWeights = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""Expert index to its gate_up `[2I, H]` and down `[H, I]`, in one floating dtype."""


def loop_over_experts(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    weights_of: ExpertWeights,
    *,
    num_experts: int,
    activation: str,
) -> tuple[jax.Array, jax.Array]:
    """Weighted sum of the chosen experts' outputs.

    Args:
        x: `[T, H]`.
        expert_ids: int32 `[T, k]`; ids outside `0..num_experts-1` are padding.
        expert_weights: float32 `[T, k]`.

    Returns:
        `y` `[T, H]` in `x.dtype` and the norms of the down inputs, float32 `[T, k]`.
    """
    loop = _masked_loop if x.shape[0] <= TILE_TOKENS else _tiled_loop
    y, norms = loop(x, expert_ids, expert_weights, weights_of, num_experts, activation)
    return y.astype(x.dtype), norms


def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float32 `x @ weight.T`; float32 products are exact, never TF32."""
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _mlp(rows: jax.Array, weights: tuple[jax.Array, jax.Array], activation: str) -> tuple[jax.Array, jax.Array]:
    """One expert on `[M, H]`: float32 output `[M, H]` and norms `[M]`."""
    gate_up, down = weights
    hidden = gated(matmul(rows.astype(gate_up.dtype), gate_up), activation)
    return matmul(hidden.astype(down.dtype), down), row_norms(hidden)


def _masked_loop(x, expert_ids, expert_weights, weights_of, num_experts, activation):
    """Few tokens: every expert sees all of them, and those that did not choose it are masked."""
    valid = (expert_ids >= 0) & (expert_ids < num_experts)
    ids = jnp.where(valid, expert_ids, num_experts)

    def body(carry):
        expert, y, norms = carry
        mine = ids == expert
        out, norm = _mlp(x, weights_of(expert), activation)
        weight = jnp.sum(jnp.where(mine, expert_weights, 0.0), axis=1, keepdims=True)
        # `where`, not a product with zero: other rows may hold anything.
        y = y + jnp.where(jnp.any(mine, axis=1, keepdims=True), weight * out, 0.0)
        norms = jnp.where(mine, norm[:, None], norms)
        return jnp.min(jnp.where(ids > expert, ids, num_experts)), y, norms

    init = (jnp.min(ids), jnp.zeros(x.shape, jnp.float32), jnp.zeros(ids.shape, jnp.float32))
    _, y, norms = lax.while_loop(lambda carry: carry[0] < num_experts, body, init)
    return y, norms


def _tiled_loop(x, expert_ids, expert_weights, weights_of, num_experts, activation):
    """Many tokens: each expert sees its own, in tiles of `TILE_TOKENS`, and adds to their sums at once.

    A token's sum is taken in order of expert, whatever its batch mates chose.
    """
    pairs = sort_pairs(expert_ids, num_experts)
    num_tokens, top_k = expert_ids.shape
    total = num_tokens * top_k
    # A tile reads past its expert's rows; those count as token `num_tokens`, which the scatter drops.
    tokens = jnp.pad(pairs.order // top_k, (0, TILE_TOKENS))
    factors = jnp.pad(expert_weights.reshape(total)[pairs.order], (0, TILE_TOKENS))
    experts = jnp.pad(pairs.experts, (0, 1), constant_values=num_experts)

    def expert_body(carry):
        start, y, norms = carry
        expert = experts[start]
        end = start + jnp.sum(pairs.experts == expert, dtype=jnp.int32)
        weights = weights_of(expert)

        def tile_body(carry):
            start, y, norms = carry
            mine = start + jnp.arange(TILE_TOKENS, dtype=jnp.int32) < end
            rows = lax.dynamic_slice(tokens, (start,), (TILE_TOKENS,))
            tile, norm = _mlp(x[rows], weights, activation)
            factor = lax.dynamic_slice(factors, (start,), (TILE_TOKENS,))[:, None]
            y = y.at[jnp.where(mine, rows, num_tokens)].add(factor * tile, mode="drop")
            # Tiles are in order: what this one writes past its rows, the next one overwrites.
            return start + TILE_TOKENS, y, lax.dynamic_update_slice(norms, norm, (start,))

        _, y, norms = lax.while_loop(lambda carry: carry[0] < end, tile_body, (start, y, norms))
        return end, y, norms

    init = (jnp.int32(0), jnp.zeros(x.shape, jnp.float32), jnp.zeros(total + TILE_TOKENS, jnp.float32))
    _, y, norms = lax.while_loop(lambda carry: experts[carry[0]] < num_experts, expert_body, init)
    real = (expert_ids >= 0) & (expert_ids < num_experts)
    return y, jnp.where(real, norms[pairs.position], 0.0)
