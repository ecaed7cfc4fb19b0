"""Activations as float16 operands of the tensor cores, their columns in the order of the decoded tiles.

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
from pallas_kernels.rounding import rounded_to

_TARGET_EXPONENT = 13  # rows are scaled to below 2**14, far from float16's largest


class HalfRows(NamedTuple):
    """Rows times a power of two, `row_scale(bounds)`.

    Column `32 * w + 4 * g + 2 * s + j` is element `128 * (w // 4) + 16 * g + 8 * s + 2 * (w % 4) + j` of `columns`.
    """

    columns: jax.Array  # float16 [T, parts, 32 * W], W padded
    bounds: jax.Array  # float32 [T]


def padded_words(layout: BlockLayout, block_words: int) -> int:
    """W: words of a row, padded to whole blocks."""
    return -(-layout.words_per_row // block_words) * block_words


def column_of(element: jax.Array) -> jax.Array:
    """The column that stands at an element of `HalfRows.columns`, int32."""
    word = 4 * (element >> 7) + ((element >> 1) & 3)
    return 32 * word + 4 * ((element >> 4) & 7) + 2 * ((element >> 3) & 1) + (element & 1)


def split_rows(x: jax.Array, bounds: jax.Array, layout: BlockLayout, block_words: int, *, exact: bool) -> HalfRows:
    """Rows as operands of the kernel.

    Args:
        x: `[T, K]`, bfloat16 or float32.
        bounds: float32 `[T]`, at least the largest magnitude of each row and not much more.
        block_words: W is padded with zeros to a multiple of it.
        exact: three parts, for float32 rows; otherwise one.
    """
    tokens = x.shape[0]
    scaled = x.astype(jnp.float32) * row_scale(bounds)[:, None]
    words = padded_words(layout, block_words)
    scaled = jnp.pad(scaled, ((0, 0), (0, 32 * words - layout.cols)))
    parts = []
    for _ in range(3 if exact else 1):
        half = rounded_to(scaled, jnp.float16)
        parts.append(half.astype(jnp.float16))
        scaled = scaled - half
    # Axes of a row: four words, word of them, group g, second s, first j.
    axes = jnp.stack(parts, axis=1).reshape(tokens, len(parts), words // 4, 4, 8, 2, 2)
    return HalfRows(axes.transpose(0, 1, 2, 4, 5, 3, 6).reshape(tokens, len(parts), 32 * words), bounds)


def row_scale(bounds: jax.Array, *, inverse: bool = False) -> jax.Array:
    """The power of two that rows below `bounds`, float32, are multiplied by, or its inverse."""
    exponent = (lax.bitcast_convert_type(bounds, jnp.int32) >> 23) & 255
    # jnp.clip with Python numbers does not lower in a kernel.
    scale = jnp.minimum(jnp.maximum(254 + _TARGET_EXPONENT - exponent, jnp.int32(1)), jnp.int32(253))
    return lax.bitcast_convert_type((254 - scale if inverse else scale) << 23, jnp.float32)
