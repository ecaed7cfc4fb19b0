"""Host copies of pages, and the batches that carry them."""

import jax
import numpy as np
import pytest

from pallas_kernels.bitplane_moe.layout import BITS
from pwjax.paging.host_store import MAX_STAGING_BYTES, HostStore, StagingShape
from tests.paging.paging_cases import EXPERTS, GEOMETRY, LAYERS, LAYOUTS, SLOT_WORDS, RandomPages


def make_store(max_bits: int = 8, progress=lambda layers: None) -> tuple[HostStore, RandomPages]:
    source = RandomPages(3)
    staging = StagingShape.choose(GEOMETRY, LAYERS * EXPERTS)
    store = HostStore(source, GEOMETRY, (LAYERS, EXPERTS), staging, jax.devices()[0], max_bits, progress)
    store.compile()
    return store, source


def test_fetch_delivers_the_pages_asked_for():
    store, source = make_store()
    for unit, layout in enumerate(LAYOUTS):
        for bits in BITS:
            rows = np.array([4, 0, 5, 1, 2, 3], np.int32)[: store.staging.pages[unit, bits]]
            staged = np.asarray(store.fetch((unit, bits), rows))
            assert staged.shape == (store.staging.slots, SLOT_WORDS)
            slots = layout.page_slots(bits)
            for position, row in enumerate(rows):
                page = staged[position * slots : (position + 1) * slots]
                np.testing.assert_array_equal(page, source.page(int(row) * 2 + unit, bits))


def test_pages_are_pinned_and_counted():
    store, source = make_store()
    assert {array.sharding.memory_kind for array in store._pages.values()} == {"pinned_host"}
    assert store.nbytes == sum(page.nbytes for layer in source.layers for u in layer.values() for page in u.values())


def test_pages_above_max_bits_are_left_out():
    seen: list[int] = []
    store, source = make_store(max_bits=4, progress=seen.append)
    kept = [layer[unit][b].nbytes for layer in source.layers for unit in layer for b in (3, 4)]
    assert store.nbytes == sum(kept) and seen == [1, 2]


@pytest.mark.parametrize("experts", [1, 6, 10**7])
def test_staging_holds_any_page_and_stays_small(experts):
    staging = StagingShape.choose(GEOMETRY, experts)
    assert all(count >= 1 for count in staging.pages.values())
    assert all(n * LAYOUTS[u].page_slots(b) <= staging.slots for (u, b), n in staging.pages.items())
    largest_page = max(x.page_slots(b) for x in LAYOUTS for b in BITS) * SLOT_WORDS * 4
    assert staging.nbytes <= max(MAX_STAGING_BYTES, largest_page)
