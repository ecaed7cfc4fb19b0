"""`top_experts` for NVIDIA GPUs: Pallas, Triton backend.

A program is one token in one warp: its experts lie in registers, and maxima and sums are shuffles without a barrier.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike

from pallas_kernels.rounding import rounded_in_kernel

_TAKEN = np.iinfo(np.int32).min  # below the bits of any weight, NaN too


def top_experts(
    logits: jax.Array,
    valid: jax.Array,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: DTypeLike,
    weights_dtype: DTypeLike,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.top_experts`."""
    static = _Static(
        experts=logits.shape[1],
        top_k=top_k,
        normalise=normalise,
        logits_dtype=jnp.dtype(logits_dtype),
        weights_dtype=jnp.dtype(weights_dtype),
        interpret=interpret,
    )
    return _choose(logits, valid.astype(jnp.int32), static=static)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    experts: int
    top_k: int
    normalise: bool
    logits_dtype: np.dtype
    weights_dtype: np.dtype
    interpret: bool

    def rounded(self, x: jax.Array, dtype: np.dtype) -> jax.Array:
        return rounded_in_kernel(x, dtype, interpret=self.interpret)


@functools.partial(jax.jit, static_argnames="static")  # traced and lowered once for all layers
def _choose(logits: jax.Array, valid: jax.Array, *, static: _Static) -> tuple[jax.Array, jax.Array]:
    shape = (logits.shape[0], static.top_k)
    return pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(logits.shape[0],),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=static.interpret,
        name="top_experts",
    )(logits, valid)


def _kernel(logits_ref, valid_ref, ids_ref, weights_ref, *, static: _Static):
    token = pl.program_id(0)
    expert = jnp.arange(pl.next_power_of_2(static.experts), dtype=jnp.int32)
    exists = expert < static.experts
    logits = plt.load(logits_ref.at[token, expert], mask=exists, other=-jnp.inf)
    logits = static.rounded(logits, static.logits_dtype)
    powers = jnp.exp(logits - jnp.max(logits))
    # Bits of floats that are not negative are in the order of the floats; unlike floats, NaNs have a place in it.
    bits = lax.bitcast_convert_type(powers / jnp.sum(powers), jnp.int32)
    bits = jnp.where(exists, bits, jnp.int32(_TAKEN))

    choice = jnp.arange(pl.next_power_of_2(static.top_k), dtype=jnp.int32)
    ids, chosen = jnp.zeros_like(choice), jnp.zeros_like(choice)
    for rank in range(static.top_k):
        largest = jnp.max(bits)
        first = jnp.min(jnp.where(bits == largest, expert, jnp.int32(static.experts)))
        bits = jnp.where(expert == first, jnp.int32(_TAKEN), bits)
        ids, chosen = (jnp.where(choice == rank, new, old) for new, old in ((first, ids), (largest, chosen)))

    weights = lax.bitcast_convert_type(chosen, jnp.float32)  # 0 past top_k
    if static.normalise:
        weights = weights / jnp.sum(weights)
    place, exists = (token, choice), choice < static.top_k
    ids = jnp.where(valid_ref[token] != 0, ids, jnp.int32(static.experts))
    plt.store(ids_ref.at[place], ids, mask=exists)
    plt.store(weights_ref.at[place], static.rounded(weights, static.weights_dtype), mask=exists)
