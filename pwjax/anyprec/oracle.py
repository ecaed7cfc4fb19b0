"""Float64 NumPy reference of the nested quantizer, for tests: slow, plain, and by other algorithms.

The seed is the exact optimum by dynamic programming over all borders (Wang and Song, "Ckmeans.1d.dp", 2011), the splits
try every border of every cluster. Row scales and weights follow the definition in `quantizer`'s docstring.
"""

from __future__ import annotations

import itertools

import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MIN_BITS


def cost_matrix(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """`cost[i, j]`: weighted squared error of elements `i .. j` about their mean, float64 `[M, M]`, upper triangle."""
    cost = np.zeros((len(x), len(x)))
    for start in range(len(x)):
        part, weight = x[start:] - x[start], w[start:]
        total, first, second = np.cumsum(weight), np.cumsum(weight * part), np.cumsum(weight * part * part)
        cost[start, start:] = np.maximum(second - first * first / np.where(total > 0, total, 1.0), 0.0)
    return cost


def optimal_edges(x: np.ndarray, w: np.ndarray, clusters: int) -> np.ndarray:
    """Borders `[clusters + 1]` of the least-error partition of sorted `x` into ranges (some may be empty)."""
    size = len(x)
    cost = cost_matrix(x, w)
    best = np.concatenate([[0.0], cost[0]])  # best[j]: error of the first j elements in one cluster
    choice = np.zeros((clusters, size + 1), int)
    for k in range(1, clusters):
        # The last cluster starts at i: best[i] + cost[i, j - 1]; i = j leaves it empty.
        total = np.full((size + 1, size + 1), np.inf)
        total[:size, 1:] = np.where(np.triu(np.ones((size, size), bool)), best[:size, None] + cost, np.inf)
        np.fill_diagonal(total, best)
        choice[k], best = total.argmin(axis=0), total.min(axis=0)
    edges = [size]
    for k in range(clusters - 1, 0, -1):
        edges.append(int(choice[k, edges[-1]]))
    return np.array([0, *reversed(edges)])


def best_split(x: np.ndarray, w: np.ndarray) -> int:
    """Length of the left part of the least-error split of sorted `x` in two; `len(x)` if all values are equal."""
    if len(x) < 2 or x[0] == x[-1]:
        return len(x)
    errors = [_error(x[:cut], w[:cut]) + _error(x[cut:], w[cut:]) for cut in range(1, len(x))]
    return 1 + int(np.argmin(errors))


def nested_edges(x: np.ndarray, w: np.ndarray) -> dict[int, np.ndarray]:
    """Borders `[2**b + 1]` at every bit-width of a sorted row or group."""
    edges = {MIN_BITS: optimal_edges(x, w, 2**MIN_BITS)}
    for bits in BITS[1:]:
        parents = edges[bits - 1]
        cuts = [a + best_split(x[a:b], w[a:b]) for a, b in itertools.pairwise(parents)]
        edges[bits] = np.append(np.stack([parents[:-1], cuts], axis=1).ravel(), parents[-1])
    return edges


def reconstruct(weights: np.ndarray, importance: np.ndarray, lut_rows: int) -> dict[int, np.ndarray]:
    """The weights `[N, K]` that each bit-width stands for, in float64 and with unrounded tables."""
    weights = np.asarray(weights, np.float64)
    importance = np.asarray(importance, np.float64)
    importance = importance if importance.any() else np.ones_like(importance)
    result = {bits: np.zeros_like(weights) for bits in BITS}
    for start in range(0, len(weights), lut_rows):
        group = weights[start : start + lut_rows]
        scale = np.sqrt((group**2).mean(axis=1, keepdims=True))
        x = np.divide(group, scale, out=np.zeros_like(group), where=scale > 0).ravel()
        w = (importance * np.ones_like(group) * scale**2).ravel()
        order = np.argsort(x, kind="stable")
        for bits, edges in nested_edges(x[order], w[order]).items():
            values = np.empty_like(x)
            for a, b in itertools.pairwise(edges):
                values[order[a:b]] = _mean(x[order[a:b]], w[order[a:b]])
            result[bits][start : start + lut_rows] = values.reshape(group.shape) * scale
    return result


def relative_errors(weights: np.ndarray, importance: np.ndarray, lut_rows: int) -> dict[int, float]:
    """Weighted relative squared error of one linear-block `[N, K]` at 3..8 bits."""
    h = importance if np.any(importance) else np.ones_like(importance)
    power = float((h * np.asarray(weights, np.float64) ** 2).sum())
    return {
        bits: float((h * (weights - values) ** 2).sum()) / power
        for bits, values in reconstruct(weights, importance, lut_rows).items()
    }


def _mean(x: np.ndarray, w: np.ndarray) -> float:
    return float((w * x).sum() / w.sum()) if w.sum() > 0 else float(x.mean()) if len(x) else 0.0


def _error(x: np.ndarray, w: np.ndarray) -> float:
    return float((w * (x - _mean(x, w)) ** 2).sum())
