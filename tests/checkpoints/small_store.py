"""Prepares a small store from fixed numbers, without quantizing anything. As a script, it kills itself on the way:

    python -m tests.checkpoints.small_store OUT EVENT SUFFIX

sends itself SIGKILL when the audit event EVENT (`os.rename`, `os.mkdir`, ..) names a path that ends with SUFFIX.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.store import PreparedModel, PreparedWriter, moe_geometry
from pwjax.config import ModelConfig
from tests.checkpoints.hf_folders import QWEN2_MOE

CONFIG = ModelConfig.from_hf(QWEN2_MOE)
LUT_ROWS = {"gate_up": 32, "down": 1}
SLOT_WORDS = 16
GEOMETRY = moe_geometry(CONFIG, LUT_ROWS, SLOT_WORDS)
FINGERPRINT = {"source": "abc", "lut_rows": "auto", "bits": (3, 8)}
MANIFEST = {
    "model": CONFIG.to_dict(),
    "slot_words": SLOT_WORDS,
    "lut_rows": LUT_ROWS,
    "max_bits": 6,
    "source": True,
    "quantization": {"relative_error_by_bits": {"3": np.float32(0.25)}},
    "calibration": {"text_sha256": "0" * 64, "tokens": 10},
}


def pages(layer: int) -> dict[str, dict[int, np.ndarray]]:
    rng = np.random.default_rng(layer)
    return {
        unit: {
            bits: rng.integers(0, 2**32, (CONFIG.num_experts, layout.page_slots(bits) * SLOT_WORDS), dtype=np.uint32)
            for bits in range(3, 9)
        }
        for unit, layout in (("gate_up", GEOMETRY.gate_up), ("down", GEOMETRY.down))
    }


def experts(layer: int) -> tuple[np.ndarray, np.ndarray]:
    """float32, so that the store has to round."""
    rng = np.random.default_rng(100 + layer)
    shapes = [(CONFIG.num_experts, *CONFIG.unit_shape(unit)) for unit in (0, 1)]
    return rng.standard_normal(shapes[0], np.float32), rng.standard_normal(shapes[1], np.float32)


def dense() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(200)
    names = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight")
    return {
        name: rng.standard_normal((5 + i, 7), np.float32).astype(ml_dtypes.bfloat16) for i, name in enumerate(names)
    }


def tables() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(300)
    return {
        "sensitivity": rng.random((CONFIG.num_moe_layers, CONFIG.num_experts, 2, 6), np.float32),
        "tokens_per_expert": np.arange(6, dtype=np.int64).reshape(2, 3),
        "kappa": np.float32(2.5),
    }


def write_layer(writer: PreparedWriter, layer: int) -> None:
    writer.write_source(layer, *experts(layer))
    writer.write_layer(layer, pages(layer))
    writer.write_layer_stats(layer, {"importance": np.full((2, 3), layer, np.float32), "tokens": 7})


def prepare(out: Path, source_folder: Path) -> list[int]:
    """Prepares or resumes; returns the layers that this run wrote."""
    written = []
    with PreparedWriter(out, FINGERPRINT, num_moe_layers=CONFIG.num_moe_layers) as writer:
        writer.copy_files([source_folder / "config.json"])
        if not writer.has_dense():
            writer.write_dense(dense())
        for layer in range(CONFIG.num_moe_layers):
            if not writer.has_layer(layer):
                write_layer(writer, layer)
                written.append(layer)
        writer.write_tables(tables())
        writer.finish(MANIFEST)
    return written


def writer_for(out: Path, fingerprint: Any = FINGERPRINT, **options: Any) -> PreparedWriter:
    return PreparedWriter(out, fingerprint, num_moe_layers=CONFIG.num_moe_layers, **options)


def equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_contents(out: Path, parts: str | tuple[str, ...] = ("layers", "source", "dense", "tables")):
    """Every array of the parts is bit-equal to what was written."""
    model = PreparedModel(out)
    for layer in range(CONFIG.num_moe_layers):
        if "layers" in parts:
            read, given = model.load_layer(layer), pages(layer)
            assert {unit: sorted(read[unit]) for unit in read} == {unit: sorted(given[unit]) for unit in given}
            assert all(equal(read[unit][bits], given[unit][bits]) for unit in given for bits in given[unit])
        if "source" in parts:
            for weight, rounded in zip(model.load_source(layer), experts(layer), strict=True):
                assert equal(weight, rounded.astype(ml_dtypes.bfloat16))
    for part, load, given in (("dense", model.load_dense, dense()), ("tables", model.tables, tables())):
        if part in parts:
            arrays = load()
            assert arrays.keys() == given.keys()
            assert all(equal(arrays[name], np.asarray(value)) for name, value in given.items())


def kill_at(event: str, suffix: str) -> None:
    def hook(name: str, arguments: tuple[object, ...]) -> None:
        if name == event and any(isinstance(a, str | Path) and str(a).endswith(suffix) for a in arguments):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    out_folder, kill_event, kill_suffix = sys.argv[1:4]
    kill_at(kill_event, kill_suffix)
    prepare(Path(out_folder), Path(out_folder).parent / "hf")
