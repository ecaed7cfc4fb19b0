"""Exchanges: hot pages are staged while cold ones still serve, and change places at one boundary."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pwjax.paging.allocator import Owner
from pwjax.paging.page_table import PageState
from pwjax.paging.trades import choose_trades
from tests.paging.paging_cases import LAYOUTS, NUM_BLOCKS, Rig

PAGES_PER_BATCH = {(unit, bits): 2 for unit in (0, 1) for bits in range(3, 9)}


def down(index: int, from_bits: int, to_bits: int) -> tuple[int, int, int, int]:
    layout = LAYOUTS[index % 2]
    return index, from_bits, to_bits, layout.resident_slots(from_bits) - layout.resident_slots(to_bits)


def up(index: int, from_bits: int) -> tuple[int, int, int, int]:
    return index, from_bits, from_bits + 1, -LAYOUTS[index % 2].page_slots(from_bits + 1)


@st.composite
def plans(draw):
    """Distinct linear-blocks at 4 or 5 bits: some fall, then one rises, and so on."""
    blocks = draw(st.permutations(range(30)))
    return [down(i, 5, 4) if draw(st.booleans()) else up(i, 4) for i in blocks]


@given(plans(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_chosen_trades_pay_for_themselves_and_fit(moves, max_batches):
    trades = choose_trades(moves, PAGES_PER_BATCH, max_batches)
    slots = {(index, to): n for index, _, to, n in moves}
    ups = [pair for pages in trades.ups.values() for pair in pages]
    assert sum(slots[pair] for pair in (*trades.downs, *ups)) >= 0
    assert len(trades.ups) <= max_batches
    for (unit, bits), pages in trades.ups.items():
        assert 1 <= len(pages) <= 2 and all((index % 2, to) == (unit, bits) for index, to in pages)
    assert trades.num_ups == len(ups)
    assert trades.indices == {index for index, _ in (*trades.downs, *ups)}


def full_rig() -> Rig:
    """All at 4 bits, blocks 0 and 4 at 5, and not one slot free."""
    layouts = [LAYOUTS[i % 2] for i in range(NUM_BLOCKS)]
    slots = sum(x.resident_slots(4) for x in layouts) + 2 * LAYOUTS[0].page_slots(5)
    rig = Rig(num_slots=1 + slots)
    rig.load(4)
    rig.mover.request_raise([(0, 5, "reload"), (4, 5, "reload")])
    rig.mover.commit_ready(wait=True)
    assert rig.allocator.free_slots == 0
    return rig


def test_an_exchange_needs_no_free_slot_and_happens_at_once():
    rig = full_rig()
    pointer, bits = rig.arena_pointer(), rig.table.committed.copy()
    assert rig.mover.request_exchange([down(0, 5, 4), up(2, 4), down(4, 5, 4), up(6, 4)])
    np.testing.assert_array_equal(rig.table.committed, bits)  # cold pages serve until hot ones are there
    assert not rig.mover.movable()[[0, 2]].any() and rig.mover.movable()[1]
    rig.mover.commit_ready(wait=True)
    exchanged = rig.mover.exchanged_bits
    assert exchanged >= 1 and rig.table.committed.sum() == bits.sum()
    assert rig.table.committed[2] == 5 and rig.table.committed[0] == 4
    assert rig.allocator.free_slots == 0 and rig.arena_pointer() == pointer
    assert rig.mover.movable().all() and rig.mover.pages_in_flight == 0
    rig.check()


def test_a_cancelled_exchange_changes_nothing():
    rig = full_rig()
    bits, states = rig.table.committed.copy(), rig.table.states.copy()
    assert rig.mover.request_exchange([down(0, 5, 4), up(2, 4)])
    assert rig.mover.cancel_exchange() and not rig.mover.cancel_exchange()
    assert rig.mover.commit_ready(wait=True) == []
    np.testing.assert_array_equal(rig.table.committed, bits)
    np.testing.assert_array_equal(rig.table.states, states)
    rig.check()
    rig.mover.lower([(0, 3, "offload")])
    rig.check()


def test_offloads_beside_a_pending_exchange():
    """KV takes what another block gives up while the exchange waits; the exchange still has its own slots."""
    rig = full_rig()
    assert rig.mover.request_exchange([down(0, 5, 4), up(2, 4)])
    rig.mover.lower([(8, 3, "offload")])
    rig.allocator.allocate(rig.allocator.free_slots, Owner.KV)
    rig.mover.commit_ready(wait=True)
    assert (rig.table.committed[0], rig.table.committed[2], rig.table.committed[8]) == (4, 5, 3)
    assert rig.table.state(8, 4) == PageState.HOST


@pytest.mark.parametrize("pending", ["flight", "exchange"])
def test_one_exchange_at_a_time_and_none_beside_page_ins(pending):
    rig = full_rig()
    rig.mover.lower([(4, 4, "offload")])
    if pending == "flight":
        rig.mover.request_raise([(6, 5, "reload")])
    else:
        assert rig.mover.request_exchange([down(0, 5, 4), up(2, 4)])
    assert not rig.mover.request_exchange([down(0, 5, 4), up(10, 4)])
    rig.mover.commit_ready(wait=True)
    rig.check()
