"""Attention projections, and blockwise causal attention over whole sequences.

Serving attends over paged KV (`pallas_kernels.paged_attention`); `causal_attention` is for whole sequences without a
cache: calibration, and the parity tests of the model.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from pwjax.config import ModelConfig
from pwjax.models.layers import Linear, rotary_tables, rotate


class Attention(nnx.Module):
    """The projections around attention: q, k, v (rotated) and o.

    The first three are one product, `qkv_proj`: the rows of q, then of k and of v. A checkpoint has `q_proj`, `k_proj`
    and `v_proj`; `loading.py` joins them.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike):
        hidden, head_dim = config.hidden_size, config.head_dim
        self.qkv_proj = Linear(
            hidden, (config.num_heads + 2 * config.num_kv_heads) * head_dim, dtype, bias=config.qkv_bias
        )
        self.o_proj = Linear(config.num_heads * head_dim, hidden, dtype)
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head_dim
        self.rope_theta = config.rope_theta

    def qkv(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`x [..., H]` at `positions [...]` to q `[..., heads, D]` and k, v `[..., kv_heads, D]`; q, k are rotated."""
        heads = self.qkv_proj(x).reshape(*x.shape[:-1], -1, self.head_dim)
        q, k, v = jnp.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=-2)
        # Every layer asks for the same tables; XLA computes them once a step.
        cos, sin = rotary_tables(positions, self.head_dim, self.rope_theta, x.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, heads: jax.Array) -> jax.Array:
        """`[..., heads, D]` to `[..., H]`."""
        return self.o_proj(heads.reshape(*heads.shape[:-2], -1))


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int, block_size: int = 128) -> jax.Array:
    """Causal grouped-query attention of whole sequences that start at position 0, scale `1 / sqrt(D)`.

    One sequence and one block of queries at a time, online softmax over blocks of keys: the largest intermediate is
    `[heads, block_size, block_size]` float32.

    Args:
        q: `[B, T, heads, D]`.
        k, v: `[B, T, kv_heads, D]`.
        window: a query sees this many keys, itself included; 0 means all.

    Returns:
        `[B, T, heads, D]` in the dtype of `q`.
    """
    length, kv_heads = q.shape[1], k.shape[2]
    block = min(block_size, length)
    padded = -(-length // block) * block
    q, k, v = (jnp.pad(a, [(0, 0), (0, padded - length), (0, 0), (0, 0)]) for a in (q, k, v))
    attend = functools.partial(_attend_sequence, window=window, block=block, group=q.shape[2] // kv_heads)
    return jax.lax.map(lambda args: attend(*args), (q, k, v))[:, :length]


def _attend_sequence(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int, block: int, group: int) -> jax.Array:
    """One sequence: q `[T, heads, D]`, k and v `[T, kv_heads, D]`, T a multiple of `block`."""
    length, heads, head_dim = q.shape
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    q = q.reshape(length // block, block, heads // group, group, head_dim)
    offsets = jnp.arange(block)

    def attend_block(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        index, queries = args  # queries [block, kv_heads, group, D]
        own = index * block + offsets

        def step(j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
            top, total, out = carry
            keys = jax.lax.dynamic_slice_in_dim(k, j * block, block)
            values = jax.lax.dynamic_slice_in_dim(v, j * block, block)
            scores = dot("qhgd,khd->hgqk", queries, keys) * head_dim**-0.5
            other = j * block + offsets
            seen = other[None, :] <= own[:, None]
            if window:
                seen &= other[None, :] > own[:, None] - window
            scores = jnp.where(seen, scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(-1))
            # A block of which a query sees nothing leaves its maximum at -inf; subtract 0 there instead.
            shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
            weights = jnp.exp(scores - shift[..., None])
            decay = jnp.exp(top - shift)
            out = out * decay[..., None] + dot("hgqk,khd->hgqd", weights.astype(v.dtype), values)
            return new_top, total * decay + weights.sum(-1), out

        shape = (heads // group, group, block)
        start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        first = jnp.maximum(0, (index * block - window + 1) // block) if window else 0
        _, total, out = jax.lax.fori_loop(first, index + 1, step, start)
        return (out / total[..., None]).transpose(2, 0, 1, 3).astype(v.dtype)

    out = jax.lax.map(attend_block, (jnp.arange(length // block), q))
    return out.reshape(length, heads, head_dim)
