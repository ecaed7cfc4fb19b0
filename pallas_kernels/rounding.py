"""float32 values rounded to a narrower type, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def rounded_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What `dtype` can hold of float32 values.

    XLA may drop a cast there and back, and does so or not by what it fuses; results must not depend on that.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def rounded_in_kernel(x: jax.Array, dtype: DTypeLike, *, interpret: bool) -> jax.Array:
    """As `rounded_to`: Triton has no `reduce_precision`, but keeps the pair of casts."""
    return rounded_to(x, dtype) if interpret else x.astype(dtype).astype(jnp.float32)
