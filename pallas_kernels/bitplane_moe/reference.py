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
from pallas_kernels.bitplane_moe.layout import (
    BITS,
    MAX_BITS,
    MAX_BYTE_TABLE_BITS,
    MIN_BITS,
    BlockLayout,
    MoEGeometry,
)


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
) -> tuple[jax.Array, jax.Array]:
    """See `api.bitplane_moe`."""

    split = geometry.gate_up.total_slots

    def weights_of(expert: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, q = slots[layer, expert], bits[layer, expert]
        return (
            decode_block(row[:split], q[0], arena, geometry.gate_up),
            decode_block(row[split:], q[1], arena, geometry.down),
        )

    return loop_over_experts(
        x,
        expert_ids,
        expert_weights,
        weights_of,
        num_experts=bits.shape[1],
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

    table, scales = _tables(words, bits, layout)
    group = jnp.asarray(np.arange(layout.rows, dtype=np.int32) // layout.lut_rows)[:, None, None, None]
    weights = table.at[(group << bits) + indices].get(mode="promise_in_bounds")

    weights = weights * scales[:, None, None, None]
    return weights.reshape(layout.rows, -1)[:, : layout.cols]


def _tables(words, bits, layout: BlockLayout) -> tuple[jax.Array, jax.Array]:
    """LUT `bits`, float32 `[G * 256]`, `2**bits` entries a group in order of index, and row scales, float32 `[N]`."""
    lut_words = layout.groups * 2 ** (MAX_BITS - 1)

    def build(*_: object) -> tuple[jax.Array, jax.Array]:
        # Zeros behind the last page, so that the largest LUT can be cut out at the start of any.
        padded = jnp.pad(words, (0, lut_words))
        lut = lax.dynamic_slice(padded, (_lut_starts(layout)[bits - MIN_BITS],), (lut_words,))
        scales = lax.slice(words, (layout.scale_offset_words,), (layout.scale_offset_words + layout.rows,))
        return _lut_entries(lut, bits), lax.bitcast_convert_type(scales, jnp.float32)

    # A loop of one trip, whose number XLA can't know: it would else fuse all this into the lookup and build an entry of
    # the table anew for every weight, three times the cost of the decoding (an optimization barrier goes too early).
    init = (jnp.zeros(2 * lut_words, jnp.float32), jnp.zeros(layout.rows, jnp.float32))
    return lax.fori_loop(0, jnp.minimum(bits, 1), build, init)


def _lut_entries(words: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 entries in order of index, two for each of the words that `layout.pack_lut` made."""
    entry = jnp.arange(2 * words.shape[0], dtype=jnp.int32)
    pairs = (words[entry >> 1] >> ((entry & 1) * 16).astype(jnp.uint32)) & 0xFFFF
    # Byte tables: entry `t << low | j` of a group has its low byte at byte t of table j, the high one 8 bytes on.
    low = bits - MIN_BITS
    top, rest = (entry >> low) & 7, entry & ((1 << low) - 1)
    place = (entry >> bits << (bits + 1)) + 16 * rest + top

    def byte(at: jax.Array) -> jax.Array:
        return (words.at[at >> 2].get(mode="clip") >> (8 * (at & 3)).astype(jnp.uint32)) & 255

    halves = jnp.where(bits <= MAX_BYTE_TABLE_BITS, byte(place) | byte(place + 8) << 8, pairs)
    return lax.bitcast_convert_type(halves.astype(jnp.uint16), jnp.float16).astype(jnp.float32)


def _decode_indices(words: jax.Array, bits: jax.Array, layout: BlockLayout) -> jax.Array:
    """int32 `[N, ceil(K / 32), 8, 4]`: the top `bits` bits of every index, group by group of four columns."""
    starts = _plane_starts(layout)

    def plane(number: jax.Array | int) -> jax.Array:
        runs = lax.dynamic_slice(words, (starts[number],), (layout.plane_words,))
        runs = runs.reshape(-1, layout.rows, layout.run_words).swapaxes(0, 1)
        return runs.reshape(layout.rows, layout.words_per_row, 1)

    # Four indices grow side by side in the bytes of a word.
    base = [plane(number) for number in range(3)]
    last = sum(((word >> (3 - q)) & (0x11111111 << q) for q, word in enumerate(base)), jnp.uint32(0))
    nibbles = jnp.concatenate([word & 0x77777777 for word in base] + [last], axis=-1)
    nibbles = jnp.stack([nibbles & 0xFFFF, nibbles >> 16], axis=-1).reshape(*base[0].shape[:2], 8)
    spread = (nibbles | nibbles << 8) & 0x00FF00FF
    packed = (spread | spread << 4) & 0x0F0F0F0F

    group_shifts = 7 - lax.broadcasted_iota(jnp.uint32, packed.shape, 2)

    def add_plane(number: jax.Array, packed: jax.Array) -> jax.Array:
        return (packed << 1) | ((plane(number) >> group_shifts) & 0x01010101)

    packed = lax.fori_loop(MIN_BITS, bits, add_plane, packed)
    byte_shifts = 8 * lax.broadcasted_iota(jnp.uint32, (*packed.shape, 4), 3)
    return ((packed[..., None] >> byte_shifts) & 255).astype(jnp.int32)


def _read_block(slots: jax.Array, resident: jax.Array, arena: jax.Array) -> jax.Array:
    """uint32 words of a linear-block's first `resident` slots, zeros in place of the others."""
    here = jnp.arange(slots.shape[0], dtype=jnp.int32) < resident
    # Slot 0 stands in for what isn't resident: a valid address whose words are not used.
    rows = arena.at[jnp.where(here, slots, 0)].get(mode="promise_in_bounds")
    return jnp.where(here[:, None], rows, jnp.uint32(0)).reshape(-1)


def _plane_starts(layout: BlockLayout) -> jax.Array:
    """int32 `[8]`: first word of each plane, counted from the linear-block's first slot."""
    return _constant([layout.plane_start_words(plane) for plane in range(MAX_BITS)])


def _lut_starts(layout: BlockLayout) -> jax.Array:
    """int32 `[6]`: first word of LUT 3..8, counted from the linear-block's first slot."""
    return _constant([layout.lut_start_words(b) for b in BITS])


def _constant(values: list[int]) -> jax.Array:
    return jnp.asarray(np.array(values, np.int32))
