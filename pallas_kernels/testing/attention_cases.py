"""Random sequences whose KV blocks are scattered over a poisoned arena, and their attention in float64 NumPy.

The oracle reads the arena back word by word, by the layout's words and not by the code under test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.testing.moe_cases import GARBAGE_SLOT, POISON, round_to


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """Shapes of one call; `starts` and `lengths` are per sequence, length 0 is padding.

    `interpreted` cases also run through the interpreted kernel where there is no GPU (seconds of compilation each).
    """

    queries: int = 1
    starts: tuple[int, ...] = (0, 5, 31, 40)
    lengths: tuple[int, ...] = (1, 1, 1, 1)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 2
    layer: int = 1
    slot_words: int = 128
    block_size: int = 16
    kv_dtype: str = "float32"
    dtype: str = "float32"
    window: int = 0
    interpreted: bool = False
    seed: int = 0

    def __str__(self) -> str:
        changed = (
            f for f in dataclasses.fields(self) if f.name != "interpreted" and getattr(self, f.name) != f.default
        )
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed).replace(" ", "") or "default"

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            slot_words=self.slot_words,
            block_size=self.block_size,
            dtype=self.kv_dtype,  # type: ignore[arg-type]
        )


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    case: AttentionCase
    q: np.ndarray
    k: list[np.ndarray]  # of every sequence, [context, kv_heads, D] up to the end of its chunk
    v: list[np.ndarray]
    arena: np.ndarray
    kv_table: np.ndarray
    rows: np.ndarray
    start: np.ndarray
    length: np.ndarray


def build(case: AttentionCase) -> AttentionInputs:
    """An arena that holds exactly the visible keys and values; all else in it and in the tables is poison."""
    rng = np.random.default_rng(case.seed)
    geometry, sequences = case.geometry, len(case.starts)
    contexts = [start + length if length else 0 for start, length in zip(case.starts, case.lengths, strict=True)]
    max_blocks = max(-(-max(contexts) // case.block_size), 1) + 1
    num_slots = sequences * max_blocks * geometry.block_slots + 5
    arena = np.full((num_slots, case.slot_words), POISON, np.uint32)
    table = np.full((sequences + 2, max_blocks, geometry.block_slots), GARBAGE_SLOT, np.int32)
    rows = rng.permutation(sequences + 2)[:sequences].astype(np.int32)
    free = list(rng.permutation(np.arange(1, num_slots)))
    keys, values = [], []
    for number, context in enumerate(contexts):
        k, v = (round_to(rng.normal(size=(context, case.kv_heads, case.head_dim)), case.kv_dtype) for _ in "kv")
        keys.append(k)
        values.append(v)
        oldest = max(case.starts[number] - case.window + 1, 0) if case.window else 0
        for block in range(oldest // case.block_size, -(-context // case.block_size)):
            table[rows[number], block] = [free.pop() for _ in range(geometry.block_slots)]
        for position in range(oldest, context):
            for side, tensor in enumerate((k, v)):
                store_row(arena, geometry, table[rows[number]], case.layer, side, position, tensor[position])
        if not context:
            rows[number] = len(table)
    q = round_to(rng.normal(size=(sequences, case.queries, case.heads, case.head_dim)), case.dtype)
    start, length = np.array(case.starts, np.int32), np.array(case.lengths, np.int32)
    return AttentionInputs(case, q, keys, values, arena, table, rows, start, length)


def row_words(values: np.ndarray, dtype: str) -> np.ndarray:
    """uint32 words of one token's keys or values `[kv_heads, D]`, by the rule in `layout.py`."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if dtype == "float32":
        return bits.reshape(-1)
    half = values.shape[-1] // 2
    return ((bits[:, :half] >> 16) | (bits[:, half:] & 0xFFFF0000)).reshape(-1)


def store_row(arena, geometry: KVGeometry, blocks, layer: int, side: int, position: int, values: np.ndarray) -> None:
    """Writes one row word by word."""
    for column, word in enumerate(row_words(values, geometry.dtype)):
        block, token = divmod(position, geometry.block_size)
        flat = ((layer * 2 + side) * geometry.block_size + token) * geometry.row_words + column
        slot, offset = divmod(flat, geometry.slot_words)
        arena[blocks[block, slot], offset] = word


def expected(inputs: AttentionInputs, scale: float) -> np.ndarray:
    """float64 attention; zeros where a query is not real."""
    case, out = inputs.case, np.zeros(inputs.q.shape)
    group = case.heads // case.kv_heads
    for sequence, (start, length) in enumerate(zip(case.starts, case.lengths, strict=True)):
        for query in range(length):
            position = start + query
            first = max(position - case.window + 1, 0) if case.window else 0
            k = inputs.k[sequence][first : position + 1].astype(np.float64).repeat(group, axis=1)
            v = inputs.v[sequence][first : position + 1].astype(np.float64).repeat(group, axis=1)
            scores = np.einsum("hd,thd->ht", inputs.q[sequence, query].astype(np.float64), k) * scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[sequence, query] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    return out


_PREFILL: dict[str, Any] = dict(queries=20, starts=(0, 7, 33, 0), lengths=(20, 13, 1, 0))
TAILS = [
    AttentionCase(),
    AttentionCase(lengths=(1, 0, 1, 1), interpreted=True, seed=1),
    AttentionCase(lengths=(0, 0, 0, 0), interpreted=True, seed=2),
    AttentionCase(heads=6, kv_heads=6, head_dim=24, kv_dtype="bfloat16", interpreted=True, seed=3),
    AttentionCase(heads=6, kv_heads=2, head_dim=64, slot_words=100, interpreted=True, seed=4),  # rows straddle slots
    AttentionCase(heads=8, kv_heads=1, head_dim=128, kv_dtype="bfloat16", slot_words=256, layer=0, seed=5),
    AttentionCase(heads=2, kv_heads=1, head_dim=256, kv_dtype="bfloat16", interpreted=True, seed=6),
    AttentionCase(starts=(300,), lengths=(1,), kv_dtype="bfloat16", seed=7),
    AttentionCase(starts=(200, 17, 0), lengths=(1, 1, 1), window=20, interpreted=True, seed=8),
    AttentionCase(starts=(90, 15, 16), lengths=(1, 1, 1), window=1, seed=9),
    AttentionCase(block_size=8, slot_words=64, seed=10),
    AttentionCase(**_PREFILL, seed=11),
    AttentionCase(
        **_PREFILL, kv_dtype="bfloat16", heads=6, kv_heads=2, head_dim=40, slot_words=96, interpreted=True, seed=12
    ),
    AttentionCase(**_PREFILL, window=9, seed=13),
    AttentionCase(
        queries=70, starts=(130, 3), lengths=(70, 41), heads=3, kv_heads=1, layers=1, layer=0, interpreted=True, seed=14
    ),
    AttentionCase(
        queries=40, starts=(150, 60), lengths=(40, 40), window=33, kv_dtype="bfloat16", interpreted=True, seed=15
    ),
    AttentionCase(dtype="bfloat16", kv_dtype="bfloat16", seed=16),
    AttentionCase(**_PREFILL, dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, interpreted=True, seed=17),
]
