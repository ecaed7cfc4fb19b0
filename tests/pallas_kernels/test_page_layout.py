"""Pages, and the operands that are laid out to meet them, against plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane_moe.bytes import as_halves, permute_bytes, spread_signs
from pallas_kernels.bitplane_moe.halves import column_of, row_scale, split_rows
from pallas_kernels.bitplane_moe.layout import BITS, BlockLayout, pack_lut, pack_page, unpack_lut, unpack_pages


@pytest.mark.parametrize("rows, cols, slot_words", [(64, 80, 128), (44, 96, 100), (22, 40, 64), (256, 256, 16)])
def test_pages_give_back_what_was_packed(rows: int, cols: int, slot_words: int) -> None:
    layout = BlockLayout(rows=rows, cols=cols, lut_rows=4, slot_words=slot_words)
    rng = np.random.default_rng(rows)
    indices = rng.integers(0, 256, (2, rows, cols)).astype(np.uint8)
    scale = rng.random((2, rows)).astype(np.float32)
    luts = {b: rng.normal(size=(2, layout.groups, 2**b)).astype(np.float16) for b in BITS}
    pages = {b: pack_page(layout, b, indices, luts[b], scale) for b in BITS}
    for b in BITS:
        found, lut, scales = unpack_pages(layout, {p: page[1] for p, page in pages.items() if p <= b}, b)
        np.testing.assert_array_equal(found, indices[1] >> (8 - b))
        np.testing.assert_array_equal(lut, luts[b][1])
        np.testing.assert_array_equal(scales, scale[1])


def test_where_bits_lie_by_hand() -> None:
    """One weight at a time, from the description of the layout."""
    layout = BlockLayout(rows=1, cols=32, lut_rows=1, slot_words=1)
    for column in range(32):
        indices = np.zeros((1, 1, 32), np.uint8)
        indices[..., column] = 0b101_10000
        lut = np.zeros((1, 1, 8), np.float16)
        base = pack_page(layout, 3, indices, lut, np.ones((1, 1), np.float32))[0, :3]
        quarter, nibble = divmod(column, 8)
        if quarter < 3:
            want = np.where(np.arange(3) == quarter, 0b101 << 4 * nibble, 0)
        else:
            want = np.array([1, 0, 1]) << (4 * nibble + 3)
        np.testing.assert_array_equal(base, want.astype(np.uint32))
        plane = pack_page(layout, 4, indices, np.zeros((1, 1, 16), np.float16), np.ones((1, 1), np.float32))[0, 0]
        group, member = divmod(column, 4)
        assert plane == 1 << (8 * member + 7 - group)


@pytest.mark.parametrize("bits", BITS)
def test_tables_of_bytes(bits: int) -> None:
    lut = np.random.default_rng(bits).normal(size=(3, 2**bits)).astype(np.float16)
    words = pack_lut(lut)
    assert words.shape == (3, 2 ** (bits - 1)) and words.dtype == np.uint32
    np.testing.assert_array_equal(unpack_lut(words), lut)
    if bits <= 6:  # entry 0b101 of the table of the lowest value of the other bits
        number = int(lut[1, 5 << (bits - 3)].view(np.uint16))
        assert words[1, 1] >> 8 & 255 == number & 255 and words[1, 3] >> 8 & 255 == number >> 8


def test_byte_instructions() -> None:
    rng = np.random.default_rng(0)
    low, high = (rng.integers(-(2**31), 2**31, 64).astype(np.int32) for _ in range(2))
    selector = rng.integers(0, 2**16, 64).astype(np.int32) & 0x7777
    source = np.concatenate([low.view(np.uint8).reshape(-1, 4), high.view(np.uint8).reshape(-1, 4)], axis=1)
    want = np.stack([source[np.arange(64), selector >> 4 * i & 7] for i in range(4)], axis=1)
    got = np.asarray(permute_bytes(jnp.asarray(low), jnp.asarray(high), jnp.asarray(selector), interpret=True))
    np.testing.assert_array_equal(got.view(np.uint8).reshape(-1, 4), want)
    signs = np.asarray(spread_signs(jnp.asarray(low), interpret=True))
    np.testing.assert_array_equal(signs.view(np.uint8), np.where(low.view(np.int8) < 0, 255, 0))
    np.testing.assert_array_equal(
        np.asarray(as_halves(jnp.asarray(low))).view(np.uint16), low.view(np.uint16).reshape(-1, 2)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_of_a_row_add_up_to_it(dtype: str) -> None:
    """From 1e-30 to 1e30, with outliers of 1e3; zeros stay zero, and NaN stays in its row."""
    layout = BlockLayout(rows=8, cols=80, lut_rows=1, slot_words=64)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(6, 80)) * np.array([1, 1e-30, 1e30, 0, 1, 1])[:, None]
    x[4, 7] = 1e3
    x[5, 3] = np.nan
    x = jnp.asarray(x, dtype)
    bounds = jnp.max(jnp.abs(x), axis=1).astype(jnp.float32)
    rows = jax.jit(lambda x, bounds: split_rows(x, bounds, layout, 8, exact=dtype == "float32"))(x, bounds)
    assert rows.columns.shape == (6, 3 if dtype == "float32" else 1, 256)
    values = (
        np.asarray(rows.columns, np.float64).sum(axis=1)
        * np.asarray(row_scale(bounds, inverse=True), np.float64)[:, None]
    )
    column = np.arange(80)
    w, g, s, j = column // 32, column // 4 % 8, column // 2 % 2, column % 2
    element = 128 * (w // 4) + 16 * g + 8 * s + 2 * (w % 4) + j
    np.testing.assert_array_equal(column_of(element), column)
    found = values[:, element]
    want = np.asarray(x, np.float64)
    largest = np.abs(want).max(axis=1, keepdims=True)
    assert (np.abs(found - want)[:5] <= largest[:5] * 2.0**-26).all()
    assert np.isnan(found[5, 3]) and not np.isnan(found[:5]).any()
