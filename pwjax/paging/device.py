"""The arena and the page tables on the device, and the few compiled functions that change them between steps.

All writes go through donated buffers, so dispatch order is the only order (design invariant 5). The functions have
one fixed shape each, padded: a padded slot id is `num_slots` and a padded table position lies past the end; both are
dropped. Index -1 would write the last slot, so it never appears.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pwjax.paging.host_store import StagingShape

MAX_BITS_UPDATES = 1024  # linear-blocks whose q one call of `set_bits` changes


@dataclasses.dataclass
class WeightState:
    """What `bitplane_moe` reads. Buffers are replaced, never shared: each update donates the old one.

    Attributes:
        arena: uint32 `[num_slots, slot_words]`, weight pages and KV blocks.
        slot_table: int32 `[layers, experts, row_slots]`.
        bits: int32 `[layers, experts, 2]`, q.
    """

    arena: jax.Array
    slot_table: jax.Array
    bits: jax.Array


def commit_pages(arena, slot_table, staging, slot_ids, positions):
    """Writes staged slots into the arena and their ids into the slot table.

    Args:
        staging: uint32 `[C, slot_words]`.
        slot_ids: int32 `[C]`; `num_slots` is padding.
        positions: int32 `[C]` into the flattened slot table; its size is padding.
    """
    arena = arena.at[slot_ids].set(staging, mode="drop", unique_indices=True)
    flat = slot_table.reshape(-1).at[positions].set(slot_ids, mode="drop", unique_indices=True)
    return arena, flat.reshape(slot_table.shape)


def set_bits(bits, indices, values):
    """q of linear-blocks `indices` int32 `[P]` becomes `values` int32 `[P]`; an index past the end is padding."""
    flat = bits.reshape(-1).at[indices].set(values, mode="drop", unique_indices=True)
    return flat.reshape(bits.shape)


class DeviceTables:
    """Owns a `WeightState` and the compiled updates.

    Args:
        num_slots, slot_words: of the arena.
        table_shape: `[layers, experts, row_slots]`; experts may be 0 where no pages exist (method bf16).
        staging: size of a page-in batch.
        device: where it all lives.
    """

    def __init__(
        self,
        num_slots: int,
        slot_words: int,
        table_shape: tuple[int, int, int],
        staging: StagingShape,
        device: Any,
    ) -> None:
        self.num_slots = num_slots
        self._table_size = int(np.prod(table_shape))
        layers, experts, _ = table_shape
        zeros = jax.jit(
            lambda: (
                jnp.zeros((num_slots, slot_words), jnp.uint32),
                jnp.zeros(table_shape, jnp.int32),
                jnp.zeros((layers, experts, 2), jnp.int32),
            ),
            out_shardings=jax.sharding.SingleDeviceSharding(device),
        )
        self.state = WeightState(*zeros())
        self._num_blocks = layers * experts * 2
        ids = jax.ShapeDtypeStruct((staging.slots,), jnp.int32)
        staged = jax.ShapeDtypeStruct((staging.slots, slot_words), jnp.uint32)
        updates = jax.ShapeDtypeStruct((MAX_BITS_UPDATES,), jnp.int32)
        state = self.state
        self._commit = (
            jax.jit(commit_pages, donate_argnums=(0, 1))
            .lower(state.arena, state.slot_table, staged, ids, ids)
            .compile()
        )
        self._set_bits = jax.jit(set_bits, donate_argnums=0).lower(state.bits, updates, updates).compile()
        self._staging_slots = staging.slots

    def commit_pages(self, staging: jax.Array, slot_ids: np.ndarray, positions: np.ndarray) -> None:
        """Scatters a staged batch; `slot_ids` and `positions` cover its first rows, the rest is padding."""
        ids = np.full(self._staging_slots, self.num_slots, np.int32)
        where = np.full(self._staging_slots, self._table_size, np.int32)
        # Padding must stay unique where unique_indices is promised: count on past the end.
        ids[len(slot_ids) :] += np.arange(self._staging_slots - len(slot_ids), dtype=np.int32)
        where[len(positions) :] += np.arange(self._staging_slots - len(positions), dtype=np.int32)
        ids[: len(slot_ids)] = slot_ids
        where[: len(positions)] = positions
        state = self.state
        state.arena, state.slot_table = self._commit(state.arena, state.slot_table, staging, ids, where)

    def set_bits(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Sends new committed bits to the device."""
        for start in range(0, len(indices), MAX_BITS_UPDATES):
            part = slice(start, start + MAX_BITS_UPDATES)
            where = self._num_blocks + np.arange(MAX_BITS_UPDATES, dtype=np.int32)
            new = np.zeros(MAX_BITS_UPDATES, np.int32)
            where[: len(indices[part])] = indices[part]
            new[: len(values[part])] = values[part]
            self.state.bits = self._set_bits(self.state.bits, where, new)
