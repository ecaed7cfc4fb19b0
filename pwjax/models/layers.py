"""Layers that every family shares: linear, RMSNorm, rotary embedding, gated MLP.

Weights keep the orientation of Hugging Face checkpoints, `[out, in]`; a product contracts the last axes, so nothing is
transposed or copied when a checkpoint is loaded. Attribute names are the hub's, so that the path of a parameter in the
module tree *is* its name in the checkpoint (see `loading.py`).

Sources: transformers `models/qwen2_moe/modeling_qwen2_moe.py`, `models/mixtral/modeling_mixtral.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias`.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`.
        bias: `[N]` or None.

    Returns:
        `[..., N]` in the dtype of `x`. Sums are float32; float32 operands are multiplied in full float32.
    """
    y = matmul_f32(x, weight)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def matmul_f32(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` as float32 `[..., N]`; without HIGHEST a GPU would multiply float32 as TF32, good to 3 digits."""
    weight = weight.astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...k,nk->...n", x, weight, precision=precision, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Llama's order: normalise `x [..., H]` in float32, cast to the dtype of `x`, then multiply by `weight [H]`."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight.astype(x.dtype) * wide.astype(x.dtype)


def rotary_tables(positions: jax.Array, head_dim: int, theta: float, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[..., head_dim / 2]` of `positions [...]`: angles in float32, then cast to `dtype` as HF does."""
    inverse = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate-half ("neox") embedding of `x [..., heads, D]`: pairs are `(d, d + D/2)`; cos and sin `[..., D/2]`."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Linear(nnx.Module):
    """`linear` with its own parameters `weight [out, in]` and, if asked for, `bias [out]`."""

    def __init__(self, size_in: int, size_out: int, dtype: DTypeLike, *, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((size_out, size_in), dtype))
        self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class Embedding(nnx.Module):
    """Rows of `weight [vocab, H]`."""

    def __init__(self, vocab_size: int, size: int, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((vocab_size, size), dtype))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # Token ids are validated on the host; "clip" avoids the NaN rows of the default mode in padding.
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """`rms_norm` with its own `weight [H]`."""

    def __init__(self, size: int, eps: float, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class GatedMlp(nnx.Module):
    """`down(silu(gate(x)) * up(x))`: the MLP of layers without experts, and the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: DTypeLike):
        self.gate_proj = Linear(hidden_size, intermediate_size, dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
