"""What to prepare, and how."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from pallas_kernels.bitplane_moe.layout import BITS
from pwjax.calibration.text import DEFAULT_SEED
from pwjax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What to prepare and how.

    Attributes:
        calibration: `.txt` or `.jsonl`; None takes the text that comes with the package.
        lut_rows: rows that share a table, "auto" decides a unit by measurement.
        max_bits: default cap for serving; None decides by the calibration loss.
        keep_source: keep the bf16 experts for `--method bf16`.
        seed: of the synthetic part of the default calibration text.
        calibration_sequences, calibration_tokens: at most so many windows of so many tokens.
        loss_sequences: windows that losses (kappa, `max_bits`) are measured on.
    """

    source: Path
    out: Path
    calibration: Path | None = None
    lut_rows: Literal["auto", 1, 32] = "auto"
    max_bits: int | None = None
    keep_source: bool = True
    seed: int = DEFAULT_SEED
    calibration_sequences: int = 128
    calibration_tokens: int = 512
    loss_sequences: int = 16

    def __post_init__(self) -> None:
        if self.lut_rows not in ("auto", 1, 32):
            raise UserError(f"--lut-rows {self.lut_rows}: must be auto, 1 or 32")
        if self.max_bits is not None and self.max_bits not in BITS:
            raise UserError(f"--max-bits {self.max_bits}: must be {BITS[0]} to {BITS[-1]}")
        if self.calibration_sequences < 1 or self.calibration_tokens < 2 or self.loss_sequences < 1:
            raise UserError("calibration needs at least 1 sequence of 2 tokens, and 1 sequence for losses")
