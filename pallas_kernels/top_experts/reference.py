"""`top_experts` in plain jnp: what runs where there is no NVIDIA GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.rounding import rounded_to


def top_experts(
    logits: jax.Array,
    valid: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: DTypeLike,
    weights_dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """See `api.top_experts`."""
    weights, ids = jax.lax.top_k(jax.nn.softmax(rounded_to(logits, logits_dtype), axis=-1), top_k)
    if normalise:
        weights = weights / weights.sum(-1, keepdims=True)
    ids = jnp.where(valid[:, None], ids.astype(jnp.int32), jnp.int32(logits.shape[1]))
    return ids, rounded_to(weights, weights_dtype)
