"""The least that a step must read, and the least time that takes: pure arithmetic, no device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from pwjax.config import ModelConfig
from pwjax.models.loading import dense_weight_shapes

BF16_BYTES = 2
EMBEDDING = "model.embed_tokens.weight"


def linear_block_bytes(rows: int, cols: int, lut_rows: int, bits: int) -> float:
    """What a product with one linear-block `[N, K]` at `bits` reads: planes, its own table, row scales."""
    planes = rows * cols * bits / 8
    table = math.ceil(rows / lut_rows) * 2**bits * 2
    return planes + table + 4 * rows


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that a decode step must read."""

    dense: float
    kv: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.kv + self.experts


def dense_bytes(config: ModelConfig, tokens: int) -> float:
    """All dense weights once, in bf16; of the embedding only the rows of `tokens`, unless it is the head too."""
    shapes = dense_weight_shapes(config)
    weights = sum(math.prod(shape) for name, shape in shapes.items() if name != EMBEDDING)
    weights += (config.vocab_size if config.tie_word_embeddings else tokens) * config.hidden_size
    return weights * BF16_BYTES


def kv_bytes(config: ModelConfig, contexts: Iterable[int]) -> float:
    """Keys and values in bf16 of sequences with `contexts` tokens, as far as each layer's window reaches."""
    a_token = 2 * config.num_kv_heads * config.head_dim * BF16_BYTES
    return a_token * sum(min(n, window) if window else n for n in contexts for window in config.windows)


def expert_bytes(config: ModelConfig, chosen: np.ndarray, bits: np.ndarray | None, lut_rows: dict[str, int]) -> float:
    """Routed experts that were chosen, each once.

    Args:
        chosen: `[L, E]`, how often (0 or 1, or a probability) an expert's weights are read.
        bits: int `[L, E, 2]`; None for dense bf16.
        lut_rows: by unit name.
    """
    total = 0.0
    for unit, shared in enumerate(lut_rows.values()):
        rows, cols = config.unit_shape(unit)
        if bits is None:
            total += float(chosen.sum()) * rows * cols * BF16_BYTES
        else:
            sizes = np.array([linear_block_bytes(rows, cols, shared, b) for b in range(9)])
            total += float((chosen * sizes[bits[..., unit]]).sum())
    return total


def traffic_bits(config: ModelConfig, chosen: np.ndarray, bits: np.ndarray) -> float:
    """Mean bits of the weights that were read; arguments as `expert_bytes`."""
    weights = np.array([math.prod(config.unit_shape(unit)) for unit in range(2)])
    read = chosen[..., None] * weights
    return float((read * bits).sum() / read.sum())


def expected_distinct(num_experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens choose, if each chooses `top_k` at random."""
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Multiplications and additions of a prompt: dense and routed weights, causal attention, logits of one token."""
    shapes = dense_weight_shapes(config)
    ends = {EMBEDDING, "lm_head.weight"}
    dense = sum(math.prod(shape) for name, shape in shapes.items() if name not in ends and len(shape) == 2)
    unit_weights = sum(math.prod(config.unit_shape(unit)) for unit in range(2))
    routed = config.num_moe_layers * config.num_experts_per_tok * unit_weights
    seen = sum(_keys_seen(tokens, window) for window in config.windows)
    attention = 2 * seen * config.num_heads * config.head_dim
    return 2.0 * (tokens * (dense + routed) + attention + config.vocab_size * config.hidden_size)


def _keys_seen(tokens: int, window: int) -> int:
    """Keys that the queries of a prompt see, added up, in one layer."""
    reach = min(tokens, window) if window else tokens
    return reach * (reach + 1) // 2 + (tokens - reach) * reach
