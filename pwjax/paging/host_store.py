"""All weight pages in host memory, allocated once, and the copies from there to the device.

One `pinned_host` array a page kind `(unit, bits)`: uint32 `[layers * experts, page_slots * slot_words]`. Pages never
change after `prepare`, so an offload is no copy at all, and a page-in reads here.

A page-in is two compiled functions: a *fetch* slices up to `pages_per_batch` pages of one kind out of the host array
and stages them on the device (it overlaps with compute); the arena's commit scatters the staged slots (device.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MoEGeometry
from pwjax.errors import UserError

Kind = tuple[int, int]  # (unit, bits)
UNIT_NAMES = ("gate_up", "down")

MAX_STAGING_BYTES = 16 * 2**20  # copies of 16 MB reach the bus's full rate (docs/memory.md)
STAGING_SHARE = 0.01  # of all pages: a small model must not spend its budget on staging


class PageSource(Protocol):
    """Where pages are read from at load: the prepared store."""

    def load_layer(self, layer: int) -> Mapping[str, Mapping[int, np.ndarray]]:
        """`{"gate_up": {3: uint32 [experts, page_slots * slot_words], ..}, "down": {..}}`."""
        ...


@dataclasses.dataclass(frozen=True)
class StagingShape:
    """A batch of page-ins: `slots` slots of staging, into which `pages[kind]` pages of a kind fit."""

    slots: int
    slot_words: int
    pages: dict[Kind, int]

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_words * 4

    @classmethod
    def choose(cls, geometry: MoEGeometry, num_experts_total: int) -> StagingShape:
        """`num_experts_total` counts the experts of all layers."""
        layouts = (geometry.gate_up, geometry.down)
        slot_bytes = geometry.gate_up.slot_words * 4
        all_bytes = sum(x.total_slots for x in layouts) * num_experts_total * slot_bytes
        largest = max(x.page_slots(b) for x in layouts for b in BITS)
        slots = max(largest, int(min(MAX_STAGING_BYTES, STAGING_SHARE * all_bytes)) // slot_bytes)
        kinds = {(u, b): slots // x.page_slots(b) for u, x in enumerate(layouts) for b in BITS}
        return cls(slots, geometry.gate_up.slot_words, kinds)


class HostStore:
    """Host copies of all pages, and compiled fetches.

    Args:
        source: read once, a layer at a time.
        geometry: layouts of both units.
        shape: `(layers, experts)`.
        staging: size of a batch.
        device: where fetches deliver.
        max_bits: pages above it are neither kept nor fetched.
        progress: called with the number of layers read so far.
    """

    def __init__(
        self,
        source: PageSource,
        geometry: MoEGeometry,
        shape: tuple[int, int],
        staging: StagingShape,
        device: Any,
        max_bits: int,
        progress: Callable[[int], None] = lambda layers: None,
    ) -> None:
        self.staging = staging
        self._layouts = (geometry.gate_up, geometry.down)
        self._pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._on_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
        self._fetches = {}
        loaded = self._read(source, shape, max_bits, progress)
        self._pages = {kind: self._pin(loaded.pop(kind)) for kind in tuple(loaded)}
        self.nbytes = sum(array.nbytes for array in self._pages.values())

    def _read(
        self, source: PageSource, shape: tuple[int, int], max_bits: int, progress: Callable[[int], None]
    ) -> dict[Kind, np.ndarray]:
        """All pages by kind, read a layer at a time."""
        layers, experts = shape
        pages: dict[Kind, np.ndarray] = {}
        for unit, layout in enumerate(self._layouts):
            for bits in (b for b in BITS if b <= max_bits):
                words = layout.page_slots(bits) * layout.slot_words
                pages[unit, bits] = np.empty((layers * experts, words), np.uint32)
        for layer in range(layers):
            stored = source.load_layer(layer)
            for (unit, bits), array in pages.items():
                array[layer * experts : (layer + 1) * experts] = stored[UNIT_NAMES[unit]][bits]
            progress(layer + 1)
        return pages

    def _pin(self, pages: np.ndarray) -> jax.Array:
        try:
            return jax.block_until_ready(jax.device_put(pages, self._pinned))
        except jax.errors.JaxRuntimeError as error:
            raise UserError(
                f"host memory: pinning {pages.nbytes} bytes of weight pages failed; JAX pins at most 64 GB unless "
                f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is set higher before it starts ({str(error).splitlines()[0]})"
            ) from None

    def compile(self) -> None:
        """Compiles a fetch for every kind."""
        for kind, pages in self._pages.items():
            count = self.staging.pages[kind]
            ids = jax.ShapeDtypeStruct((count,), jnp.int32)
            fetch = jax.jit(self._make_fetch(kind), out_shardings=self._on_device)
            self._fetches[kind] = fetch.lower(pages, ids).compile()

    def _make_fetch(self, kind: Kind):
        layout = self._layouts[kind[0]]
        page_slots, count = layout.page_slots(kind[1]), self.staging.pages[kind]
        spare = self.staging.slots - page_slots * count

        def fetch(pages: jax.Array, ids: jax.Array) -> jax.Array:
            picked = [
                jax.device_put(jax.lax.dynamic_slice_in_dim(pages, ids[p], 1), jax.memory.Space.Device)
                for p in range(count)
            ]
            slots = jnp.concatenate([page.reshape(page_slots, layout.slot_words) for page in picked])
            return jnp.pad(slots, ((0, spare), (0, 0)))

        return fetch

    def fetch(self, kind: Kind, rows: np.ndarray) -> jax.Array:
        """Starts copying pages to the device and returns at once.

        Args:
            kind: `(unit, bits)`.
            rows: `layer * experts + expert` of at most `staging.pages[kind]` pages.

        Returns:
            uint32 `[staging.slots, slot_words]`: the pages' slots one after another; the rest is padding.
        """
        ids = np.zeros(self.staging.pages[kind], np.int32)
        ids[: len(rows)] = rows
        return self._fetches[kind](self._pages[kind], ids)
