"""Four weights at a time: the byte instructions of NVIDIA GPUs, and the same in plain jnp for interpreted kernels.

All operands are int32 of one shape after broadcasting.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt


def permute_bytes(low: jax.Array, high: jax.Array, selector: jax.Array, *, interpret: bool) -> jax.Array:
    """Byte i of the result is byte `selector >> 4 * i & 7` of the eight in `high:low`, for i in 0..3 (PTX `prmt`).

    Bits 3, 7, 11 and 15 of the selector must be zero; those above 15 are ignored.
    """
    if not interpret:
        return _instruction("prmt.b32 $0, $1, $2, $3;", low, high, selector)
    result = jnp.int32(0)
    for i in range(4):
        choice = lax.shift_right_logical(selector, jnp.int32(4 * i)) & 7
        source = jnp.where(choice < 4, low, high)
        result = result | (lax.shift_right_logical(source, 8 * (choice & 3)) & 255) << (8 * i)
    return result


def spread_signs(words: jax.Array, *, interpret: bool) -> jax.Array:
    """0xFF in place of every byte whose top bit is set, 0 in place of the others."""
    if not interpret:
        return _instruction("prmt.b32 $0, $1, $1, 0xBA98;", words)
    return (lax.shift_right_logical(words, jnp.int32(7)) & 0x01010101) * 255


def as_halves(words: jax.Array) -> jax.Array:
    """Both float16 numbers of each int32, `[..]` to `[.., 2]`, the low one first.

    The compiler sees through it: where both end in one register, as operands of tensor cores do, nothing is moved.
    """
    low, high = words.astype(jnp.uint16), lax.shift_right_logical(words, jnp.int32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(jnp.stack([low, high], axis=-1), jnp.float16)


def _instruction(text: str, *operands: jax.Array) -> jax.Array:
    """One element at a time (`pack=1`): which elements would share a call with more is the layout's affair."""
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    (result,) = plt.elementwise_inline_asm(
        text,
        args=[jnp.broadcast_to(operand, shape) for operand in operands],
        constraints=",".join(["=r"] + ["r"] * len(operands)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )
    return result
