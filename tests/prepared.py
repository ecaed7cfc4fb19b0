"""Prepared stores of tiny random models, written directly: no calibration, every linear-block's squared error as its
sensitivity. `reference` is the Hugging Face model with exactly the weights that were stored.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.hf_reader import HFCheckpoint
from checkpoints.store import Manifest, PreparedWriter, moe_geometry
from pallas_kernels.bitplane_moe.layout import BITS, BlockLayout, pack_page
from pwjax.anyprec import dequantize, quantize
from tests.hf_models import save_tiny_checkpoint

LUT_ROWS = 32
SLOT_WORDS = 64


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A store and the torch model it was made from."""

    path: Path
    source: Path
    reference: Any


def prepare_tiny(folder: Path, family: str, seed: int = 0, *, pages: bool = True, **overrides: Any) -> Prepared:
    """Writes a Hugging Face folder and the store of it.

    Args:
        folder: new; gets `hf/` and `out/`.
        pages: False writes zeros in place of pages, which is enough for method bf16 and quick.
        overrides: fields of `config.json`.
    """
    source, out = folder / "hf", folder / "out"
    reference = save_tiny_checkpoint(source, family, seed, **overrides)
    checkpoint = HFCheckpoint(source)
    checkpoint.validate()
    config = checkpoint.config
    lut_rows = {"gate_up": LUT_ROWS, "down": LUT_ROWS}
    geometry = moe_geometry(config, lut_rows, SLOT_WORDS)
    sensitivity = np.ones((config.num_moe_layers, config.num_experts, 2, len(BITS)), np.float32)
    with PreparedWriter(out, checkpoint.fingerprint(), num_moe_layers=config.num_moe_layers) as writer:
        writer.copy_files(checkpoint.tokenizer_files())
        writer.write_dense(checkpoint.dense())
        for layer in range(config.num_moe_layers):
            experts = checkpoint.experts(layer)
            stored = {}
            for unit, (name, layout) in enumerate((("gate_up", geometry.gate_up), ("down", geometry.down))):
                weights = experts[unit].astype(np.float32)
                if pages:
                    stored[name], sensitivity[layer, :, unit] = _quantized(weights, layout)
                else:
                    stored[name] = {
                        b: np.zeros((len(weights), layout.page_slots(b) * SLOT_WORDS), np.uint32) for b in BITS
                    }
            writer.write_source(layer, *experts)
            writer.write_layer_stats(layer, {})
            writer.write_layer(layer, stored)
        tokens = np.ones((config.num_moe_layers, config.num_experts), np.int64)
        kappa = np.ones((config.num_moe_layers, 2), np.float32)
        writer.write_tables({"sensitivity": sensitivity, "tokens_per_expert": tokens, "kappa": kappa})
        writer.finish(
            Manifest(model=config.to_dict(), slot_words=SLOT_WORDS, lut_rows=lut_rows, max_bits=6, source=True)
        )
    return Prepared(out, source, reference)


def _quantized(weights: np.ndarray, layout: BlockLayout) -> tuple[dict[int, np.ndarray], np.ndarray]:
    """Pages by bits, and squared errors `[E, 6]`."""
    quantized = quantize(weights, np.ones((weights.shape[0], weights.shape[2]), np.float32), layout.lut_rows)
    indices, scale = np.asarray(quantized.indices), np.asarray(quantized.row_scale)
    pages = {b: pack_page(layout, b, indices, np.asarray(quantized.luts[b]), scale) for b in BITS}
    errors = [((np.asarray(dequantize(quantized, b)) - weights) ** 2).sum((1, 2)) for b in BITS]
    return pages, np.stack(errors, axis=1)
