"""Routed experts of one layer, read from bit-planes in arena slots.

`implementation`: `"triton"` is the Pallas kernel for NVIDIA GPUs, `"xla"` plain jnp, `"auto"` the kernel on an NVIDIA
GPU and jnp elsewhere. An explicit choice never falls back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.bitplane_moe import reference
from pallas_kernels.bitplane_moe.activation import ACTIVATIONS
from pallas_kernels.bitplane_moe.dense import dense_moe
from pallas_kernels.bitplane_moe.layout import MoEGeometry
from pallas_kernels.platform import Implementation, resolve_implementation

__all__ = ["MoEGeometry", "bitplane_moe", "dense_moe", "resolve_implementation"]


def bitplane_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    slots: jax.Array,
    bits: jax.Array,
    arena: jax.Array,
    *,
    layer: int,
    geometry: MoEGeometry,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`y[t] = sum over c of w[t, c] * down_e (act(gate_e x[t]) * up_e x[t])` with `e = expert_ids[t, c]`.

    Every matrix is `W[n, k] = scale[n] * LUT_q[n // lut_rows, top q bits of index[n, k]]` at the committed bits q of
    its linear-block. Sums are float32 and in a fixed order: a row's result does not depend on the other rows.

    Args:
        x: `[T, H]`, bfloat16 or float32.
        expert_ids: int32 `[T, k]`; `E` means no expert: contributes nothing, reads nothing.
        expert_weights: float32 `[T, k]`.
        slots: int32 `[L, E, geometry.total_slots]` of all layers: arena slot of every slot of pages 3, 4, .., 8 of
            gate_up, then of down; entries of pages above q are not looked at.
        bits: int32 `[L, E, 2]`: q of gate_up and down, 3 to `geometry.max_bits`.
        arena: uint32 `[num_slots, slot_words]`.
        layer: which of the tables'.

    Returns:
        `y` `[T, H]` in `x.dtype`, and float32 `[T, k]`: the L2 norm of each choice's down input `act(gate) * up`, 0 for
        padding.

    Raises:
        NotImplementedError: the implementation asked for can't do this here; the message says why.
        ValueError: shapes or dtypes that contradict `geometry`.
    """
    operands = (x, expert_ids, expert_weights, slots, bits, arena)
    _check(*operands, layer, geometry)
    if resolve_implementation(implementation) == "xla":
        return reference.bitplane_moe(*operands, layer=layer, geometry=geometry)
    from pallas_kernels.bitplane_moe import triton  # the backend is optional and deprecated: load it when it is used

    return triton.bitplane_moe(*operands, layer=layer, geometry=geometry)


def _check(x, expert_ids, expert_weights, slots, bits, arena, layer: int, geometry: MoEGeometry) -> None:
    if geometry.activation not in ACTIVATIONS:
        raise NotImplementedError(f"activation {geometry.activation!r}: supported are {', '.join(ACTIVATIONS)}")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"x is {x.dtype}; supported are bfloat16 and float32")
    hidden, inner = geometry.gate_up.cols, geometry.down.cols
    if geometry.gate_up.rows != 2 * inner or geometry.down.rows != hidden:
        raise ValueError(f"geometry: gate_up and down do not fit each other: {geometry}")
    if geometry.gate_up.slot_words != arena.shape[1] or geometry.down.slot_words != arena.shape[1]:
        raise ValueError(
            f"arena has slots of {arena.shape[1]} words; the geometry's have {geometry.gate_up.slot_words}"
        )
    if arena.dtype != jnp.uint32:
        raise ValueError(f"arena is {arena.dtype}; it must be uint32")
    (layers, experts), pairs = bits.shape[:2], expert_ids.shape
    if not 0 <= layer < layers:
        raise ValueError(f"layer is {layer}; the tables have {layers}")
    expected = {
        "x": (x, (pairs[0], hidden)),
        "expert_weights": (expert_weights, pairs),
        "slots": (slots, (layers, experts, geometry.total_slots)),
        "bits": (bits, (layers, experts, 2)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
