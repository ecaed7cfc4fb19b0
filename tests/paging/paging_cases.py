"""Small parts of the paging layer, wired up as the engine does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, BlockLayout, MoEGeometry
from pwjax.paging.allocator import SlotAllocator
from pwjax.paging.device import DeviceTables
from pwjax.paging.host_store import UNIT_NAMES, HostStore, StagingShape
from pwjax.paging.mover import Mover
from pwjax.paging.page_table import PageState, WeightPageTable

SLOT_WORDS = 32
GEOMETRY = MoEGeometry(
    gate_up=BlockLayout(rows=16, cols=20, lut_rows=8, slot_words=SLOT_WORDS),
    down=BlockLayout(rows=20, cols=8, lut_rows=8, slot_words=SLOT_WORDS),
)
LAYOUTS = (GEOMETRY.gate_up, GEOMETRY.down)
LAYERS, EXPERTS = 2, 3
NUM_BLOCKS = LAYERS * EXPERTS * 2


class RandomPages:
    """A `PageSource` of random words."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.layers = [
            {
                name: {
                    b: rng.integers(0, 2**32, (EXPERTS, layout.page_slots(b) * SLOT_WORDS), dtype=np.uint32)
                    for b in BITS
                }
                for name, layout in zip(UNIT_NAMES, LAYOUTS, strict=True)
            }
            for _ in range(LAYERS)
        ]

    def load_layer(self, layer: int) -> dict[str, dict[int, np.ndarray]]:
        return self.layers[layer]

    def page(self, index: int, bits: int) -> np.ndarray:
        """uint32 `[page_slots, slot_words]` of a linear-block."""
        layer_expert, unit = divmod(index, 2)
        layer, expert = divmod(layer_expert, EXPERTS)
        return self.layers[layer][UNIT_NAMES[unit]][bits][expert].reshape(-1, SLOT_WORDS)


class SavedPages(RandomPages):
    """The same pages, written with Orbax and read back: their buffers are Orbax's."""

    def __init__(self, folder: Path) -> None:
        from checkpoints.orbax_io import load_arrays, save_arrays

        super().__init__()
        for number, layer in enumerate(self.layers):
            flat = {f"{name}.{b}": page for name, pages in layer.items() for b, page in pages.items()}
            save_arrays(folder / str(number), flat)
            restored = load_arrays(folder / str(number))
            self.layers[number] = {name: {b: restored[f"{name}.{b}"] for b in BITS} for name in UNIT_NAMES}


@dataclasses.dataclass
class Rig:
    """All parts of one arena. `staging_pages` base pages of gate_up fit a batch."""

    num_slots: int = 400
    max_batches: int = 2
    staging_slots: int | None = None
    source: RandomPages = dataclasses.field(default_factory=RandomPages)

    def __post_init__(self) -> None:
        device = jax.devices()[0]
        staging = StagingShape.choose(GEOMETRY, LAYERS * EXPERTS)
        if self.staging_slots is not None:
            kinds = {kind: self.staging_slots // LAYOUTS[kind[0]].page_slots(kind[1]) for kind in staging.pages}
            staging = StagingShape(self.staging_slots, SLOT_WORDS, kinds)
        self.table = WeightPageTable(GEOMETRY, LAYERS, EXPERTS)
        self.allocator = SlotAllocator(self.num_slots)
        self.store = HostStore(self.source, GEOMETRY, (LAYERS, EXPERTS), staging, device, max_bits=8)
        self.store.compile()
        self.device = DeviceTables(self.num_slots, SLOT_WORDS, self.table.shape, staging, device)
        self.mover = Mover(self.table, self.allocator, self.store, self.device, self.max_batches)

    def load(self, bits: int = 3) -> None:
        self.mover.request_raise([(i, bits, "load") for i in range(NUM_BLOCKS)])
        self.mover.commit_ready(wait=True)

    def arena_pointer(self) -> int:
        return self.device.state.arena.unsafe_buffer_pointer()

    def check(self) -> None:
        """The invariants of section 2 that can be read off: tables agree, pages up to q are there, bit for bit."""
        state, table = self.device.state, self.table
        arena, slots = np.asarray(state.arena), np.asarray(state.slot_table).reshape(NUM_BLOCKS // 2, -1)
        committed = np.asarray(state.bits).reshape(-1)
        np.testing.assert_array_equal(committed, table.committed)
        owned: list[int] = []
        for index in range(NUM_BLOCKS):
            for bits in BITS:
                columns, page_state = table.columns(index, bits), table.state(index, bits)
                assert (page_state == PageState.GPU) == (bits <= committed[index])
                if page_state != PageState.HOST:
                    owned += table.slot_table[index // 2, columns].tolist()
                if page_state == PageState.GPU:
                    np.testing.assert_array_equal(arena[slots[index // 2, columns]], self.source.page(index, bits))
        assert 0 not in owned and len(set(owned)) == len(owned)
        assert len(owned) == self.allocator.usable_slots - self.allocator.free_slots
