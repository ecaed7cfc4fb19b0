"""Any-Precision quantization of linear-blocks: scaling, grouping, sorting, and the nested fit.

Every row is divided by its root mean square (one float32 scale a row), which makes rows alike enough to share a table
and keeps the float16 table values near 1. The fit minimises `sum_k h_k (W - W_b)^2`: in a shared table a row therefore
weighs by the square of its scale.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS
from pwjax.anyprec.splits import fit_sorted
from pwjax.errors import UserError

LUT_ROWS = (1, 32)
# Elements fitted at once: the fit holds about 20 float64 arrays of this size.
CHUNK_ELEMENTS_CPU = 2**20
CHUNK_ELEMENTS_ACCELERATOR = 2**25
# Weights below this share of a group's largest are raised to it, which keeps sums positive.
WEIGHT_FLOOR = 1e-12
# A constant row in a shared table outweighs its neighbours by this factor, so that the table keeps its value exactly.
CONSTANT_ROW_WEIGHT = 1e6


@dataclasses.dataclass(frozen=True)
class Quantized:
    """B quantized linear-blocks `[N, K]`.

    Attributes:
        indices: uint8 `[B, N, K]`; the top b bits are the b-bit index.
        luts: for b in 3..8, float16 `[B, G, 2**b]`, ascending; `G = ceil(N / lut_rows)`.
        row_scale: float32 `[B, N]`.
        lut_rows: rows that share a table.
    """

    indices: np.ndarray
    luts: dict[int, np.ndarray]
    row_scale: np.ndarray
    lut_rows: int


def quantize(weights: jax.Array | np.ndarray, importance: jax.Array | np.ndarray, lut_rows: int) -> Quantized:
    """Quantizes linear-blocks to 3..8 nested bits.

    Args:
        weights: `[B, N, K]`, float32 or bfloat16, finite.
        importance: float32 `[B, K]`, at least 0, a column's weight in the squared error; all zeros means uniform.
        lut_rows: 1 or 32 rows share a table.

    Raises:
        UserError: non-finite weights, negative or non-finite importance, or another `lut_rows`.
    """
    weights, importance = np.asarray(weights), np.asarray(importance, np.float32)
    _check(weights, importance, lut_rows)
    blocks, rows, cols = weights.shape
    groups = -(-rows // lut_rows)
    if rows % lut_rows:
        weights = np.pad(weights, ((0, 0), (0, groups * lut_rows - rows), (0, 0)))
    grouped = weights.reshape(blocks * groups, lut_rows, cols)
    real_rows = np.minimum(rows - np.arange(groups) * lut_rows, lut_rows).astype(np.int32)
    real_rows, block_of = np.tile(real_rows, blocks), np.repeat(np.arange(blocks), groups)

    codes = np.empty(grouped.shape, np.uint8)
    means = np.empty((len(grouped), len(BITS), 2**MAX_BITS), np.float16)
    scales = np.empty(grouped.shape[:2], np.float32)
    for start, stop, size in _chunks(len(grouped), lut_rows * cols):
        part = slice(start, stop)
        inputs = (grouped[part], real_rows[part], importance[block_of[part]])
        padded = [np.pad(a, [(0, size - len(a))] + [(0, 0)] * (a.ndim - 1), mode="edge") for a in inputs]
        with jax.enable_x64(True):  # prefix sums in float64
            fitted = _quantize_groups(*padded)
        codes[part], means[part], scales[part] = (np.asarray(a)[: stop - start] for a in fitted)
    return Quantized(
        indices=codes.reshape(blocks, groups * lut_rows, cols)[:, :rows],
        luts={b: means[:, b - BITS[0], : 2**b].reshape(blocks, groups, 2**b) for b in BITS},
        row_scale=scales.reshape(blocks, -1)[:, :rows],
        lut_rows=lut_rows,
    )


def _check(weights: np.ndarray, importance: np.ndarray, lut_rows: int) -> None:
    if lut_rows not in LUT_ROWS:
        raise UserError(f"lut_rows is {lut_rows}; a table is shared by 1 or 32 rows")
    if importance.shape != (weights.shape[0], weights.shape[2]):
        raise UserError(f"importance has shape {importance.shape}; weights {weights.shape} need one value a column")
    if not np.isfinite(weights).all():
        block, row, col = (int(axis[0]) for axis in np.nonzero(~np.isfinite(weights)))
        raise UserError(f"weights hold a non-finite value at [{block}, {row}, {col}]; quantization needs finite ones")
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise UserError("importance must be finite and at least 0 in every column")


def _chunks(groups: int, elements: int) -> list[tuple[int, int, int]]:
    """`(start, stop, padded size)` of every chunk; all have one padded size, so one compilation serves them."""
    limit = CHUNK_ELEMENTS_CPU if _sorts_on_host() else CHUNK_ELEMENTS_ACCELERATOR
    count = -(-groups // max(1, limit // elements))
    size = -(-groups // count)
    return [(start, min(start + size, groups), size) for start in range(0, groups, size)]


def _sorts_on_host() -> bool:
    # XLA's sort on CPU is 6 times slower than NumPy's.
    return jax.default_backend() == "cpu"


def _quantize_groups(
    weights: np.ndarray, real_rows: np.ndarray, importance: np.ndarray
) -> tuple[np.ndarray | jax.Array, jax.Array, jax.Array]:
    """Codes uint8 `[R, L, K]`, tables float16 `[R, 6, 256]` and scales float32 `[R, L]` of R groups of L rows."""
    if not _sorts_on_host():
        return _quantize_groups_on_device(weights, real_rows, importance)
    x, w, scale = _normalise(weights, real_rows, importance)
    order = np.argsort(np.asarray(x), axis=1)
    sorted_codes, tables = _fit(x, w, jnp.asarray(order.astype(np.int32)))
    codes = np.empty(order.shape, np.uint8)
    np.put_along_axis(codes, order, np.asarray(sorted_codes), axis=1)
    return codes.reshape(weights.shape), tables, scale


@jax.jit
def _quantize_groups_on_device(
    weights: jax.Array, real_rows: jax.Array, importance: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, w, scale = _normalise(weights, real_rows, importance)
    order = jnp.argsort(x, axis=1)
    sorted_codes, tables = _fit(x, w, order)
    codes = jnp.zeros(x.shape, jnp.uint8)
    codes = jax.vmap(lambda out, at, value: out.at[at].set(value, unique_indices=True))(codes, order, sorted_codes)
    return codes.reshape(weights.shape), tables, scale


@jax.jit
def _normalise(
    weights: jax.Array, real_rows: jax.Array, importance: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scaled values and fit weights `[R, L * K]`, and row scales `[R, L]`."""
    groups, rows, cols = weights.shape
    weights = weights.astype(jnp.float32)
    largest = jnp.max(jnp.abs(weights), axis=-1, keepdims=True)
    unit = weights / jnp.where(largest > 0, largest, 1.0)
    constant = jnp.all(weights == weights[..., :1], axis=-1, keepdims=True)
    root_mean_square = jnp.sqrt(jnp.mean(unit * unit, axis=-1, keepdims=True))
    relative = jnp.where(constant, 1.0, root_mean_square)
    scale = largest * relative
    x = unit / jnp.where(relative > 0, relative, 1.0)

    largest_scale = jnp.max(scale, axis=1, keepdims=True)
    row_weight = jnp.square(scale / jnp.where(largest_scale > 0, largest_scale, 1.0))
    row_weight = jnp.where(constant & (scale > 0) & (rows > 1), CONSTANT_ROW_WEIGHT, row_weight)
    most = jnp.max(importance, axis=-1, keepdims=True)
    column_weight = jnp.where(most > 0, importance / jnp.where(most > 0, most, 1.0), 1.0)
    w = jnp.maximum(row_weight * column_weight[:, None, :], WEIGHT_FLOOR)
    # Rows past the end weigh nothing and hide behind the largest value.
    real = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) < real_rows[:, None, None]
    top = jnp.max(jnp.where(real, x, -jnp.inf), axis=(1, 2), keepdims=True)
    x, w = jnp.where(real, x, top), jnp.where(real, w, 0.0)
    return x.reshape(groups, rows * cols), w.reshape(groups, rows * cols), scale[..., 0]


@jax.jit
def _fit(x: jax.Array, w: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Codes in sorted order, and float16 tables `[R, 6, 256]`, ascending over their used entries."""
    if x.shape[1] == 1:  # a single element has no neighbour to be split from
        return jnp.zeros(x.shape, jnp.uint8), jnp.broadcast_to(x[:, :, None], (len(x), 6, 256)).astype(jnp.float16)
    take = functools.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
    codes, means = fit_sorted(take(x, order), take(w, order))
    return codes, jax.lax.cummax(means.astype(jnp.float16), axis=2)
