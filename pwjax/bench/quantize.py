"""Quantization speed: layers of random experts through what `pwjax prepare` does to each."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pwjax.anyprec.pages import quantize_unit
from pwjax.bench.synthetic import SyntheticModel
from pwjax.config import ModelConfig
from pwjax.paging.host_store import UNIT_NAMES


def bench_quantize(
    config: ModelConfig, *, layers: int, experts: int | None, lut_rows: int, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """A row a layer: fit, packing and errors of its experts. The first layer's time has the compilation in it.

    Args:
        experts: of each layer; None for all.
    """
    model = SyntheticModel(config, lut_rows=lut_rows, seed=seed)
    geometry = model.geometry()
    rng = np.random.default_rng(seed)
    for layer in range(layers):
        source = [np.asarray(weights[:experts]) for weights in model.load_source(layer)]
        seconds, weights = 0.0, 0
        for unit, values in zip(UNIT_NAMES, source, strict=True):
            importance = rng.lognormal(size=(values.shape[0], values.shape[2])).astype(np.float32)
            started_s = time.perf_counter()
            quantize_unit(values, importance, getattr(geometry, unit))
            seconds += time.perf_counter() - started_s
            weights += values.size
        yield {
            "layer": layer,
            "experts": len(source[0]),
            "lut_rows": lut_rows,
            "weights": weights,
            "seconds": seconds,
            "weights_per_second": weights / seconds,
        }


def extrapolated_seconds(rows: list[dict[str, Any]], weights: int) -> float:
    """Seconds for `weights` weights: the first layer's surplus once, all else at the last layer's rate."""
    first, last = rows[0], rows[-1]
    rate = last["weights_per_second"]
    surplus = max(0.0, first["seconds"] - first["weights"] / rate)
    return surplus + weights / rate


def routed_weights(config: ModelConfig) -> int:
    """Weights of all routed experts."""
    return config.num_linear_blocks // 2 * sum(math.prod(config.unit_shape(unit)) for unit in range(2))
