"""Weights from codes and tables, and the error that quantization leaves."""

from __future__ import annotations

import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS
from pwjax.anyprec.quantizer import Quantized
from pwjax.errors import UserError


def dequantize(quantized: Quantized, bits: int) -> np.ndarray:
    """`W_b[n, k] = row_scale[n] * float32(luts[b][n // lut_rows, indices[n, k] >> (8 - b)])`.

    Returns:
        float32 `[B, N, K]`.

    Raises:
        UserError: `bits` outside 3..8.
    """
    if bits not in BITS:
        raise UserError(f"{bits} bits asked for; the planes hold {BITS[0]} to {MAX_BITS}")
    blocks, rows, cols = quantized.indices.shape
    table = quantized.luts[bits].astype(np.float32)
    index = quantized.indices >> np.uint8(MAX_BITS - bits)
    groups = table.shape[1]
    short = groups * quantized.lut_rows - rows
    index = np.pad(index, ((0, 0), (0, short), (0, 0))).reshape(blocks, groups, -1)
    values = np.take_along_axis(table, index.astype(np.intp), axis=2)
    values = values.reshape(blocks, groups * quantized.lut_rows, cols)[:, :rows]
    return values * quantized.row_scale[:, :, None]


def squared_error(
    weights: np.ndarray, quantized: Quantized, bits: int, importance: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Float64 `[B]` sums of `h (W - W_b)^2` and of `h W^2` a linear-block; without importance, h = 1."""
    weights = np.asarray(weights, np.float32)
    h = np.ones(weights.shape[::2]) if importance is None else np.asarray(importance, np.float64)
    delta = weights - dequantize(quantized, bits)
    columns = [np.einsum("bnk,bnk->bk", part, part, dtype=np.float64) for part in (delta, weights)]
    return (columns[0] * h).sum(axis=1), (columns[1] * h).sum(axis=1)


def relative_error(
    weights: np.ndarray, quantized: Quantized, bits: int, importance: np.ndarray | None = None
) -> np.ndarray:
    """Float64 `[B]`: `sum h (W - W_b)^2 / sum h W^2` a linear-block; 0 where the weights are all zero."""
    error, power = squared_error(weights, quantized, bits, importance)
    return np.divide(error, power, out=np.zeros_like(error), where=power > 0)
