"""What `prepare` decides from a model's shapes and weights: how many rows share a table, and the size of a slot."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, BlockLayout
from pallas_kernels.paged_attention.layout import KVGeometry
from pwjax.anyprec.dequantize import squared_error
from pwjax.anyprec.quantizer import CHUNK_ELEMENTS_CPU, LUT_ROWS, quantize
from pwjax.config import ModelConfig

SAMPLE_ROWS = 256
"""Rows of a sampled linear-block that both forms are tried on."""
_SAMPLE_WEIGHTS = CHUNK_ELEMENTS_CPU  # the shape of the main run's batches in small models, so compiled once
_MIN_SAMPLE, _MAX_SAMPLE = 6, 32
COMPARED_BITS = BITS[:4]
"""Precisions at which serving spends its time; more than 6 bits hardly changes the loss."""

SLOT_WORDS = tuple(2**power for power in range(13, 3, -1))
"""Candidates, 32 KiB down to 64 bytes. Larger slots mean shorter tables and longer contiguous reads."""
MAX_SLOT_WASTE = 0.03
KV_BLOCK_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class LutComparison:
    """Both forms on the same weights: payload bytes a weight and relative squared error at 3..6 bits.

    Attributes:
        bytes_per_weight, errors: by `lut_rows`, float64 `[4]`.
        chosen: the form of least error at equal bytes.
    """

    bytes_per_weight: dict[int, np.ndarray]
    errors: dict[int, np.ndarray]
    chosen: int


def sample_linear_blocks(config: ModelConfig, unit: int) -> int:
    """How many linear-blocks of a unit `choose_lut_rows` should see."""
    rows, cols = config.unit_shape(unit)
    fitting = _SAMPLE_WEIGHTS // (min(rows, SAMPLE_ROWS) * cols)
    return min(max(fitting, _MIN_SAMPLE), _MAX_SAMPLE, config.num_moe_layers * config.num_experts)


def choose_lut_rows(weights: np.ndarray) -> LutComparison:
    """Least error at equal bytes, measured on a sample of the model's own linear-blocks.

    The logarithm of the error is interpolated over the bytes of pages 3..b, and averaged over the bytes that both forms
    can spend at 3 to 6 bits. Where a table a row costs more at 3 bits than a shared one at 6, the shared one wins.

    Args:
        weights: `[B, N, K]`; the first `SAMPLE_ROWS` rows are used.
    """
    weights = np.asarray(weights[:, :SAMPLE_ROWS], np.float32)
    importance = np.ones(weights.shape[::2], np.float32)
    size: dict[int, np.ndarray] = {}
    errors: dict[int, np.ndarray] = {}
    for lut_rows in LUT_ROWS:
        layout = BlockLayout(rows=weights.shape[1], cols=weights.shape[2], lut_rows=lut_rows, slot_words=1)
        size[lut_rows] = np.array([4 * layout.resident_slots(b) for b in COMPARED_BITS]) / weights[0].size
        quantized = quantize(weights, importance, lut_rows)
        sums = [squared_error(weights, quantized, b) for b in COMPARED_BITS]
        errors[lut_rows] = np.array([error.sum() / max(power.sum(), 1e-300) for error, power in sums])
    return LutComparison(size, errors, _least_error(size, errors))


def _least_error(size: dict[int, np.ndarray], errors: dict[int, np.ndarray]) -> int:
    low = max(values[0] for values in size.values())
    high = min(values[-1] for values in size.values())
    if low >= high:
        return min(size, key=lambda lut_rows: size[lut_rows][0])
    budgets = np.linspace(low, high, 32)
    logs = {
        lut_rows: np.interp(budgets, size[lut_rows], np.log(np.maximum(errors[lut_rows], 1e-300))).mean()
        for lut_rows in size
    }
    return min(logs, key=lambda lut_rows: logs[lut_rows])


def kv_geometries(config: ModelConfig, slot_words: int) -> list[KVGeometry]:
    """The bfloat16 KV blocks of each attention type that the model has."""
    windows = [sum(w == 0 for w in config.windows), sum(w > 0 for w in config.windows)]
    return [
        KVGeometry(
            num_layers=layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            slot_words=slot_words,
            block_size=KV_BLOCK_TOKENS,
        )
        for layers in windows
        if layers
    ]


def slot_waste(config: ModelConfig, lut_rows: tuple[int, int], slot_words: int) -> float:
    """Share of allocated bytes that is padding: the worst of weights at each of 3..8 bits and KV blocks of each type.

    Any mixture of them in an arena, with all experts of a unit at one precision, wastes at most this.
    """
    layouts = [
        BlockLayout(rows=rows, cols=cols, lut_rows=shared, slot_words=slot_words)
        for (rows, cols), shared in zip((config.unit_shape(0), config.unit_shape(1)), lut_rows, strict=True)
    ]
    wastes = []
    for bits in BITS:
        payload = sum(layout.page_words(b) for layout in layouts for b in BITS if b <= bits)
        wastes.append(1 - payload / (slot_words * sum(layout.resident_slots(bits) for layout in layouts)))
    wastes += [1 - kv.block_words / (slot_words * kv.block_slots) for kv in kv_geometries(config, slot_words)]
    return max(wastes)


def choose_slot_words(config: ModelConfig, lut_rows: tuple[int, int]) -> tuple[int, float]:
    """The largest slot that wastes at most 3%, or the least wasteful one where none does; and its waste."""
    wastes = {words: slot_waste(config, lut_rows, words) for words in SLOT_WORDS}
    within = [words for words in SLOT_WORDS if wastes[words] <= MAX_SLOT_WASTE]
    chosen = within[0] if within else min(SLOT_WORDS, key=lambda words: wastes[words])
    return chosen, wastes[chosen]
