"""Routed experts kept as dense arrays (`--method bf16`): the same outputs as `bitplane_moe`, nothing quantized."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitplane_moe.activation import gated, row_norms
from pallas_kernels.bitplane_moe.experts_loop import loop_over_experts
from pallas_kernels.bitplane_moe.routing import sort_pairs

# Up to this many pairs a GPU multiplies gathered weights row by row; above it, groups of rows by `ragged_dot`.
_GATHER_PAIRS = 64


def dense_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: str = "silu",
    implementation: Literal["auto", "triton", "xla"] = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`y[t] = sum over c of w[t, c] * down_e (act(gate_e x[t]) * up_e x[t])` with `e = expert_ids[t, c]`.

    Args:
        x: `[T, H]`, bfloat16 or float32.
        expert_ids: int32 `[T, k]`; `num_experts` means no expert.
        expert_weights: float32 `[T, k]`.
        gate_up: `[E, 2I, H]`, gate rows first.
        down: `[E, H, I]`.

    Returns:
        `y` `[T, H]` in `x.dtype`, and float32 `[T, k]`: the norm of each choice's down input, 0 for padding.

    Raises:
        NotImplementedError: `implementation="triton"`: dense experts have no kernel of their own.
    """
    if implementation == "triton":
        raise NotImplementedError("dense_moe has no Triton kernel; use implementation 'auto' or 'xla'")
    if implementation not in ("auto", "xla"):
        raise ValueError(f"implementation is {implementation!r}; it must be 'auto', 'triton' or 'xla'")
    # float32 activations ask for float32 arithmetic throughout (parity); otherwise products are in the stored dtype.
    dtype = jnp.float32 if x.dtype == jnp.float32 else gate_up.dtype
    if jax.default_backend() == "gpu":
        return _grouped(x, expert_ids, expert_weights, gate_up.astype(dtype), down.astype(dtype), activation)

    def weights_of(expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gate_up[expert].astype(dtype), down[expert].astype(dtype)

    return loop_over_experts(
        x, expert_ids, expert_weights, weights_of, num_experts=gate_up.shape[0], activation=activation
    )


def _grouped(x, expert_ids, expert_weights, gate_up, down, activation):
    """All pairs at once: a loop over experts would wait for the host between its trips."""
    num_experts = gate_up.shape[0]
    real = (expert_ids >= 0) & (expert_ids < num_experts)
    pairs = sort_pairs(expert_ids, num_experts)
    rows = x[pairs.order // expert_ids.shape[1]].astype(gate_up.dtype)
    if expert_ids.size <= _GATHER_PAIRS:
        chosen = jnp.minimum(pairs.experts, num_experts - 1)
        product = lambda rows, weights: _gathered_matmul(rows, weights, chosen)  # noqa: E731
    else:
        sizes = jnp.sum(pairs.experts[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
        product = lambda rows, weights: _ragged_matmul(rows, weights, sizes)  # noqa: E731
    hidden = gated(product(rows, gate_up), activation)
    out = product(hidden.astype(down.dtype), down)
    # `where`, not a product with zero: rows of no expert may hold anything.
    picked = jnp.where(real[..., None], out[pairs.position], 0.0)
    y = jnp.sum(picked * jnp.where(real, expert_weights, 0.0)[..., None], axis=1)
    return y.astype(x.dtype), jnp.where(real, row_norms(hidden)[pairs.position], 0.0)


def _gathered_matmul(rows: jax.Array, weights: jax.Array, experts: jax.Array) -> jax.Array:
    """float32 `[P, N]`; written as product and sum so that the gather of weights fuses and is never stored."""
    products = weights[experts].astype(jnp.float32) * rows[:, None, :].astype(jnp.float32)
    return jnp.sum(products, axis=-1)


def _ragged_matmul(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """float32 `[P, N]` of sorted rows, `sizes[e]` of them for expert `e`."""
    return lax.ragged_dot_general(
        rows,
        weights,
        sizes,
        lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
        ),
        precision=lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
