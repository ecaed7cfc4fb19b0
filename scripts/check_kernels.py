"""Are the kernels right on this machine? (`pwjax bench` says how fast they are.)

    python scripts/check_kernels.py [--only TEXT]

Runs every case of the test suite for `bitplane_moe` and `paged_attention` through the Triton kernels (compiled on an
NVIDIA GPU, interpreted elsewhere) and compares with float64 NumPy; on a GPU also the dense experts, an arena of more
than 2**31 words, and a donated step in place. Prints a table; the last line of stdout is one JSON object. Exit status 1
if a case fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from pallas_kernels.bitplane_moe import api as moe_api
from pallas_kernels.bitplane_moe import triton as moe_triton
from pallas_kernels.paged_attention import api as attention_api
from pallas_kernels.paged_attention import triton as attention_triton
from pallas_kernels.testing import attention_cases, moe_cases
from pallas_kernels.testing.attention_cases import AttentionCase
from pallas_kernels.testing.moe_cases import LAYER, MoECase

ON_GPU = jax.default_backend() == "gpu"
INTERPRET = {} if ON_GPU else {"interpret": True}
# Largest error over the largest value.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2**-8}  # tensor cores truncate what they add to a sum

LARGER_MOE = [
    MoECase(tokens=4, hidden=2048, inner=1408, experts=4, top_k=2, slot_words=8192, dtype="bfloat16", seed=50),
    MoECase(tokens=200, hidden=704, inner=352, experts=8, top_k=4, lut_rows=32, slot_words=2048, seed=51),
    MoECase(tokens=300, hidden=512, inner=256, experts=4, top_k=2, dtype="bfloat16", slot_words=2048, seed=52),
]
LARGER_ATTENTION = [
    AttentionCase(starts=(2000, 1500), lengths=(1, 1), heads=16, kv_heads=16, head_dim=128, slot_words=2048, seed=50),
    AttentionCase(
        queries=256, starts=(500,), lengths=(256,), heads=8, kv_heads=2, head_dim=128, kv_dtype="bfloat16", seed=51
    ),
]


@dataclasses.dataclass
class Check:
    """One row of the table: a call, its right answer, and how it compared."""

    name: str
    call: Callable[[], tuple[jax.Array, ...]]
    want: Callable[[], tuple[np.ndarray, ...]]
    bounds: tuple[float, ...]
    errors: tuple[float, ...] = ()
    failure: str = ""

    def run(self) -> Check:
        try:
            got, again = ([np.asarray(a, np.float64) for a in self.call()] for _ in range(2))
            self.errors = tuple(_error(a, b) for a, b in zip(got, self.want(), strict=True))
            if not all(error <= bound for error, bound in zip(self.errors, self.bounds, strict=True)):
                self.failure = f"error above {self.bounds}"
            elif any((a != b).any() for a, b in zip(got, again, strict=True)):
                self.failure = "two runs differ"
        except Exception as error:  # a table with every failure is worth more than the first traceback
            self.failure = f"{type(error).__name__}: {str(error)[:300]}"
        return self


def _error(got: np.ndarray, want: np.ndarray) -> float:
    error = float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-6))
    return error if np.isfinite(error) else float("inf")


def moe_check(case: MoECase, *, arena_slots: int = 0) -> Check:
    """`arena_slots` > 0 moves the pages to the end of an arena of that many slots."""
    inputs = moe_cases.build(case)
    operands = [jnp.asarray(inputs.x, case.dtype), *map(jnp.asarray, inputs.operands[1:])]
    if arena_slots:
        operands[5] = _at_the_end(inputs.arena, arena_slots)
        operands[3] = operands[3] + (arena_slots - len(inputs.arena))
    op = jax.jit(functools.partial(moe_triton.bitplane_moe, layer=LAYER, geometry=inputs.geometry, **INTERPRET))
    name = f"bitplane_moe {case}" + (f" arena of {arena_slots} slots" if arena_slots else "")
    bounds = (TOLERANCE[case.dtype], TOLERANCE["float32"] if case.dtype == "float32" else 1e-4)
    return Check(name, lambda: op(*operands), lambda: moe_cases.expected(inputs), bounds)


def dense_check(case: MoECase) -> Check:
    inputs = moe_cases.build(case)
    units = [np.stack([moe_cases.round_to(w, case.dtype) for w in unit]) for unit in inputs.dense]
    rounded = dataclasses.replace(inputs, dense=tuple(list(unit) for unit in units))
    operands = [jnp.asarray(a) for a in inputs.operands[:3]] + [jnp.asarray(unit, case.dtype) for unit in units]
    operands[0] = operands[0].astype(case.dtype)
    bounds = (TOLERANCE["float32"],) * 2 if case.dtype == "float32" else (2**-7, 1e-5)
    op = jax.jit(moe_api.dense_moe)
    return Check(f"dense_moe {case}", lambda: op(*operands), lambda: moe_cases.expected(rounded), bounds)


def attention_check(case: AttentionCase, *, arena_slots: int = 0) -> Check:
    inputs = attention_cases.build(case)
    scale = case.head_dim**-0.5
    operands = [inputs.q, inputs.arena, inputs.kv_table, inputs.rows, inputs.start, inputs.length]
    operands = [jnp.asarray(a) for a in operands]
    operands[0] = operands[0].astype(case.dtype)
    if arena_slots:
        operands[1] = _at_the_end(inputs.arena, arena_slots)
        operands[2] = operands[2] + (arena_slots - len(inputs.arena))
    static = dict(layer=case.layer, geometry=case.geometry, scale=scale, window=case.window)
    op = jax.jit(functools.partial(attention_triton.paged_attention, **static, **INTERPRET))
    name = f"paged_attention {case}" + (f" arena of {arena_slots} slots" if arena_slots else "")
    want = lambda: (attention_cases.expected(inputs, scale),)  # noqa: E731
    return Check(name, lambda: (op(*operands),), want, (TOLERANCE[case.dtype],))


def _at_the_end(words: np.ndarray, slots: int) -> jax.Array:
    """An arena of poison whose last slots are `words`."""
    put = jax.jit(lambda arena, words: arena.at[slots - len(words) :].set(words), donate_argnums=0)
    return put(jnp.full((slots, words.shape[1]), moe_cases.POISON), words)


def in_place_check() -> Check:
    """A donated step of write, attention and experts keeps the arena's buffer."""
    case = AttentionCase(starts=(0, 0, 0, 0), seed=60)
    kv, moe = attention_cases.build(case), moe_cases.build(MoECase(tokens=4, hidden=128, inner=32, seed=60))
    table = np.where(kv.kv_table < len(kv.arena), kv.kv_table + len(moe.arena), kv.kv_table)
    place = (table, kv.rows, kv.start, kv.length)

    def step(arena, x, moe_operands, place):
        for layer in range(case.layers):
            heads = x.reshape(4, 1, case.heads, case.head_dim)
            new = heads[:, :, : case.kv_heads]
            arena = attention_api.write_kv(arena, new, new, *place, layer=layer, geometry=case.geometry)
            out = attention_api.paged_attention(heads, arena, *place, layer=layer, geometry=case.geometry, scale=0.2)
            x = x + out.reshape(x.shape)
            operands: list[jax.Array] = [x, *moe_operands, arena]
            x = x + moe_api.bitplane_moe(*operands, layer=LAYER, geometry=moe.geometry)[0]
        return arena, x

    def call() -> tuple[jax.Array, ...]:
        arena = jnp.asarray(np.concatenate([moe.arena, kv.arena]))
        operands = jax.tree.map(lambda a: jnp.array(a, copy=True), (moe.x, moe.operands[1:-1], place))
        pointer = arena.unsafe_buffer_pointer()
        arena, x = jax.jit(step, donate_argnums=0)(arena, *operands)
        return jnp.array([arena.unsafe_buffer_pointer() == pointer]), jnp.isfinite(x).all()[None]

    return Check("donated step in place", call, lambda: (np.ones(1), np.ones(1)), (0.0, 0.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose name holds this text")
    options = parser.parse_args()
    makers: list[Callable[[], Check]] = []
    makers += [functools.partial(moe_check, case) for case in moe_cases.TAILS]
    makers += [functools.partial(attention_check, case) for case in attention_cases.TAILS]
    if ON_GPU:
        makers += [functools.partial(moe_check, case) for case in LARGER_MOE]
        makers += [functools.partial(attention_check, case) for case in LARGER_ATTENTION]
        makers += [functools.partial(dense_check, dataclasses.replace(case, slot_words=2048)) for case in LARGER_MOE]
        makers += [functools.partial(dense_check, case) for case in moe_cases.TAILS[:5]]
        slots = 2**31 // 128 + 4096
        makers += [functools.partial(moe_check, MoECase(seed=70), arena_slots=slots)]
        makers += [functools.partial(attention_check, AttentionCase(seed=71), arena_slots=slots)]
    makers += [in_place_check]
    begin = time.perf_counter()
    checks = [check for check in (make() for make in makers) if options.only in check.name]
    with ThreadPoolExecutor(12 if ON_GPU else 2) as pool:  # compilation is most of the time
        for check in pool.map(Check.run, checks):
            errors = " ".join(f"{error:.1e}" for error in check.errors)
            print(f"{'FAIL' if check.failure else 'ok':4}  {errors:16}  {check.name}  {check.failure}", flush=True)
    failed = [check.name for check in checks if check.failure]
    report = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "kernels": "compiled" if ON_GPU else "interpreted",
        "cases": len(checks),
        "failed": failed,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(json.dumps(report))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
