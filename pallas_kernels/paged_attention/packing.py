"""Rows of keys or values as 32-bit words, and back, by integer operations only (exact for every bit pattern)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.layout import KVGeometry


def pack_rows(values: jax.Array, geometry: KVGeometry) -> jax.Array:
    """`[.., kv_heads, head_dim]` in any float dtype to uint32 `[.., row_words]`."""
    lead = values.shape[:-2]
    if geometry.dtype == "float32":
        return lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32).reshape(*lead, -1)
    halves = lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(halves, 2, axis=-1)
    return (low | (high << 16)).reshape(*lead, -1)


def unpack_rows(words: jax.Array, geometry: KVGeometry) -> jax.Array:
    """uint32 `[.., row_words]` to float32 `[.., kv_heads, head_dim]`."""
    words = words.reshape(*words.shape[:-1], geometry.num_kv_heads, geometry.head_words)
    if geometry.dtype == "float32":
        return lax.bitcast_convert_type(words, jnp.float32)
    halves = jnp.concatenate([words << 16, words & jnp.uint32(0xFFFF0000)], axis=-1)
    return lax.bitcast_convert_type(halves, jnp.float32)
