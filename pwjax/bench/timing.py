"""Times of device work, and what this device can do at most: the ceilings that floors are computed from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROUNDS = 5


def median_seconds(dispatch: Callable[[], Any], *, calls: int = 1, rounds: int = ROUNDS) -> float:
    """Seconds of one call, the median of `rounds` rounds of `calls` calls dispatched back to back.

    Runs it once before, which compiles and warms up. With enough calls a round, the host's part is hidden.

    Args:
        dispatch: starts device work and returns arrays of it.
    """
    jax.block_until_ready(dispatch())
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        jax.block_until_ready([dispatch() for _ in range(calls)][-1])
        times.append((time.perf_counter() - started_s) / calls)
    return statistics.median(times)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def copy_bytes_per_second() -> float:
    """Bytes read and written a second by an elementwise operation on an array far larger than any cache."""
    size = 2**28 if on_gpu() else 2**22
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = [jnp.zeros(size, jnp.uint32)]

    def dispatch() -> jax.Array:
        array[0] = add(array[0])
        return array[0]

    return 2 * array[0].nbytes / median_seconds(dispatch, calls=10)


def matmul_flops_per_second() -> float:
    """Rate of a large square bf16 product."""
    size = 8192 if on_gpu() else 512
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b)
    return 2 * size**3 / median_seconds(lambda: product(a, b), calls=10)


class CacheEvents:
    """Counts what the persistent compilation cache had and had not, inside a `with` block."""

    def __init__(self) -> None:
        self.hits = self.misses = 0

    def __enter__(self) -> CacheEvents:
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_event(self, event: str, **_: str | int) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"
        self.misses += event == "/jax/compilation_cache/cache_misses"
