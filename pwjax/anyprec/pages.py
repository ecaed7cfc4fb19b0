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

from pallas_kernels.bitplane_moe.layout import (
    BITS,
    MAX_BITS,
    MIN_BITS,
    BlockLayout,
    pack_page,
    unpack_lut,
    unpack_planes,
)
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
            columns = _column_errors(weights[part], q.indices, _full_table(q.luts[bits]), q.row_scale, layout, bits)
            columns = np.asarray(columns, np.float64)
            raw[part, column] = (columns * importance[part]).sum(axis=1)
            error[column] += columns.sum()
        power += float(np.asarray(_column_power(weights[part]), np.float64).sum())
        on_weights(q.indices.size)
    return QuantizedUnit(pages, raw, error, power, time.monotonic() - started_s)


@functools.partial(jax.jit, static_argnames="layout")
def _column_errors(
    weights: jax.Array, indices: jax.Array, table: jax.Array, row_scale: jax.Array, layout: BlockLayout, bits: int
) -> jax.Array:
    """`sum_n (W_b - W)^2`, float32 `[B, K]`."""
    delta = _lookup(layout, indices, table, row_scale, bits) - weights.astype(jnp.float32)
    return jnp.sum(delta * delta, axis=1)


@jax.jit
def _column_power(weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(weights.astype(jnp.float32)), axis=1)


def _full_table(lut: np.ndarray) -> np.ndarray:
    """Tables `[B, G, 2**b]` padded to 256 entries, so that one compilation serves every bit-width."""
    return np.pad(lut, ((0, 0), (0, 0), (0, 2**MAX_BITS - lut.shape[-1])))


def _lookup(
    layout: BlockLayout, indices: jax.Array, table: jax.Array, row_scale: jax.Array, bits: int | jax.Array
) -> jax.Array:
    """Float32 `[B, N, K]` at precision `bits` of 8-bit codes `[B, N, K]`, tables `[B, G, 256]`, scales `[B, N]`."""
    blocks, rows, cols = indices.shape
    short = layout.groups * layout.lut_rows - rows
    codes = jnp.right_shift(indices, jnp.asarray(MAX_BITS - bits, jnp.uint8))
    codes = jnp.pad(codes, ((0, 0), (0, short), (0, 0))).reshape(blocks, layout.groups, -1).astype(jnp.int32)
    values = jnp.take_along_axis(table.astype(jnp.float32), codes, axis=2, mode="promise_in_bounds")
    return values.reshape(blocks, -1, cols)[:, :rows] * row_scale[:, :, None]


class UnpackedUnit:
    """One unit of a layer from its pages: codes on the device, tables on the host.

    Args:
        pages: uint32 `[E, page_slots(b) * slot_words]` for b in 3..8.
    """

    def __init__(self, layout: BlockLayout, pages: Mapping[int, np.ndarray]) -> None:
        self._layout = layout
        self._tables = {bits: _full_table(_table(layout, pages[bits], bits)) for bits in BITS}
        start = layout.scale_offset_words
        self._scale = np.ascontiguousarray(pages[MIN_BITS][:, start : start + layout.rows]).view(np.float32)
        self._codes = _unpack_codes(tuple(jnp.asarray(pages[bits]) for bits in BITS), layout)

    def weights(self, bits: int) -> jax.Array:
        """Dense weights at precision `bits`, bfloat16 `[E, N, K]`.

        bfloat16 halves the memory; its rounding adds 1e-6 of relative squared error, against 1e-5 at 8 bits.
        """
        return _dense_weights(self._codes, self._tables[bits], self._scale, self._layout, bits)


@functools.partial(jax.jit, static_argnames="layout")
def _dense_weights(
    codes: jax.Array, table: jax.Array, row_scale: jax.Array, layout: BlockLayout, bits: int
) -> jax.Array:
    return _lookup(layout, codes, table, row_scale, bits).astype(jnp.bfloat16)


def _table(layout: BlockLayout, page: np.ndarray, bits: int) -> np.ndarray:
    """Float16 `[E, G, 2**bits]`."""
    start = layout.lut_offset_words(bits)
    return unpack_lut(page[:, start : start + layout.lut_words(bits)].reshape(len(page), layout.groups, -1))


@functools.partial(jax.jit, static_argnames="layout")
def _unpack_codes(pages: tuple[jax.Array, ...], layout: BlockLayout) -> jax.Array:
    """8-bit codes `[E, N, K]` from pages 3..8."""
    return unpack_planes(layout, dict(zip(BITS, pages, strict=True)), MAX_BITS)
