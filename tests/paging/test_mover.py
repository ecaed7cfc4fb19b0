"""Page moves on a device: what lands where, in which order, and what is left when something goes wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane_moe.layout import BITS
from pwjax.paging.allocator import Owner
from pwjax.paging.page_table import PageState
from tests.paging.paging_cases import LAYOUTS, NUM_BLOCKS, RandomPages, Rig, SavedPages

LARGEST_PAGE_SLOTS = max(layout.page_slots(b) for layout in LAYOUTS for b in BITS)


def cost(index: int, low: int, high: int) -> int:
    return sum(LAYOUTS[index % 2].page_slots(b) for b in range(low + 1, high + 1))


@pytest.mark.parametrize("restored", [False, True], ids=["fresh", "restored"])
def test_pages_land_bit_exact_and_in_place(restored, tmp_path):
    """300 random moves: pages bit for bit at the slots that the device's table names, in one buffer throughout."""
    rig = Rig(num_slots=330, source=SavedPages(tmp_path) if restored else RandomPages())
    if restored:  # Orbax's own array as the arena: such buffers were not always donatable
        from checkpoints.orbax_io import load_arrays, save_arrays

        save_arrays(tmp_path / "arena", {"arena": np.asarray(rig.device.state.arena)})
        rig.device.state.arena = jnp.asarray(load_arrays(tmp_path / "arena")["arena"])
    pointer = rig.arena_pointer()
    rig.load()
    rng = np.random.default_rng(0)
    for step in range(300):
        index, bits = int(rng.integers(NUM_BLOCKS)), int(rng.integers(3, 9))
        q = int(rig.table.committed[index])
        if rig.table.movable()[index]:
            if bits < q:
                rig.mover.lower([(index, bits, "offload")])
            elif bits > q and cost(index, q, bits) <= rig.allocator.free_slots:
                rig.mover.request_raise([(index, bits, "reload")])
                rig.mover.issue()
        rig.mover.commit_ready(wait=bool(rng.random() < 0.2))
        assert rig.arena_pointer() == pointer
        if step % 25 == 0:
            rig.check()
    rig.mover.commit_ready(wait=True)
    rig.check()
    assert rig.mover.pages_in_flight == 0


def test_alternating_moves_never_fail_while_the_sum_fits():
    room = max(cost(0, 3, 8), cost(1, 3, 8))
    rig = Rig(num_slots=1 + sum(cost(i, 2, 3) for i in range(NUM_BLOCKS)) + room)
    rig.load()
    for _ in range(20):
        for index in (0, 1, 2, 3):
            rig.mover.request_raise([(index, 8, "reload")])
            rig.mover.commit_ready(wait=True)
            assert rig.table.committed[index] == 8
            rig.mover.lower([(index, 3, "offload")])
    rig.check()
    assert rig.allocator.free_slots == room


def test_offload_is_immediate_and_copies_nothing():
    rig = Rig()
    rig.load(6)
    moved, free = rig.mover.bytes_moved, rig.allocator.free_slots
    commits = rig.mover.lower([(0, 4, "offload"), (5, 3, "offload")])
    assert [(c.index, c.from_bits, c.to_bits) for c in commits] == [(0, 6, 4), (5, 6, 3)]
    assert sum(c.bytes for c in commits) == (cost(0, 4, 6) + cost(5, 3, 6)) * 128
    assert rig.allocator.free_slots == free + cost(0, 4, 6) + cost(5, 3, 6)
    assert rig.mover.bytes_moved == moved
    rig.check()


def test_precision_rises_only_when_pages_are_there():
    rig = Rig()
    rig.load()
    rig.mover.request_raise([(0, 6, "reload")])
    rig.mover.issue()
    assert rig.table.committed[0] == 3 and rig.table.desired[0] == 6
    assert np.asarray(rig.device.state.bits).reshape(-1)[0] == 3
    assert rig.allocator.used_slots(Owner.IN_FLIGHT) == cost(0, 3, 6)
    commits = rig.mover.commit_ready(wait=True)
    assert [(c.from_bits, c.to_bits, c.reason) for c in commits] == [(b, b + 1, "reload") for b in (3, 4, 5)]
    assert rig.allocator.used_slots(Owner.IN_FLIGHT) == 0
    rig.check()


def test_batches_are_bounded_and_commit_in_the_order_of_issue():
    rig = Rig(max_batches=2, staging_slots=LARGEST_PAGE_SLOTS)
    rig.load()
    kinds, fetch = [], rig.store.fetch

    def counted(kind, rows):
        kinds.append((kind, rows.tolist()))
        assert len(rig.mover._flight) < 2
        return fetch(kind, rows)

    rig.store.fetch = counted
    rig.mover.request_raise([(i, 5, "reload") for i in range(0, NUM_BLOCKS, 2)])
    rig.mover.issue()
    assert len(kinds) == 2
    commits = rig.mover.commit_ready(wait=True)
    issued = [(row * 2 + unit, bits) for (unit, bits), rows in kinds for row in rows]
    assert [(c.index, c.to_bits) for c in commits] == issued
    for (unit, bits), rows in kinds:
        assert 1 <= len(rows) <= rig.store.staging.pages[unit, bits]
    rig.check()


def test_drop_waiting_gives_slots_back():
    rig = Rig(max_batches=1, staging_slots=LARGEST_PAGE_SLOTS)
    rig.load()
    free = rig.allocator.free_slots
    rig.mover.request_raise([(i, 8, "reload") for i in range(4)])
    rig.mover.issue()
    flying = sum(rig.table.page_slots(i, b) for i in range(4) for b in range(4, 9)) - rig.mover.drop_waiting()
    assert rig.allocator.used_slots(Owner.IN_FLIGHT) == flying > 0
    rig.mover.commit_ready(wait=True)
    rig.check()
    np.testing.assert_array_equal(rig.table.desired, rig.table.committed)
    assert rig.allocator.free_slots == free - flying


def test_no_page_overtakes_a_lower_one_of_its_block():
    """Page 5 of block 2 must not fly with page 5 of block 0 while its page 4 waits: dropping that would strand it."""
    rig = Rig(max_batches=1, staging_slots=8 * LARGEST_PAGE_SLOTS)
    rig.load()
    rig.mover.request_raise([(0, 4, "reload")])
    rig.mover.commit_ready(wait=True)
    rig.mover.request_raise([(0, 5, "reload"), (2, 5, "reload")])
    rig.mover.issue()
    rig.mover.drop_waiting()
    rig.mover.commit_ready(wait=True)
    assert (rig.table.committed[0], rig.table.committed[2]) == (5, 3)
    assert rig.table.state(2, 5) == PageState.HOST
    rig.check()
    rig.mover.request_raise([(2, 5, "reload")])
    rig.mover.commit_ready(wait=True)
    rig.check()


def test_lower_after_a_raise_was_dropped_and_raise_again():
    rig = Rig()
    rig.load(5)
    rig.mover.request_raise([(3, 8, "reload")])
    rig.mover.drop_waiting()
    rig.mover.lower([(3, 3, "offload")])
    rig.mover.request_raise([(3, 6, "reload")])
    rig.mover.commit_ready(wait=True)
    assert rig.table.committed[3] == 6
    rig.check()


@pytest.mark.parametrize(
    ("move", "error"), [((0, 8), MemoryError), ((0, 3), ValueError), ((0, 2), ValueError), ((1, 4), ValueError)]
)
def test_a_refused_raise_takes_nothing(move, error):
    rig = Rig(num_slots=1 + sum(cost(i, 2, 3) for i in range(NUM_BLOCKS)) + cost(1, 3, 5))
    rig.load()
    rig.mover.request_raise([(1, 4, "reload")])  # in flight while the other is asked for
    before = rig.allocator.free_slots, rig.table.states.copy(), rig.table.desired.copy()
    with pytest.raises(error):
        rig.mover.request_raise([(*move, "reload")])
    assert rig.allocator.free_slots == before[0]
    np.testing.assert_array_equal(rig.table.states, before[1])
    np.testing.assert_array_equal(rig.table.desired, before[2])
    rig.mover.commit_ready(wait=True)
    rig.check()


def test_updates_do_not_compile():
    from pwjax.engine.compilations import CompilationCounter

    rig = Rig()
    with CompilationCounter() as counter:
        rig.load(8)
        rig.mover.lower([(i, 3, "offload") for i in range(NUM_BLOCKS)])
        rig.mover.request_raise([(0, 4, "reload")])
        rig.mover.commit_ready(wait=True)
        assert counter.count == 0
        jax.jit(lambda x: x + 1)(np.zeros(7))
        assert counter.count == 1  # the counter counts
