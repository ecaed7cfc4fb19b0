"""`pwjax prepare`: a Hugging Face MoE folder to a store of weight pages, a layer at a time, resumable.

Everything about the input is checked before OUT is made. Then, for every layer: read the experts, see what calibration
tokens do there (importance), quantize, pack pages, save, and let the calibration streams pass through the quantized
layer. Losses at the end give kappa, the sensitivity table and the default `max_bits`; the manifest comes last. A
resumed run walks through finished layers with the pages that it finds on disk.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.hf_reader import HFCheckpoint
from checkpoints.manifest import MANIFEST_NAME, UNITS
from checkpoints.store import moe_geometry
from checkpoints.writer import PREPARE_NAME, PreparedWriter
from pallas_kernels.bitplane_moe.layout import BlockLayout
from pwjax.anyprec.choices import (
    MAX_SLOT_WASTE,
    SAMPLE_ROWS,
    choose_lut_rows,
    choose_slot_words,
    sample_linear_blocks,
)
from pwjax.anyprec.pages import UnpackedUnit, quantize_unit
from pwjax.calibration import CalibrationLosses, CalibrationWalker, choose_max_bits, fit_kappa, sensitivity
from pwjax.cli_common import format_bytes
from pwjax.errors import UserError
from pwjax.prepare.figures import (
    MIN_TOKENS_PER_EXPERT,
    Totals,
    calibration_figures,
    host_peak_bytes,
    kappa_figures,
    quantization_figures,
    summary,
)
from pwjax.prepare.options import PrepareOptions
from pwjax.prepare.progress import Bar
from pwjax.prepare.text import CalibrationText, calibration_text

QUANTIZER_VERSION = 1  # a resumed run must not mix pages of two
SAMPLE_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class _Choices:
    lut_rows: tuple[int, int]
    slot_words: int
    slot_waste: float

    @property
    def by_unit(self) -> dict[str, int]:
        return dict(zip(UNITS, self.lut_rows, strict=True))


def prepare(options: PrepareOptions, log: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Prepares a model.

    Args:
        log: takes lines for people; default prints them to stderr.

    Returns:
        The figures of the command's JSON line.

    Raises:
        UserError: bad input; nothing has been written then.
    """
    started_s = time.monotonic()
    log = log or (lambda line: print(line, file=sys.stderr))
    checkpoint = HFCheckpoint(options.source)
    checkpoint.validate()
    if (options.out / MANIFEST_NAME).exists():
        raise UserError(f"{options.out}: already holds a finished model; give a new folder, or delete this one first")
    text = calibration_text(options, checkpoint)
    if not (options.out / PREPARE_NAME).is_file():  # else the interrupted run has checked the same files
        with Bar("checking weights", checkpoint.total_bytes, "B") as bar:
            checkpoint.check_finite(lambda done, _: bar.to(done))
    fingerprint = {
        "source": checkpoint.fingerprint(),
        "calibration": text.sha256,
        "sequences": list(text.tokens.shape),
        "loss_sequences": options.loss_sequences,
        "lut_rows": options.lut_rows,
        "max_bits": options.max_bits,
        "keep_source": options.keep_source,
        "quantizer": QUANTIZER_VERSION,
    }
    with PreparedWriter(
        options.out, fingerprint, num_moe_layers=checkpoint.config.num_moe_layers, source=options.keep_source
    ) as writer:
        figures = _Preparation(options, checkpoint, text, writer, log).run()
    return {**figures, "seconds": time.monotonic() - started_s, "host_peak_bytes": host_peak_bytes()}


class _Preparation:
    """One run: the state that its steps share."""

    def __init__(
        self,
        options: PrepareOptions,
        checkpoint: HFCheckpoint,
        text: CalibrationText,
        writer: PreparedWriter,
        log: Callable[[str], None],
    ) -> None:
        self.options, self.checkpoint, self.text, self.writer, self.log = options, checkpoint, text, writer, log
        self.config = checkpoint.config
        self.totals = Totals()
        self.weights = self.config.num_linear_blocks // 2 * sum(n * k for n, k in map(self.config.unit_shape, (0, 1)))

    def run(self) -> dict[str, Any]:
        self.writer.copy_files(self.checkpoint.tokenizer_files())
        if not self.writer.has_dense():
            self.writer.write_dense(self.checkpoint.dense())
        choices = self._choices()
        walker = CalibrationWalker(
            self.config,
            self.text.tokens,
            self._dense("model.embed_tokens.weight")["model.embed_tokens.weight"],
            loss_sequences=self.options.loss_sequences,
            min_tokens=MIN_TOKENS_PER_EXPERT,
        )
        geometry = moe_geometry(self.config, choices.by_unit, choices.slot_words)
        with Bar("quantizing", self.weights, "w") as bar:
            for layer in range(self.config.num_layers):
                if self.config.moe_layers[layer]:
                    self._moe_layer(walker, layer, (geometry.gate_up, geometry.down), bar)
                else:
                    walker.pass_dense_layer(layer, self._dense(f"model.layers.{layer}."))
        losses = walker.losses(self._dense("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"))
        return self._finish(choices, losses)

    def _dense(self, *prefixes: str) -> dict[str, np.ndarray]:
        """Dense weights whose hub names start so, as they will be served (bf16)."""
        layout = self.checkpoint.layout
        return {
            name: self.checkpoint.tensors[file_name].read().reshape(layout.dense_shapes[name]).astype(jnp.bfloat16)
            for name, file_name in layout.dense.items()
            if name.startswith(prefixes)
        }

    def _choices(self) -> _Choices:
        if self.writer.has_state("choices"):
            saved = self.writer.read_state("choices")
            first, second = (int(value) for value in saved["lut_rows"])
            return _Choices((first, second), int(saved["slot_words"]), float(saved["slot_waste"]))
        wanted = self.options.lut_rows
        lut_rows = self._lut_rows() if wanted == "auto" else (wanted, wanted)
        slot_words, waste = choose_slot_words(self.config, lut_rows)
        chosen = {"lut_rows": np.array(lut_rows), "slot_words": slot_words, "slot_waste": waste}
        self.writer.write_state("choices", chosen)
        self.log(
            f"tables shared by {lut_rows[0]} rows (gate_up) and {lut_rows[1]} rows (down); slots of "
            f"{format_bytes(4 * slot_words)}, at most {waste:.2%} of weights and KV blocks is padding"
            + (f" (no slot size keeps it within {MAX_SLOT_WASTE:.0%})" if waste > MAX_SLOT_WASTE else "")
        )
        return _Choices(lut_rows, slot_words, waste)

    def _lut_rows(self) -> tuple[int, int]:
        """Measured on experts of a few layers, from the first to the last."""
        layers = sorted({int(i) for i in np.linspace(0, self.config.num_moe_layers - 1, SAMPLE_LAYERS)})
        samples: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for layer in layers:
            for unit, weights in enumerate(self.checkpoint.experts(layer)):
                wanted = -(-sample_linear_blocks(self.config, unit) // len(layers))
                chosen = np.unique(np.linspace(0, len(weights) - 1, wanted).astype(int))
                samples[unit].append(weights[chosen, :SAMPLE_ROWS].astype(np.float32))
        first, second = (choose_lut_rows(np.concatenate(sample)).chosen for sample in samples)
        return first, second

    def _moe_layer(
        self, walker: CalibrationWalker, layer: int, layouts: tuple[BlockLayout, BlockLayout], bar: Bar
    ) -> None:
        index = self.config.moe_layer_indices.index(layer)
        source = list(self.checkpoint.experts(index))
        experts = (jnp.asarray(source[0]), jnp.asarray(source[1]))
        if jax.default_backend() == "cpu":
            source = [np.asarray(weights) for weights in experts]  # views: one copy of the layer in memory
        statistics = walker.observe(layer, self._dense(f"model.layers.{layer}."), experts)
        if self.writer.has_layer(index):
            stats, pages = self.writer.read_layer_stats(index), self.writer.read_layer(index)
            bar.add(self.weights // self.config.num_moe_layers)
        else:
            if self.options.keep_source and not self.writer.has_source(index):
                self.writer.write_source(index, source[0], source[1])
            # pop: a unit's source leaves host memory when its pages are there.
            units = [
                quantize_unit(source.pop(0), importance, layout, bar.add)
                for importance, layout in zip(statistics.importance, layouts, strict=True)
            ]
            stats = {
                "raw": np.stack([unit.raw_sensitivity for unit in units], axis=1),
                "squared_error": sum(unit.squared_error for unit in units),
                "power": np.float64(sum(unit.power for unit in units)),
                "seconds": np.float64(sum(unit.seconds for unit in units)),
                "tokens_per_expert": statistics.tokens_per_expert,
                "averaged_experts": np.array(statistics.averaged_experts, np.int64),
            }
            pages = {name: unit.pages for name, unit in zip(UNITS, units, strict=True)}
            self.writer.write_layer_stats(index, stats)
            self.writer.write_layer(index, pages)
            self.totals.layers_quantized += 1
        self.totals.add(index, stats)
        unpacked = [UnpackedUnit(layout, pages[name]) for layout, name in zip(layouts, UNITS, strict=True)]
        walker.advance(experts, lambda unit, bits: unpacked[unit].weights(bits))

    def _finish(self, choices: _Choices, losses: CalibrationLosses) -> dict[str, Any]:
        """Fits kappa, writes the tables and the manifest, and tells what was done."""
        raw = np.stack(self.totals.raw)
        kappa = fit_kappa(losses, raw)
        self.writer.write_tables(
            {
                "sensitivity": sensitivity(kappa, raw),
                "raw_sensitivity": raw.astype(np.float32),
                "kappa": kappa.values,
                "tokens_per_expert": np.stack(self.totals.tokens_per_expert),
            }
        )
        max_bits = self.options.max_bits or choose_max_bits(losses)
        quantization = quantization_figures(self.totals, self.weights, choices.slot_words, choices.slot_waste)
        calibration = calibration_figures(self.totals, self.text, losses)
        self.writer.finish(
            {
                "model": self.config.to_dict(),
                "slot_words": choices.slot_words,
                "lut_rows": choices.by_unit,
                "max_bits": max_bits,
                "source": self.options.keep_source,
                "kappa": kappa_figures(kappa),
                "quantization": quantization,
                "calibration": calibration,
            }
        )
        for line in summary(quantization, calibration, max_bits):
            self.log(line)
        return {
            "device": jax.devices()[0].device_kind,
            "method": None,
            "implementations": {},
            "memory_budget_bytes": None,
            "out": str(self.options.out),
            **quantization,
            "experts_without_data": calibration["experts_without_data"],
            "lut_rows": choices.by_unit,
            "max_bits": max_bits,
            "source_kept": self.options.keep_source,
            "resumed": self.writer.resumed,
            "layers_quantized": self.totals.layers_quantized,
            "calibration": calibration,
            "kappa": kappa_figures(kappa),
        }
