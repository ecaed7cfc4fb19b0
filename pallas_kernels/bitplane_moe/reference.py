"""`bitplane_moe` in plain jnp: the oracle of the kernels, and what runs where there is no NVIDIA GPU.

One expert's weights at a time are decoded from its slots, plane after plane. The number of planes is data, so nothing
is compiled again when bits change. Only slots of pages 3..q are used: what the other entries of the slot table point at
never enters a result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.bitplane_moe.experts_loop import loop_over_experts
from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS, MIN_BITS, BlockLayout, MoEGeometry


def bitplane_moe(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    gate_up_slots: jax.Array,
    down_slots: jax.Array,
    bits: jax.Array,
    arena: jax.Array,
    *,
    geometry: MoEGeometry,
) -> tuple[jax.Array, jax.Array]:
    """See `api.bitplane_moe`."""

    def weights_of(expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (
            decode_block(gate_up_slots[expert], bits[expert, 0], arena, geometry.gate_up),
            decode_block(down_slots[expert], bits[expert, 1], arena, geometry.down),
        )

    return loop_over_experts(
        x,
        expert_ids,
        expert_weights,
        weights_of,
        num_experts=bits.shape[0],
        activation=geometry.activation,
    )


def decode_block(slots: jax.Array, bits: jax.Array, arena: jax.Array, layout: BlockLayout) -> jax.Array:
    """The float32 `[N, K]` weights of one linear-block at its committed bits.

    Args:
        slots: int32 `[layout.total_slots]`, the linear-block's row of the slot table.
        bits: int32 scalar.
        arena: uint32 `[num_slots, slot_words]`.
    """
    column = bits - MIN_BITS
    words = _read_block(slots, _constant([layout.resident_slots(b) for b in BITS])[column], arena)
    indices = _decode_indices(words, bits, layout)

    lut_words = layout.groups * 2 ** (MAX_BITS - 1)
    table, scales = _tables(words, bits, lut_words, layout)
    group = jnp.asarray(np.arange(layout.rows, dtype=np.int32) // layout.lut_rows)[:, None, None, None]
    half_bits = bits - 1
    entry = (group << half_bits) + (indices & ((1 << half_bits) - 1)) + (indices >> half_bits) * lut_words
    weights = table.at[entry].get(mode="promise_in_bounds")

    weights = weights * scales[:, None, None, None]
    return weights.reshape(layout.rows, -1)[:, : layout.cols]


def _tables(words, bits, lut_words: int, layout: BlockLayout) -> tuple[jax.Array, jax.Array]:
    """LUT `bits`, float32 `[2 * lut_words]` (low halves of its words, then high ones), and row scales, float32 `[N]`.

    Word j of a group holds entries j (low half) and j + 2**(bits-1) (high half).
    """

    def build(*_: object) -> tuple[jax.Array, jax.Array]:
        # Zeros behind the last page, so that the largest LUT can be cut out at the start of any.
        padded = jnp.pad(words, (0, lut_words))
        lut = lax.dynamic_slice(padded, (_lut_starts(layout)[bits - MIN_BITS],), (lut_words,))
        halves = jnp.concatenate([lut & 0xFFFF, lut >> 16]).astype(jnp.uint16)
        table = lax.bitcast_convert_type(halves, jnp.float16).astype(jnp.float32)
        scales = lax.slice(words, (layout.scale_offset_words,), (layout.scale_offset_words + layout.rows,))
        return table, lax.bitcast_convert_type(scales, jnp.float32)

    # A loop of one trip, whose number XLA can't know: it would else fuse all this into the lookup and build an entry of
    # the table anew for every weight, three times the cost of the decoding (an optimization barrier goes too early).
    init = (jnp.zeros(2 * lut_words, jnp.float32), jnp.zeros(layout.rows, jnp.float32))
    return lax.fori_loop(0, jnp.minimum(bits, 1), build, init)


def _decode_indices(words: jax.Array, bits: jax.Array, layout: BlockLayout) -> jax.Array:
    """int32 `[N, ceil(K / 32), 8, 4]`: the top `bits` bits of every index, column by column."""
    shape = (layout.rows, layout.words_per_row, 8)
    starts = _plane_starts(layout)
    nibble_shifts = 4 * lax.broadcasted_iota(jnp.uint32, shape, 2)

    def add_plane(plane: jax.Array, packed: jax.Array) -> jax.Array:
        packed_plane = lax.dynamic_slice(words, (starts[plane],), (layout.plane_words,)).reshape(shape[:2])
        nibbles = (packed_plane[..., None] >> nibble_shifts) & 15
        # The product puts bit i of a nibble in the lowest bit of byte i: four indices grow side by side in a word.
        return (packed << 1) | ((nibbles * 0x00204081) & 0x01010101)

    packed = lax.fori_loop(0, bits, add_plane, jnp.zeros(shape, jnp.uint32))
    byte_shifts = 8 * lax.broadcasted_iota(jnp.uint32, (*shape, 4), 3)
    return ((packed[..., None] >> byte_shifts) & 255).astype(jnp.int32)


def _read_block(slots: jax.Array, resident: jax.Array, arena: jax.Array) -> jax.Array:
    """uint32 words of a linear-block's first `resident` slots, zeros in place of the others."""
    here = jnp.arange(slots.shape[0], dtype=jnp.int32) < resident
    # Slot 0 stands in for what isn't resident: a valid address whose words are not used.
    rows = arena.at[jnp.where(here, slots, 0)].get(mode="promise_in_bounds")
    return jnp.where(here[:, None], rows, jnp.uint32(0)).reshape(-1)


def _plane_starts(layout: BlockLayout) -> jax.Array:
    """int32 `[8]`: first word of each plane, counted from the linear-block's first slot."""
    offsets = (layout.plane_offset_words(plane) for plane in range(MAX_BITS))
    return _constant([layout.page_offset_slots(page) * layout.slot_words + word for page, word in offsets])


def _lut_starts(layout: BlockLayout) -> jax.Array:
    """int32 `[6]`: first word of LUT 3..8, counted from the linear-block's first slot."""
    return _constant([layout.page_offset_slots(b) * layout.slot_words + layout.lut_offset_words(b) for b in BITS])


def _constant(values: list[int]) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))
