"""Random linear-blocks: what lies in the arena is what the dense weights say."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.bitplane_moe import reference
from pallas_kernels.bitplane_moe.layout import MAX_BITS, BlockLayout
from pallas_kernels.testing.moe_cases import GARBAGE_SLOT, POISON
from pwjax.bench.blocks import SPARE_SLOTS, RandomBlocks, scattered


@pytest.mark.parametrize("lut_rows", [1, 32])
def test_arena_and_weights_agree(lut_rows):
    rng = np.random.default_rng(0)
    layouts = [
        BlockLayout(rows=rows, cols=cols, lut_rows=lut_rows, slot_words=64) for rows, cols in ((24, 40), (40, 96))
    ]
    units = [RandomBlocks.draw(rng, layout, count, MAX_BITS) for layout, count in zip(layouts, (2, 1), strict=True)]
    bits = rng.integers(3, MAX_BITS + 1, (2, 3, 2))
    arena, tables = scattered(rng, units, bits)
    decoders = [jax.jit(functools.partial(reference.decode_block, layout=layout)) for layout in layouts]
    used = []
    for (layer, expert, u), b in np.ndenumerate(bits):
        unit, row = units[u], np.asarray(tables[u][layer, expert])
        resident = unit.layout.resident_slots(int(b))
        assert (row[resident:] == GARBAGE_SLOT).all()
        used += row[:resident].tolist()
        decoded = decoders[u](tables[u][layer, expert], np.int32(b), arena)
        np.testing.assert_array_equal(decoded, unit.weights(expert % len(unit.indices), int(b)))
    assert len(set(used)) == len(used) == len(arena) - SPARE_SLOTS
    spare = np.setdiff1d(np.arange(len(arena)), used)
    assert (np.asarray(arena)[spare] == POISON).all()


def test_weights_have_the_scale_of_a_trained_model():
    layout = BlockLayout(rows=64, cols=256, lut_rows=1, slot_words=64)
    blocks = RandomBlocks.draw(np.random.default_rng(0), layout, 1, 4)
    assert all((np.diff(lut.astype(np.float32), axis=-1) >= 0).all() for lut in blocks.luts.values())
    assert float(np.std(blocks.weights(0, 4))) == pytest.approx(256**-0.5, rel=0.15)
