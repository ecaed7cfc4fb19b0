"""Which parts of `pagedweight` take part: the switches of the paper's ablation (its table 4)."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
    """True keeps a part; all True is the full method.

    Attributes:
        routing: routing statistics weigh and protect experts (buckets, multipliers, floors, depth caps).
        residual: prompt residuals correct the global damage (equations 5 and 6).
        movement: pages move while serving; False serves the initial assignment throughout.
        sensitivity: the calibrated table tells linear-blocks apart; False leaves one that knows bit-widths only, so
            that the greedy goes width by width, as uniform quantization does.
    """

    routing: bool = True
    residual: bool = True
    movement: bool = True
    sensitivity: bool = True

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the parts that are switched off."""
        return tuple(field.name for field in dataclasses.fields(self) if not getattr(self, field.name))


NO_ABLATION = Ablation()


def indifferent_sensitivity(sensitivity: NDArray[np.floating], weights: NDArray[np.integer]) -> NDArray[np.float64]:
    """The table of `Ablation(sensitivity=False)`: at every width the same total, spread evenly over all weights.

    The total keeps the scale of the loss, against which `exchange_gain` and epsilon are measured.

    Args:
        sensitivity: `[n, 6]`, s_i^b.
        weights: `[n]`, N * K.

    Returns:
        float64 `[n, 6]`.
    """
    share = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
    return share[:, None] * np.asarray(sensitivity, np.float64).sum(axis=0)
