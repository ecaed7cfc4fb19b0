"""`paged_attention` on its own: decode and chunks of prefill over scattered KV blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.platform import Implementation
from pallas_kernels.testing.moe_cases import GARBAGE_SLOT, POISON
from pwjax.anyprec.choices import KV_BLOCK_TOKENS, choose_slot_words
from pwjax.bench import floors
from pwjax.bench.blocks import SPARE_SLOTS
from pwjax.bench.calls import Ceilings, Work, check_and_time, distinct_calls, figures
from pwjax.config import ModelConfig


def bench_attention(
    config: ModelConfig,
    *,
    batches: Iterable[int],
    contexts: Iterable[int],
    queries: int,
    ceilings: Ceilings,
    implementation: Implementation = "auto",
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """One layer's attention in bfloat16; a row for each of `batches` and `contexts`.

    Args:
        contexts: tokens that the last query of every sequence sees; at least `queries`.
        queries: 1 is decode, more is a chunk of prefill.
    """
    rng = np.random.default_rng(seed)
    slot_words, _ = choose_slot_words(config, (1, 1))
    # One layer a block, and blocks of its own for every call: as much to read as in a model, in less memory.
    geometry = KVGeometry(
        num_layers=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        slot_words=slot_words,
        block_size=KV_BLOCK_TOKENS,
    )
    static: dict[str, Any] = dict(layer=0, geometry=geometry, scale=config.head_dim**-0.5)
    op = functools.partial(paged_attention, implementation=implementation, **static)
    oracle = jax.jit(functools.partial(reference.paged_attention, window=0, **static))
    for batch in batches:
        for context in contexts:
            yield _measure(config, geometry, op, oracle, batch, context, queries, ceilings, rng)


def _measure(
    config: ModelConfig,
    geometry: KVGeometry,
    op: Callable[..., jax.Array],
    oracle: Callable[..., jax.Array],
    batch: int,
    context: int,
    queries: int,
    ceilings: Ceilings,
    rng: np.random.Generator,
) -> dict[str, Any]:
    heads, head_dim = config.num_heads, config.head_dim
    a_token = 2 * config.num_kv_heads * head_dim * floors.BF16_BYTES
    kv_bytes = batch * context * a_token
    calls = distinct_calls(kv_bytes, least=4)
    arena, tables = _filled(rng, geometry, calls, batch, context)
    rows = jnp.arange(batch, dtype=jnp.int32)
    start = jnp.full(batch, context - queries, jnp.int32)
    length = jnp.full(batch, queries, jnp.int32)
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), calls)
    operands = [
        (jax.random.normal(keys[i], (batch, queries, heads, head_dim), jnp.bfloat16), tables[i]) for i in range(calls)
    ]
    expected = oracle(operands[0][0], arena, operands[0][1], rows, start, length).astype(jnp.float32)
    attend = lambda q, table, arena: op(q, arena, table, rows, start, length)  # noqa: E731
    result = check_and_time(attend, operands, arena, expected)
    seen = batch * (queries * context - queries * (queries - 1) // 2)
    work = Work(
        bytes=kv_bytes + 2 * batch * queries * heads * head_dim * floors.BF16_BYTES,
        flops=4.0 * seen * heads * head_dim,
    )
    shape = dict(heads=heads, kv_heads=config.num_kv_heads, head_dim=head_dim)
    return {"batch": batch, "context": context, "queries": queries, **shape, **figures(result, work, ceilings)}


def _filled(
    rng: np.random.Generator, geometry: KVGeometry, calls: int, batch: int, context: int
) -> tuple[jax.Array, list[jax.Array]]:
    """An arena of bfloat16 noise in scattered blocks, and a table `[batch, blocks, block_slots]` a call.

    Slots of no block hold poison, and the tables go on with poison after the last block.
    """
    blocks = -(-context // geometry.block_size)
    used = calls * batch * blocks * geometry.block_slots
    order = rng.permutation(used + SPARE_SLOTS).astype(np.int32)
    slots = order[:used].reshape(calls, batch, blocks, geometry.block_slots)
    tables = np.pad(slots, ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=GARBAGE_SLOT)
    spare = jnp.asarray(order[used:])
    fill = jax.jit(lambda key: _noise(key, (used + SPARE_SLOTS, geometry.slot_words)).at[spare].set(POISON))
    return fill(jax.random.key(int(rng.integers(2**31)), impl="rbg")), [jnp.asarray(table) for table in tables]


def _noise(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """uint32 words of two bfloat16 each, normal."""
    return jax.lax.bitcast_convert_type(jax.random.normal(key, (*shape, 2), jnp.bfloat16), jnp.uint32)
