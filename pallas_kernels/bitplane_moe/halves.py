"""Activations as float16 operands of the tensor cores, laid out as the words of a plane are.

A row is scaled by a power of two so that its largest element fits float16, which then holds bfloat16 elements exactly
unless they are 2**27 times smaller than the largest. float32 rows become three float16 parts whose sum they are, up to
that same limit: products with float16 LUT entries are exact, so sums are as good as float32 ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitplane_moe.layout import BlockLayout

TILES = 16
"""Tiles that a block of words makes: pairs of columns, one pair a word."""
_TARGET_EXPONENT = 13  # rows are scaled to below 2**14, far from float16's largest


class HalfRows(NamedTuple):
    """`tiles[t, part, d, 2 * w + j]` is column `32 * w + 2 * d + j` of row t times a power of two, `factors[t]` its
    inverse: float16 `[T, parts, 16, 2 * W]` (W padded) and float32 `[T]`."""

    tiles: jax.Array
    factors: jax.Array


def split_rows(x: jax.Array, bounds: jax.Array, layout: BlockLayout, block_words: int, *, exact: bool) -> HalfRows:
    """Rows as operands of the kernel.

    Args:
        x: `[T, K]`, bfloat16 or float32.
        bounds: float32 `[T]`, at least the largest magnitude of each row and not much more.
        block_words: W is padded with zeros to a multiple of it.
        exact: three parts, for float32 rows; otherwise one.
    """
    tokens = x.shape[0]
    exponent = (lax.bitcast_convert_type(bounds.astype(jnp.float32), jnp.int32) >> 23) & 255
    scale = jnp.clip(254 + _TARGET_EXPONENT - exponent, 1, 253)
    scaled = x.astype(jnp.float32) * _power_of_two(scale)[:, None]
    words = -(-layout.words_per_row // block_words) * block_words
    scaled = jnp.pad(scaled, ((0, 0), (0, 32 * words - layout.cols)))
    parts = []
    for _ in range(3 if exact else 1):
        # Not a cast there and back, which XLA would drop.
        half = lax.reduce_precision(scaled, exponent_bits=5, mantissa_bits=10)
        parts.append(half.astype(jnp.float16).reshape(tokens, words, TILES, 2))
        scaled = scaled - half
    tiles = jnp.stack(parts, axis=1).swapaxes(2, 3).reshape(tokens, len(parts), TILES, 2 * words)
    return HalfRows(tiles, _power_of_two(254 - scale))


def _power_of_two(biased_exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(biased_exponent << 23, jnp.float32)
