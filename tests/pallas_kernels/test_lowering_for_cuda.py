"""Every kernel variant lowers for CUDA to a valid Triton module, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.bitplane_moe import triton as moe
from pallas_kernels.bitplane_moe.layout import BlockLayout, MoEGeometry
from pallas_kernels.paged_attention import triton as attention
from pallas_kernels.testing.attention_cases import TAILS, AttentionCase
from tests.pallas_kernels.lowering import triton_modules

# [hidden, inner, experts, top_k] of models that are served, and of one with odd sizes.
SHAPES = [(2048, 1408, 60, 4), (4096, 14336, 8, 2), (256, 128, 32, 4), (704, 80, 60, 6)]


def _moe_modules(tokens, shape, *, lut_rows=1, slot_words=8192, dtype="bfloat16", num_slots=1000, layer=1) -> list[str]:
    hidden, inner, experts, top_k = shape
    shared = dict(lut_rows=lut_rows, slot_words=slot_words)
    geometry = MoEGeometry(
        gate_up=BlockLayout(rows=2 * inner, cols=hidden, **shared),
        down=BlockLayout(rows=hidden, cols=inner, **shared),
        max_bits=5,
    )
    of = jax.ShapeDtypeStruct
    operands = (
        of((tokens, hidden), dtype),
        of((tokens, top_k), jnp.int32),
        of((tokens, top_k), jnp.float32),
        of((2, experts, geometry.total_slots), jnp.int32),
        of((2, experts, 2), jnp.int32),
        of((num_slots, slot_words), jnp.uint32),
    )
    return triton_modules(functools.partial(moe.bitplane_moe, layer=layer, geometry=geometry), *operands)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [1, 512])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bitplane_moe(shape: tuple[int, ...], tokens: int, dtype: str) -> None:
    kernels = _moe_modules(tokens, shape, dtype=dtype, lut_rows=32 if shape[0] == 256 else 1)
    assert ["tt.dot" in kernel for kernel in kernels] == [True, False, True]  # gate_up, the activation, down


def test_layers_share_moe_kernels() -> None:
    """The layer is data: a kernel takes seconds to compile."""
    assert _moe_modules(1, SHAPES[0], layer=0) == _moe_modules(1, SHAPES[0], layer=1)


@pytest.mark.parametrize("slot_words", [64, 100])
def test_bitplane_moe_with_small_slots(slot_words: int) -> None:
    assert len(_moe_modules(4, SHAPES[2], slot_words=slot_words)) == 3


def _attention_modules(case: AttentionCase, num_slots: int, layers: tuple[int, ...] = (0,)) -> list[str]:
    geometry, sequences = case.geometry, len(case.starts)
    of = jax.ShapeDtypeStruct

    def chain(q, *place):
        for layer in layers:
            q = attention.paged_attention(q, *place, layer=layer, geometry=geometry, scale=0.1, window=case.window)
        return q

    return triton_modules(
        chain,
        of((sequences, case.queries, case.heads, case.head_dim), case.dtype),
        of((num_slots, case.slot_words), jnp.uint32),
        of((9, 40, geometry.block_slots), jnp.int32),
        *[of((sequences,), jnp.int32)] * 3,
    )


@pytest.mark.parametrize("case", TAILS, ids=str)
def test_paged_attention(case: AttentionCase) -> None:
    kernel, *combine = _attention_modules(case, num_slots=1000)
    assert ("tt.dot" in kernel) == (case.queries > 1 or case.heads > 4 * case.kv_heads)
    assert len(combine) <= 1


def test_layers_share_a_kernel() -> None:
    """Also the lowering: JAX keeps one of the first layer and one of all others, whatever their number."""
    layers = AttentionCase(layers=6)
    one, all_of_them = (_attention_modules(layers, 1000, numbers) for numbers in ((0,), tuple(range(6))))
    assert set(one) == set(all_of_them)
    assert len(all_of_them) <= 2 * len(one)


def test_large_arenas_are_addressed_in_64_bits() -> None:
    """Past 4 GiB, slot times slot_words must not be a 32-bit product."""
    slots = 2**33 // (4 * 8192)
    case = dataclasses.replace(TAILS[0], slot_words=8192)

    def that_read_the_arena(num_slots: int) -> list[str]:
        gate_up, _, down = _moe_modules(1, SHAPES[0], num_slots=num_slots)
        attention, *_ = _attention_modules(case, num_slots)  # and the kernel that combines shares
        return [gate_up, down, attention]

    assert all("xi64>" in kernel for kernel in that_read_the_arena(slots))
    assert not any("xi64>" in kernel for kernel in that_read_the_arena(1000))
