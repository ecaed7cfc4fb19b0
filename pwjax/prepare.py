"""`pwjax prepare`: a Hugging Face MoE folder to a store of weight pages, a layer at a time, resumable.

Everything about the input is checked before OUT is made. Then, for every layer: read the experts, see what calibration
tokens do there (importance), quantize, pack pages, save, and let the calibration streams pass through the quantized
layer. Losses at the end give kappa, the sensitivity table and the default `max_bits`; the manifest comes last. A
resumed run walks through finished layers with the pages that it finds on disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.hf_reader import HFCheckpoint
from checkpoints.manifest import MANIFEST_NAME, UNITS
from checkpoints.store import moe_geometry
from checkpoints.writer import PREPARE_NAME, PreparedWriter
from pallas_kernels.bitplane_moe.layout import BITS, BlockLayout
from pwjax.anyprec.choices import KV_BLOCK_TOKENS, MAX_SLOT_WASTE, choose_lut_rows, choose_slot_words
from pwjax.anyprec.pages import UnpackedUnit, quantize_unit
from pwjax.calibration import (
    CalibrationLosses,
    CalibrationWalker,
    Kappa,
    choose_max_bits,
    default_texts,
    fit_kappa,
    load_texts,
    sensitivity,
    token_windows,
)
from pwjax.calibration.text import DEFAULT_SEED
from pwjax.cli_common import format_bytes
from pwjax.engine.tokenizer import Tokenizer
from pwjax.errors import UserError
from pwjax.prepare_progress import Bar

QUANTIZER_VERSION = 1  # a resumed run must not mix pages of two
MIN_TOKENS_PER_EXPERT = 8
SAMPLE_LAYERS = 3
SAMPLE_EXPERTS = 2


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


@dataclasses.dataclass(frozen=True)
class _CalibrationText:
    tokens: np.ndarray  # int32 [n, T]
    sha256: str
    name: str


@dataclasses.dataclass(frozen=True)
class _Choices:
    lut_rows: tuple[int, int]
    slot_words: int
    slot_waste: float

    @property
    def by_unit(self) -> dict[str, int]:
        return dict(zip(UNITS, self.lut_rows, strict=True))


@dataclasses.dataclass
class _Totals:
    """Sums over layers."""

    raw: list[np.ndarray] = dataclasses.field(default_factory=list)  # a layer: float64 [E, 2, 6]
    tokens_per_expert: list[np.ndarray] = dataclasses.field(default_factory=list)
    averaged: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (layer, expert)
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
    text = _calibration_text(options, checkpoint)
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


def host_peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _calibration_text(options: PrepareOptions, checkpoint: HFCheckpoint) -> _CalibrationText:
    """As many of the wanted windows as the text fills, at least one."""
    config = checkpoint.config
    texts = default_texts(options.seed) if options.calibration is None else load_texts(options.calibration)
    tokenizer = Tokenizer.from_folder(
        checkpoint.path, vocab_size=config.vocab_size, config_eos_ids=config.eos_token_ids
    )
    end_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    length = min(options.calibration_tokens, config.max_position_embeddings)
    own_tokens = length - (tokenizer.bos_id is not None)
    ids: dict[str, list[int]] = {}
    available = 0
    for document in texts:
        if available >= options.calibration_sequences * own_tokens:
            break
        ids[document] = tokenizer.encode(document, add_bos=False)
        available += len(ids[document]) + (end_id is not None)
    tokens = token_windows(
        (document for document in texts if document in ids),
        ids.__getitem__,
        num_sequences=min(options.calibration_sequences, max(1, available // max(1, own_tokens))),
        sequence_tokens=length,
        end_id=end_id,
        bos_id=tokenizer.bos_id,
    )
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return _CalibrationText(tokens, digest, str(options.calibration.name) if options.calibration else "default")


class _Preparation:
    """One run: the state that its steps share."""

    def __init__(
        self,
        options: PrepareOptions,
        checkpoint: HFCheckpoint,
        text: _CalibrationText,
        writer: PreparedWriter,
        log: Callable[[str], None],
    ) -> None:
        self.options, self.checkpoint, self.text, self.writer, self.log = options, checkpoint, text, writer, log
        self.config = checkpoint.config
        self.totals = _Totals()
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
        """Measured on a few experts of the first, the middle and the last layer."""
        layers = sorted({int(i) for i in np.linspace(0, self.config.num_moe_layers - 1, SAMPLE_LAYERS)})
        step = max(1, self.config.num_experts // SAMPLE_EXPERTS)
        samples: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for layer in layers:
            for unit, weights in enumerate(self.checkpoint.experts(layer)):
                samples[unit].append(weights[::step][:SAMPLE_EXPERTS].astype(np.float32))
        first, second = (choose_lut_rows(np.concatenate(sample)).chosen for sample in samples)
        return first, second

    def _moe_layer(
        self, walker: CalibrationWalker, layer: int, layouts: tuple[BlockLayout, BlockLayout], bar: Bar
    ) -> None:
        index = self.config.moe_layer_indices.index(layer)
        source = self.checkpoint.experts(index)
        experts = (jnp.asarray(source[0]), jnp.asarray(source[1]))
        if jax.default_backend() == "cpu":
            source = (np.asarray(experts[0]), np.asarray(experts[1]))  # views: one copy of the layer in memory
        statistics = walker.observe(layer, self._dense(f"model.layers.{layer}."), experts)
        if self.writer.has_layer(index):
            stats, pages = self.writer.read_layer_stats(index), self.writer.read_layer(index)
            bar.add(self.weights // self.config.num_moe_layers)
        else:
            if self.options.keep_source and not self.writer.has_source(index):
                self.writer.write_source(index, *source)
            units = [
                quantize_unit(weights, importance, layout, bar.add)
                for weights, importance, layout in zip(source, statistics.importance, layouts, strict=True)
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
        totals = self.totals
        raw = np.stack(totals.raw)
        kappa = fit_kappa(losses, raw)
        tokens_per_expert = np.stack(totals.tokens_per_expert)
        max_bits = self.options.max_bits or choose_max_bits(losses)
        self.writer.write_tables(
            {
                "sensitivity": sensitivity(kappa, raw),
                "raw_sensitivity": raw.astype(np.float32),
                "kappa": kappa.values,
                "tokens_per_expert": tokens_per_expert,
            }
        )
        quantization = {
            "weights": self.weights,
            "weights_per_second": self.weights / totals.seconds if totals.seconds else None,
            "relative_error_by_bits": {
                str(b): float(totals.error[i] / totals.power) if totals.power else 0.0 for i, b in enumerate(BITS)
            },
            "slot_bytes": 4 * choices.slot_words,
            "slot_waste": choices.slot_waste,
            "kv_block_tokens": KV_BLOCK_TOKENS,
        }
        calibration = {
            "text": self.text.name,
            "text_sha256": self.text.sha256,
            "sequences": self.text.tokens.shape[0],
            "tokens": int(self.text.tokens.size),
            "min_tokens_per_expert": MIN_TOKENS_PER_EXPERT,
            "experts_without_data": int((tokens_per_expert == 0).sum()),
            "experts_averaged": [list(pair) for pair in totals.averaged],
            **_loss_figures(losses),
        }
        kappa_figures = _kappa_figures(kappa)
        self.writer.finish(
            {
                "model": self.config.to_dict(),
                "slot_words": choices.slot_words,
                "lut_rows": choices.by_unit,
                "max_bits": max_bits,
                "source": self.options.keep_source,
                "kappa": kappa_figures,
                "quantization": quantization,
                "calibration": calibration,
            }
        )
        self._report(quantization, calibration, max_bits)
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
            "layers_quantized": totals.layers_quantized,
            "calibration": calibration,
            "kappa": kappa_figures,
        }

    def _report(self, quantization: dict[str, Any], calibration: dict[str, Any], max_bits: int) -> None:
        errors = "  ".join(f"{bits}: {error:.2g}" for bits, error in quantization["relative_error_by_bits"].items())
        few = len(calibration["experts_averaged"])
        speed = quantization["weights_per_second"]
        self.log(
            f"{self.weights:,} weights quantized" + (f", {speed:.3g} a second" if speed else "") + "; "
            f"relative squared error by bits {errors}"
        )
        self.log(
            f"calibration: {calibration['tokens']} tokens, {calibration['base_nats_per_token']:.4f} nats a token in "
            f"bf16; {max_bits} bits by default"
            + (f"; {few} experts had fewer than {MIN_TOKENS_PER_EXPERT} tokens and took their layer's mean" * (few > 0))
        )
        self.log(f"{self.options.out}: done")


def _loss_figures(losses: CalibrationLosses) -> dict[str, Any]:
    return {
        "loss_tokens": losses.num_tokens,
        "base_nats_per_token": losses.base,
        "uniform_nats_per_token": {str(bits): loss for bits, loss in losses.uniform.items()},
        "perturbed_nats_per_token": losses.perturbed.tolist(),
    }


def _kappa_figures(kappa: Kappa) -> dict[str, Any]:
    return {"values": kappa.values.tolist(), "clipped": [list(pair) for pair in kappa.clipped]}
