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


def join_bytes(low: jax.Array, high: jax.Array, second: jax.Array, *, interpret: bool) -> jax.Array:
    """float16 from four low and four high bytes; the last axis, of two, holds the same words twice.

    Element j of that axis is made of bytes `2 * second + j` of both; `second` is 0 or 1, the same for a pair.
    """
    if not interpret:
        selector = jnp.where(second == 0, jnp.int32(0x5140), jnp.int32(0x7362))
        # Two neighbours make one register, and both come from the same words: every second operand repeats the first.
        return _instruction("prmt.b32 $0, $1, $3, $5;", low, high, selector, dtype=jnp.float16, pack=2)
    shift = 8 * (2 * second + lax.broadcasted_iota(jnp.int32, low.shape, low.ndim - 1))
    halves = (lax.shift_right_logical(low, shift) & 255) | (lax.shift_right_logical(high, shift) & 255) << 8
    return lax.bitcast_convert_type(halves.astype(jnp.uint16), jnp.float16)


def _instruction(text: str, *operands: jax.Array, dtype=jnp.int32, pack: int = 1) -> jax.Array:
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    (result,) = plt.elementwise_inline_asm(
        text,
        args=[jnp.broadcast_to(operand, shape) for operand in operands],
        constraints=",".join(["=r"] + ["r"] * (len(operands) * pack)),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, dtype)],
    )
    return result
