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


def join_bytes(low: jax.Array, high: jax.Array, second: bool, *, interpret: bool) -> jax.Array:
    """float16 `[N, 2 * W]` from int32 `[N, W]`: elements 2w and 2w + 1 have bytes 0 and 1 of `low[:, w]` as their low
    bytes, of `high[:, w]` as their high ones; bytes 2 and 3 where `second`."""
    low, high = (_twice(words) for words in (low, high))
    if not interpret:
        selector = "0x7362" if second else "0x5140"
        # Two neighbours make one register, and both come from the same words: operands 2 and 4 repeat 1 and 3.
        return _instruction(f"prmt.b32 $0, $1, $3, {selector};", low, high, dtype=jnp.float16, pack=2)
    shift = 8 * (2 * int(second) + (lax.broadcasted_iota(jnp.int32, low.shape, 1) & 1))
    halves = (low >> shift & 255) | (high >> shift & 255) << 8
    return lax.bitcast_convert_type(halves.astype(jnp.uint16), jnp.float16)


def _twice(words: jax.Array) -> jax.Array:
    """`[N, W]` to `[N, 2 * W]`, every element twice in a row."""
    return jnp.broadcast_to(words[:, :, None], (*words.shape, 2)).reshape(words.shape[0], -1)


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
