"""What a finished run says about itself: in the manifest, in the JSON line, and to people."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS
from pwjax.anyprec.choices import KV_BLOCK_TOKENS
from pwjax.calibration import CalibrationLosses, Kappa
from pwjax.prepare.text import CalibrationText

MIN_TOKENS_PER_EXPERT = 8


@dataclasses.dataclass
class Totals:
    """Sums over layers.

    Attributes:
        raw: a layer: float64 `[E, 2, 6]`, raw sensitivities.
        tokens_per_expert: a layer: int64 `[E]`.
        averaged: `(layer, expert)` whose importance is their layer's mean.
        error, power: sums of `(W_b - W)^2`, `[6]`, and of `W^2`.
        seconds: of quantization and packing.
    """

    raw: list[np.ndarray] = dataclasses.field(default_factory=list)
    tokens_per_expert: list[np.ndarray] = dataclasses.field(default_factory=list)
    averaged: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    error: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(len(BITS)))
    power: float = 0.0
    seconds: float = 0.0
    layers_quantized: int = 0

    def add(self, layer: int, stats: dict[str, np.ndarray]) -> None:
        self.raw.append(stats["raw"])
        self.tokens_per_expert.append(stats["tokens_per_expert"])
        self.averaged += [(layer, int(expert)) for expert in stats["averaged_experts"]]
        self.error += stats["squared_error"]
        self.power += float(stats["power"])
        self.seconds += float(stats["seconds"])


def host_peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def quantization_figures(totals: Totals, weights: int, slot_words: int, slot_waste: float) -> dict[str, Any]:
    """The manifest's `quantization`."""
    return {
        "weights": weights,
        "weights_per_second": weights / totals.seconds if totals.seconds else None,
        "relative_error_by_bits": {
            str(b): float(totals.error[i] / totals.power) if totals.power else 0.0 for i, b in enumerate(BITS)
        },
        "slot_bytes": 4 * slot_words,
        "slot_waste": slot_waste,
        "kv_block_tokens": KV_BLOCK_TOKENS,
    }


def calibration_figures(totals: Totals, text: CalibrationText, losses: CalibrationLosses) -> dict[str, Any]:
    """The manifest's `calibration`."""
    return {
        "text": text.name,
        "text_sha256": text.sha256,
        "sequences": text.tokens.shape[0],
        "tokens": int(text.tokens.size),
        "min_tokens_per_expert": MIN_TOKENS_PER_EXPERT,
        "experts_without_data": int((np.stack(totals.tokens_per_expert) == 0).sum()),
        "experts_averaged": [list(pair) for pair in totals.averaged],
        "loss_tokens": losses.num_tokens,
        "base_nats_per_token": losses.base,
        "uniform_nats_per_token": {str(bits): loss for bits, loss in losses.uniform.items()},
        "perturbed_nats_per_token": losses.perturbed.tolist(),
    }


def kappa_figures(kappa: Kappa) -> dict[str, Any]:
    """The manifest's `kappa`."""
    return {"values": kappa.values.tolist(), "clipped": [list(pair) for pair in kappa.clipped]}


def summary(quantization: Mapping[str, Any], calibration: Mapping[str, Any], max_bits: int) -> list[str]:
    """Lines for people."""
    errors = "  ".join(f"{bits}: {error:.2g}" for bits, error in quantization["relative_error_by_bits"].items())
    speed, few = quantization["weights_per_second"], len(calibration["experts_averaged"])
    pace = f", {speed:.3g} a second" if speed else ""
    lines = [
        f"{quantization['weights']:,} weights quantized{pace}; relative squared error by bits {errors}",
        f"calibration: {calibration['tokens']} tokens, {calibration['base_nats_per_token']:.4f} nats a token in bf16; "
        f"{max_bits} bits by default",
    ]
    if few:
        lines.append(
            f"{few} experts had fewer than {MIN_TOKENS_PER_EXPERT} calibration tokens and took their layer's mean"
        )
    return lines
