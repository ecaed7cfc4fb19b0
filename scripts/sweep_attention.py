#!/usr/bin/env python3
"""Times `paged_attention` on this device: shapes, candidate configurations, and a sweep of them.

    python scripts/sweep_attention.py [decode] [prefill]

prints one JSON line a measurement. A timed function is a chain of layers, each with keys and values of its own, so that
none are left in the L2 cache from the call before.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.configs import Config
from pallas_kernels.paged_attention.layout import KVGeometry
from pwjax.bench.timing import median_seconds

_ROTATED_BYTES = 512 * 2**20  # keys and values a timed function reads at least: several times an L2 cache
_LEAST_CALLS = 8

DECODE_CONFIGS = [
    Config(body="vector", splits=16),
    Config(body="vector", splits=32),
    Config(body="vector", splits=64),
    Config(body="vector", splits=32, block_keys=32),
    Config(body="vector", splits=64, block_keys=32),
    Config(body="vector", splits=32, team_words=32),
    Config(body="vector", splits=32, block_keys=128, num_warps=8),
    Config(body="matrix", splits=16, block_rows=16, num_stages=3),
    Config(body="matrix", splits=32, block_rows=16),
    Config(body="matrix", splits=32, block_rows=16, num_stages=2),
    Config(body="matrix", splits=32, block_rows=16, num_stages=3),
    Config(body="matrix", splits=64, block_rows=16, num_stages=3),
    Config(body="matrix", splits=64, block_rows=16, block_keys=32, num_stages=3),
]
PREFILL_CONFIGS = [
    Config(body="matrix", block_rows=128, num_warps=8),
    Config(body="matrix", block_rows=128, num_warps=8, num_stages=2),
    Config(body="matrix", block_rows=128, num_warps=8, num_stages=3),
    Config(body="matrix", block_rows=128, num_warps=8, block_keys=128),
    Config(body="matrix", block_rows=64, num_stages=1),
    Config(body="matrix", block_rows=64, num_stages=2),
    Config(body="matrix", block_rows=64, num_stages=3),
    Config(body="matrix", block_rows=64, block_keys=32, num_stages=2),
    Config(body="matrix", block_rows=64, block_keys=128),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A call: `queries` of each sequence, the last ones of `context` tokens; tables have room for `max_context`."""

    batch: int = 1
    context: int = 2048
    queries: int = 1
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    max_context: int = 0
    window: int = 0
    slot_words: int = 4096
    dtype: str = "bfloat16"

    @property
    def read_bytes(self) -> int:
        """Of keys and values, each read once."""
        seen = min(self.context, self.window + self.queries - 1) if self.window else self.context
        return self.batch * seen * self.kv_heads * self.head_dim * 2 * 2

    @property
    def flops(self) -> int:
        pairs = self.queries * (2 * self.context - self.queries + 1) // 2
        if self.window:
            pairs = min(pairs, self.queries * self.window)
        return 4 * self.batch * pairs * self.heads * self.head_dim

    @property
    def geometry(self) -> KVGeometry:
        layer_bytes = self.batch * self.context * self.kv_heads * self.head_dim * 2 * 2
        layers = max(_LEAST_CALLS, -(-_ROTATED_BYTES // layer_bytes))
        return KVGeometry(
            num_layers=layers, num_kv_heads=self.kv_heads, head_dim=self.head_dim, slot_words=self.slot_words
        )


DECODE_SHAPES = [
    *(Shape(batch=batch, context=context) for batch, context in ((1, 2048), (1, 32768), (4, 2048), (32, 2048))),
    Shape(batch=2, context=2048, max_context=32768),
    *(Shape(context=context, heads=32, kv_heads=8) for context in (2048, 32768)),
    Shape(context=32768, heads=64, kv_heads=8),
]
PREFILL_SHAPES = [
    *(Shape(context=tokens, queries=tokens) for tokens in (512, 4096, 8192)),
    Shape(context=4096, queries=4096, heads=32, kv_heads=8),
    Shape(context=32768, queries=256),
]


def operands(shape: Shape) -> tuple[jax.Array, ...]:
    """Arguments of `timed`, in its order: random finite keys and values in slots that lie in random order."""
    geometry, rng = shape.geometry, np.random.default_rng(0)
    blocks = -(-shape.context // geometry.block_size)
    used = shape.batch * blocks * geometry.block_slots
    room = -(-max(shape.max_context, shape.context) // geometry.block_size)
    table = np.zeros((shape.batch, room, geometry.block_slots), np.int32)
    table[:, :blocks] = 1 + rng.permutation(used).reshape(shape.batch, blocks, geometry.block_slots)
    # Random signs and mantissas, and exponents that make all elements 0.5 to 1.
    words = lambda: jax.random.bits(jax.random.key(0), (used + 1, shape.slot_words), jnp.uint32)  # noqa: E731
    arena = jax.jit(lambda: (words() & jnp.uint32(0x807F807F)) | jnp.uint32(0x3F003F00))()
    q = jnp.asarray(rng.normal(size=(shape.batch, shape.queries, shape.heads, shape.head_dim)), shape.dtype)
    rows = np.arange(shape.batch, dtype=np.int32)
    length = np.full_like(rows, shape.queries)
    return q, arena, *map(jnp.asarray, (table, rows, shape.context - length, length))


def timed(shape: Shape, config: Config | None = None) -> Callable[..., Any]:
    """A function to jit: `geometry.num_layers` calls, each on the output before it; returns the first and the last."""
    geometry = shape.geometry
    options: dict[str, Any] = dict(geometry=geometry, scale=shape.head_dim**-0.5, window=shape.window, config=config)

    def chain(q, *place):
        outputs = [q]
        for layer in range(geometry.num_layers):
            outputs.append(triton.paged_attention(outputs[-1], *place, layer=layer, **options))
        return outputs[1], outputs[-1]

    return chain


def sweep(shape: Shape, configs: Sequence[Config | None]) -> Iterator[dict[str, Any]]:
    """One record a configuration; `None` is the default one. `error` is the largest difference from the first."""
    arguments = operands(shape)
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(functools.partial(_compile, shape, arguments), configs))
    first = None
    for config, function in zip(configs, compiled, strict=True):
        record = {"shape": _changed(shape), "config": _changed(config) if config else "default"}
        if isinstance(function, Exception):
            yield record | {"failure": f"{type(function).__name__}: {str(function)[:200]}"}
            continue
        out = np.asarray(function(*arguments)[0], np.float32)
        first = out if first is None else first
        us = 1e6 * median_seconds(functools.partial(function, *arguments), calls=4) / shape.geometry.num_layers
        yield record | {
            "us": round(us, 2),
            "tb_s": round(shape.read_bytes / us / 1e6, 3),
            "tflop_s": round(shape.flops / us / 1e6, 1),
            "error": float(np.abs(out - first).max() / np.abs(first).max()),
        }


def _compile(shape: Shape, arguments, config: Config | None):
    try:
        return jax.jit(timed(shape, config)).lower(*arguments).compile()
    except Exception as error:  # one that does not fit the device leaves the others to be measured
        return error


def _changed(values: Any) -> str:
    changed = (f for f in dataclasses.fields(values) if getattr(values, f.name) != f.default)
    return " ".join(f"{f.name}={getattr(values, f.name)}" for f in changed)


def main(kinds: Sequence[str]) -> None:
    for kind, shapes, configs in (
        ("decode", DECODE_SHAPES, DECODE_CONFIGS),
        ("prefill", PREFILL_SHAPES, PREFILL_CONFIGS),
    ):
        for shape in shapes if not kinds or kind in kinds else []:
            for record in sweep(shape, [None, *configs]):
                print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
