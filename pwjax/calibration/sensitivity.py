"""Sensitivity of linear-blocks: equation 2 of the paper, put on the scale of the loss by kappa.

Raw: `s_raw[i, b] = sum_nk h[i, k] (W_b - W)^2`, h the importance of `LayerStatistics`. It compares the linear-blocks of
one layer and unit, but not layers: the same error costs more or less loss elsewhere. So one factor kappa a layer and
unit is fitted such that the sum of `kappa * s_raw` over experts, at 3 bits, is the measured loss increase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS
from pwjax.calibration.walker import CalibrationLosses

# A unit whose measured loss does not rise counts as this share of the median rise: small, but never free.
RISE_FLOOR = 0.1
# Largest perplexity ratio to bfloat16 at which a bit-width counts as enough.
MAX_PERPLEXITY_RATIO = 1.001


@dataclasses.dataclass(frozen=True)
class Kappa:
    """Nats of loss a unit of raw sensitivity.

    Attributes:
        values: float64 `[L, 2]`, positive.
        clipped: `(moe_layer, unit)` whose measured rise lay below the floor and was raised to it.
    """

    values: np.ndarray
    clipped: tuple[tuple[int, int], ...]


@jax.jit
def _weighted_error(weights: jax.Array, quantized: jax.Array, importance: jax.Array) -> jax.Array:
    delta = quantized.astype(jnp.float32) - weights.astype(jnp.float32)
    return jnp.sum(jnp.sum(delta * delta, axis=-2) * importance, axis=-1)


def raw_sensitivity(weights: Any, quantized: Callable[[int], Any], importance: Any) -> np.ndarray:
    """`s_raw` of a batch of linear-blocks at every bit-width.

    Args:
        weights: `[E, N, K]`, float32 or bfloat16.
        quantized: bits to the dequantized weights, `[E, N, K]`.
        importance: float32 `[E, K]`.

    Returns:
        float32 `[E, 6]`, bits 3..8.
    """
    weights, importance = jnp.asarray(weights), jnp.asarray(importance, jnp.float32)
    columns = [np.asarray(_weighted_error(weights, jnp.asarray(quantized(bits)), importance)) for bits in BITS]
    return np.stack(columns, axis=-1)


def fit_kappa(losses: CalibrationLosses, raw: np.ndarray) -> Kappa:
    """Loss increase of quantizing a unit alone to 3 bits, divided by its summed raw sensitivity there.

    Increases below `RISE_FLOOR` times the median of the positive ones (noise makes some negative) are raised to that,
    so that no layer looks free or helped by quantization. The floor is on the increase, not on kappa: kappa follows the
    scale of a layer's activations and spans orders of magnitude between layers. Where no loss rises, all kappa are 1.

    Args:
        raw: `[L, E, 2, 6]`.
    """
    total = np.asarray(raw, np.float64)[..., 0].sum(axis=1)  # [L, 2]
    increase = losses.perturbed - losses.base
    has_error = total > 0  # weights that 3 bits hold exactly have no sensitivity to scale
    positive = increase[has_error & (increase > 0)]
    floor = RISE_FLOOR * float(np.median(positive)) if positive.size else np.inf
    clipped = tuple((int(m), int(u)) for m, u in np.argwhere(has_error & (increase < floor)))
    raised = np.maximum(increase, floor) if positive.size else total
    return Kappa(np.divide(raised, total, out=np.ones_like(total), where=has_error), clipped)


def sensitivity(kappa: Kappa, raw: np.ndarray) -> np.ndarray:
    """`kappa * s_raw` in nats, float32 `[L, E, 2, 6]`, never rising with bits (as float16 tables can make it)."""
    table = np.asarray(raw, np.float64) * kappa.values[:, None, :, None]
    return np.minimum.accumulate(table, axis=-1).astype(np.float32)


def choose_max_bits(losses: CalibrationLosses) -> int:
    """Smallest width whose perplexity is within 0.1% of unquantized; 8 if none is."""
    for bits in BITS:
        if np.exp(losses.uniform[bits] - losses.base) <= MAX_PERPLEXITY_RATIO:
            return bits
    return MAX_BITS
