"""`bitplane_moe` on its own: one matrix, or all of a layer, over pages that are new to the cache at every call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.manifest import UNITS
from checkpoints.store import moe_geometry
from pallas_kernels.bitplane_moe import reference
from pallas_kernels.bitplane_moe.api import bitplane_moe, resolve_implementation
from pallas_kernels.bitplane_moe.layout import MAX_BITS, MIN_BITS, BlockLayout
from pallas_kernels.platform import Implementation
from pwjax.anyprec.choices import choose_slot_words
from pwjax.bench import floors
from pwjax.bench.blocks import RandomBlocks, scattered
from pwjax.bench.calls import Ceilings, Work, check_and_time, distinct_calls, figures
from pwjax.bench.synthetic import distinct_blocks
from pwjax.config import ModelConfig

MATMUL_SLOT_WORDS = 8192
Bits = int | Literal["mixed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEBench:
    """What to measure: a row for each of `bits` and `tokens`.

    Attributes:
        max_bits: highest precision that the kernel is compiled for; None takes each row's own.
    """

    bits: Sequence[Bits]
    tokens: Sequence[int]
    lut_rows: int
    ceilings: Ceilings
    max_bits: int | None = None
    implementation: Implementation = "auto"
    seed: int = 0

    def compiled_bits(self, bits: Bits) -> int:
        return self.max_bits or _highest(bits)


def bench_matmul(rows: int, cols: int, bench: MoEBench) -> Iterator[dict[str, Any]]:
    """One matrix `[rows, cols]` by `tokens` activations; `bits` are numbers."""
    lut_rows, bits = bench.lut_rows, [_highest(b) for b in bench.bits]
    matmul = _matmul_entry(bench.implementation)
    layout = BlockLayout(rows=rows, cols=cols, lut_rows=lut_rows, slot_words=MATMUL_SLOT_WORDS)
    rng = np.random.default_rng(bench.seed)
    blocks = RandomBlocks.draw(rng, layout, 1, max(bits))
    for b in bits:
        block_bytes = floors.linear_block_bytes(rows, cols, lut_rows, b)
        calls = distinct_calls(block_bytes, least=8)
        arena, (slots,) = scattered(rng, [blocks], np.full((calls, 1, 1), b))
        for count in bench.tokens:
            operands = [(_activations(rng, count, cols), slots[i, 0], jnp.int32(b)) for i in range(calls)]
            expected = _matmul_f32(operands[0][0], blocks.weights(0, b))
            op = functools.partial(matmul, layout=layout, max_bits=bench.compiled_bits(b))
            result = check_and_time(op, operands, arena, expected)
            work = Work(
                bytes=block_bytes + count * (2 * cols + 4 * rows),
                flops=2.0 * count * rows * cols,
                decoded_weights=rows * cols,
            )
            yield {
                "n": rows,
                "k": cols,
                "bits": b,
                "tokens": count,
                "lut_rows": lut_rows,
                **figures(result, work, bench.ceilings),
            }


def bench_layer(config: ModelConfig, bench: MoEBench) -> Iterator[dict[str, Any]]:
    """All routed experts of a layer, random routing.

    Every call has pages of its own, as the layers of a model have. `mixed` draws 3..8 bits for every linear-block.
    """
    layer = _LayerBench(config, bench)
    for bits in bench.bits:
        yield from layer.rows(bits)


class _LayerBench:
    def __init__(self, config: ModelConfig, bench: MoEBench) -> None:
        self.config, self.bench, self.rng = config, bench, np.random.default_rng(bench.seed)
        lut_rows, page_bits = bench.lut_rows, max(map(_highest, bench.bits))
        slot_words, _ = choose_slot_words(config, (lut_rows, lut_rows))
        self.geometry = moe_geometry(config, dict.fromkeys(UNITS, lut_rows), slot_words)
        self.lut_rows: dict[str, int] = dict.fromkeys(UNITS, lut_rows)
        self.units = [
            RandomBlocks.draw(self.rng, layout, min(distinct_blocks(layout), config.num_experts), page_bits)
            for layout in (self.geometry.gate_up, self.geometry.down)
        ]

    def rows(self, bits: Bits) -> Iterator[dict[str, Any]]:
        """A row for each number of tokens; all share an arena."""
        top_k, experts = self.config.num_experts_per_tok, self.config.num_experts
        least = np.full((1, top_k, 2), MIN_BITS if bits == "mixed" else bits)
        layers = distinct_calls(self._bytes(np.ones((1, top_k)), least), least=2)
        if bits == "mixed":
            layer_bits = self.rng.integers(MIN_BITS, MAX_BITS + 1, (layers, experts, 2))
        else:
            layer_bits = np.full((layers, experts, 2), bits)
        arena, tables = scattered(self.rng, self.units, layer_bits)
        for count in self.bench.tokens:
            yield self._measure(bits, count, layer_bits, arena, tables)

    def _measure(self, bits: Bits, tokens: int, layer_bits: np.ndarray, arena, tables) -> dict[str, Any]:
        config, rng = self.config, self.rng
        experts, top_k = config.num_experts, config.num_experts_per_tok
        layers = len(layer_bits)
        ids = [_route(rng, tokens, experts, top_k) for _ in range(layers)]
        chosen = np.stack([np.isin(np.arange(experts), layer_ids) for layer_ids in ids]).astype(float)
        read = self._bytes(chosen, layer_bits) / layers
        layers = min(layers, distinct_calls(read, least=2))
        weights = [rng.uniform(0.05, 0.5, (tokens, top_k)).astype(np.float32) for _ in range(layers)]
        calls = [
            (
                _activations(rng, tokens, config.hidden_size),
                jnp.asarray(ids[i]),
                jnp.asarray(weights[i]),
                jnp.concatenate([table[i : i + 1] for table in tables], axis=2),
                jnp.asarray(layer_bits[i : i + 1], jnp.int32),
            )
            for i in range(layers)
        ]
        expected = _expected_layer(calls[0][0], ids[0], weights[0], self.units, layer_bits[0])
        max_bits = self.bench.compiled_bits(bits)
        static = dict(
            layer=0,
            geometry=dataclasses.replace(self.geometry, max_bits=max_bits),
            implementation=self.bench.implementation,
        )
        result = check_and_time(lambda *operands: bitplane_moe(*operands, **static)[0], calls, arena, expected)
        an_expert = sum(unit.layout.rows * unit.layout.cols for unit in self.units)
        distinct = float(chosen.sum()) / len(chosen)
        work = Work(
            bytes=read + 4 * tokens * config.hidden_size,
            flops=2.0 * tokens * top_k * an_expert,
            decoded_weights=distinct * an_expert,
        )
        fields = dict(
            bits=bits, max_bits=max_bits, tokens=tokens, lut_rows=self.bench.lut_rows, experts=experts, top_k=top_k
        )
        shape = dict(hidden=config.hidden_size, inner=config.moe_intermediate_size, distinct_experts=distinct)
        return {**fields, **shape, **figures(result, work, self.bench.ceilings)}

    def _bytes(self, chosen: np.ndarray, bits: np.ndarray) -> float:
        return floors.expert_bytes(self.config, chosen, bits, self.lut_rows)


def _highest(bits: Bits) -> int:
    return MAX_BITS if bits == "mixed" else bits


def _route(rng: np.random.Generator, tokens: int, experts: int, top_k: int) -> np.ndarray:
    """int32 `[tokens, top_k]`, distinct for each token."""
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)


def _activations(rng: np.random.Generator, tokens: int, width: int) -> jax.Array:
    """bfloat16 `[tokens, width]`, with an outlier channel as trained models have."""
    x = rng.standard_normal((tokens, width), np.float32)
    x[:, 0] *= 30
    return jnp.asarray(x, jnp.bfloat16)


def _matmul_entry(implementation: Implementation) -> Callable[..., jax.Array]:
    """`(x [T, K], slots [total_slots], bits, arena, *, layout, max_bits) -> [T, N]`."""
    if resolve_implementation(implementation) == "xla":
        return lambda x, slots, bits, arena, *, layout, max_bits: _matmul_f32(
            x, reference.decode_block(slots, bits, arena, layout)
        )
    from pallas_kernels.bitplane_moe import triton  # the backend is optional and deprecated: load it when it is used

    return triton.matmul


def _matmul_f32(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), weights.T, precision=jax.lax.Precision.HIGHEST)


def _expected_layer(x, ids: np.ndarray, weights: np.ndarray, units: list[RandomBlocks], bits: np.ndarray) -> jax.Array:
    """float32 `[T, H]` from dense weights, an expert at a time."""
    y = jnp.zeros((x.shape[0], units[1].layout.rows), jnp.float32)
    for expert in np.unique(ids):
        gate_up, down = (unit.weights(expert % len(unit.indices), int(bits[expert, u])) for u, unit in enumerate(units))
        gate, up = jnp.split(_matmul_f32(x, gate_up), 2, axis=1)
        share = np.where(ids == expert, weights, 0).sum(axis=1)
        y += jnp.asarray(share)[:, None] * _matmul_f32(jax.nn.silu(gate) * up, down)
    return y
