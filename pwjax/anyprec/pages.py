"""From a layer's experts to weight pages with their errors, and from pages back to dense weights for calibration."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS, MIN_BITS, BlockLayout, pack_page
from pwjax.anyprec.quantizer import quantize

# Weights quantized and packed at once: bounds host memory beside the layer itself.
BATCH_WEIGHTS = 2**24


@dataclasses.dataclass(frozen=True)
class QuantizedUnit:
    """One unit (gate_up or down) of all experts of a layer.

    Attributes:
        pages: uint32 `[E, page_slots(b) * slot_words]` for b in 3..8.
        raw_sensitivity: float64 `[E, 6]`, `sum h (W_b - W)^2`.
        squared_error: float64 `[6]`, `sum (W_b - W)^2` over all experts.
        power: `sum W^2` over all experts.
        seconds: time in quantization and packing.
    """

    pages: dict[int, np.ndarray]
    raw_sensitivity: np.ndarray
    squared_error: np.ndarray
    power: float
    seconds: float


def quantize_unit(
    weights: np.ndarray, importance: np.ndarray, layout: BlockLayout, on_weights: Callable[[int], Any] = lambda n: None
) -> QuantizedUnit:
    """Quantizes and packs the experts of one unit, a few at a time.

    Args:
        weights: `[E, N, K]`, any float type.
        importance: float32 `[E, K]`.
        on_weights: told how many weights are done, a batch at a time.
    """
    started_s = time.monotonic()
    experts, rows, cols = weights.shape
    pages = {b: np.empty((experts, layout.page_slots(b) * layout.slot_words), np.uint32) for b in BITS}
    raw, error, power = np.empty((experts, len(BITS))), np.zeros(len(BITS)), 0.0
    batch = max(1, BATCH_WEIGHTS // (rows * cols))
    for start in range(0, experts, batch):
        part = slice(start, start + batch)
        q = quantize(weights[part], importance[part], layout.lut_rows)
        for column, bits in enumerate(BITS):
            pages[bits][part] = pack_page(layout, bits, q.indices, q.luts[bits], q.row_scale)
            columns = np.asarray(
                _column_errors(weights[part], q.indices, q.luts[bits], q.row_scale, layout, bits), np.float64
            )
            raw[part, column] = (columns * importance[part]).sum(axis=1)
            error[column] += columns.sum()
        power += float(np.asarray(_column_power(weights[part]), np.float64).sum())
        on_weights(q.indices.size)
    return QuantizedUnit(pages, raw, error, power, time.monotonic() - started_s)


@functools.partial(jax.jit, static_argnames=("layout", "bits"))
def _column_errors(
    weights: jax.Array, indices: jax.Array, lut: jax.Array, row_scale: jax.Array, layout: BlockLayout, bits: int
) -> jax.Array:
    """`sum_n (W_b - W)^2`, float32 `[B, K]`."""
    delta = _lookup(layout, indices >> (MAX_BITS - bits), lut, row_scale) - weights.astype(jnp.float32)
    return jnp.sum(delta * delta, axis=1)


@jax.jit
def _column_power(weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(weights.astype(jnp.float32)), axis=1)


def _lookup(layout: BlockLayout, codes: jax.Array, lut: jax.Array, row_scale: jax.Array) -> jax.Array:
    """Float32 `[B, N, K]` of b-bit codes `[B, N, K]`, tables `[B, G, 2**b]` and scales `[B, N]`."""
    blocks, rows, cols = codes.shape
    short = layout.groups * layout.lut_rows - rows
    grouped = jnp.pad(codes, ((0, 0), (0, short), (0, 0))).reshape(blocks, layout.groups, -1).astype(jnp.int32)
    values = jnp.take_along_axis(lut.astype(jnp.float32), grouped, axis=2, mode="promise_in_bounds")
    return values.reshape(blocks, -1, cols)[:, :rows] * row_scale[:, :, None]


def weights_from_pages(layout: BlockLayout, pages: Mapping[int, np.ndarray], bits: int) -> jax.Array:
    """Dense weights of one unit at precision `bits`, on the device.

    bfloat16 halves the memory; its rounding adds 1e-6 of relative squared error, against 1e-5 at 8 bits.

    Args:
        pages: uint32 `[E, page_slots(b) * slot_words]` for every page 3..bits.

    Returns:
        bfloat16 `[E, N, K]`.
    """
    return _weights_from_pages(tuple(jnp.asarray(pages[b]) for b in BITS if b <= bits), layout, bits)


@functools.partial(jax.jit, static_argnames=("layout", "bits"))
def _weights_from_pages(pages: tuple[jax.Array, ...], layout: BlockLayout, bits: int) -> jax.Array:
    experts = pages[0].shape[0]
    column = np.arange(layout.cols)
    codes = jnp.zeros((experts, layout.rows, layout.cols), jnp.uint8)
    for plane in range(bits):
        page, start = layout.plane_offset_words(plane)
        words = pages[page - MIN_BITS][:, start : start + layout.plane_words]
        words = words.reshape(experts, layout.rows, layout.words_per_row)
        bit = (words[:, :, column // 32] >> (column % 32).astype(np.uint32)) & 1
        codes = codes * 2 + bit.astype(jnp.uint8)
    start = layout.lut_offset_words(bits)
    packed = pages[bits - MIN_BITS][:, start : start + layout.lut_words(bits)].reshape(experts, layout.groups, -1)
    halves = jnp.concatenate([packed & 0xFFFF, packed >> 16], axis=-1).astype(jnp.uint16)
    lut = jax.lax.bitcast_convert_type(halves, jnp.float16)
    scale = pages[0][:, layout.scale_offset_words : layout.scale_offset_words + layout.rows]
    scale = jax.lax.bitcast_convert_type(scale, jnp.float32)
    return _lookup(layout, codes, lut, scale).astype(jnp.bfloat16)
