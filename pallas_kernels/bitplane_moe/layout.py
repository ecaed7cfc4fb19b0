"""The layout inside a weight page: planes, lookup table and row scales as 32-bit words.

Page `b` of a linear-block `[N, K]` holds what bit-width `b` adds: plane `b - 1` and LUT `b`; the base page (3) holds
planes 0 to 2, LUT 3 and the row scales. In order, each piece row-major:

* plane `p`: `[N, ceil(K / 32)]` words; bit `k % 32` of word `k // 32` is bit `7 - p` of the 8-bit index of column `k`
  (plane 0 is the most significant). Bits past K are zero.
* LUT `b`: `[G, 2**b / 2]` words for `G = ceil(N / lut_rows)` groups; word `j` holds float16 entries `j` (low half) and
  `j + 2**(b - 1)` (high half), so that plane 0 selects the half.
* row scales: `[N]` float32, in the base page only.

The words are padded with zeros to whole slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

MIN_BITS = 3
MAX_BITS = 8
BITS = tuple(range(MIN_BITS, MAX_BITS + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Pages of the linear-blocks of one unit: `rows` N, `cols` K, `lut_rows` rows sharing one LUT."""

    rows: int
    cols: int
    lut_rows: int
    slot_words: int

    @property
    def words_per_row(self) -> int:
        return -(-self.cols // 32)

    @property
    def plane_words(self) -> int:
        return self.rows * self.words_per_row

    @property
    def groups(self) -> int:
        return -(-self.rows // self.lut_rows)

    def planes_in_page(self, bits: int) -> tuple[int, ...]:
        return (0, 1, 2) if bits == MIN_BITS else (bits - 1,)

    def plane_offset_words(self, plane: int) -> tuple[int, int]:
        """`(page, word)`: the page that holds `plane`, and where in it the plane starts."""
        return (MIN_BITS, plane * self.plane_words) if plane < MIN_BITS else (plane + 1, 0)

    def lut_words(self, bits: int) -> int:
        return self.groups * 2 ** (bits - 1)

    def lut_offset_words(self, bits: int) -> int:
        """Where LUT `bits` starts in page `bits`."""
        return len(self.planes_in_page(bits)) * self.plane_words

    @property
    def scale_offset_words(self) -> int:
        """Where the row scales start in the base page."""
        return self.lut_offset_words(MIN_BITS) + self.lut_words(MIN_BITS)

    def page_words(self, bits: int) -> int:
        """Payload words of page `bits`, before padding."""
        return self.lut_offset_words(bits) + self.lut_words(bits) + (self.rows if bits == MIN_BITS else 0)

    def page_slots(self, bits: int) -> int:
        return -(-self.page_words(bits) // self.slot_words)

    def page_offset_slots(self, bits: int) -> int:
        """Position of page `bits` in the linear-block's row of the slot table (pages in order 3, 4, .., 8)."""
        return sum(self.page_slots(b) for b in range(MIN_BITS, bits))

    @property
    def total_slots(self) -> int:
        return self.page_offset_slots(MAX_BITS + 1)

    def resident_slots(self, bits: int) -> int:
        """M_i^b in slots: what precision `bits` occupies (pages 3..bits)."""
        return self.page_offset_slots(bits + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEGeometry:
    """Static description of the routed experts of a layer for `bitplane_moe`."""

    gate_up: BlockLayout  # rows 2I (gate first, then up), cols H
    down: BlockLayout  # rows H, cols I
    activation: str = "silu"


def pack_planes(indices: np.ndarray, planes: tuple[int, ...]) -> np.ndarray:
    """Packs bits of 8-bit indices.

    Args:
        indices: uint8 `[..., N, K]`.
        planes: which planes, 0 the most significant bit.

    Returns:
        uint32 `[..., len(planes), N, ceil(K / 32)]`.
    """
    cols = indices.shape[-1]
    padded = np.pad(indices, [(0, 0)] * (indices.ndim - 1) + [(0, -cols % 32)])
    shifts = np.array([7 - p for p in planes], np.uint8)
    bits = (padded[..., None, :, :] >> shifts[:, None, None]) & 1
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def pack_lut(lut: np.ndarray) -> np.ndarray:
    """float16 `[..., G, 2**b]` to uint32 `[..., G, 2**b / 2]`."""
    words = np.ascontiguousarray(lut).view(np.uint16).astype(np.uint32)
    half = words.shape[-1] // 2
    return words[..., :half] | (words[..., half:] << 16)


def pack_page(
    layout: BlockLayout, bits: int, indices: np.ndarray, lut: np.ndarray, row_scale: np.ndarray
) -> np.ndarray:
    """One page of each of a batch of linear-blocks.

    Args:
        indices: uint8 `[B, N, K]`, the 8-bit indices.
        lut: float16 `[B, G, 2**bits]`.
        row_scale: float32 `[B, N]`; written to the base page only.

    Returns:
        uint32 `[B, page_slots(bits) * slot_words]`.
    """
    batch = indices.shape[0]
    pieces = [pack_planes(indices, layout.planes_in_page(bits)).reshape(batch, -1), pack_lut(lut).reshape(batch, -1)]
    if bits == MIN_BITS:
        pieces.append(np.ascontiguousarray(row_scale, np.float32).view(np.uint32))
    page = np.zeros((batch, layout.page_slots(bits) * layout.slot_words), np.uint32)
    payload = np.concatenate(pieces, axis=-1)
    page[:, : payload.shape[-1]] = payload
    return page


def unpack_pages(
    layout: BlockLayout, pages: Mapping[int, np.ndarray], bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inverse of `pack_page` for one linear-block at precision `bits`.

    Args:
        pages: uint32 `[page_slots * slot_words]` for every page 3..bits.

    Returns:
        indices uint8 `[N, K]` in `0..2**bits - 1`, lut float16 `[G, 2**bits]`, row_scale float32 `[N]`.
    """
    rows, words = layout.rows, layout.words_per_row
    indices = np.zeros((rows, words * 32), np.uint8)
    for plane in range(bits):
        page, start = layout.plane_offset_words(plane)
        packed = np.ascontiguousarray(pages[page][start : start + layout.plane_words]).astype("<u4").view(np.uint8)
        indices = indices * 2 + np.unpackbits(packed.reshape(rows, -1), axis=-1, bitorder="little")
    start = layout.lut_offset_words(bits)
    lut_words = pages[bits][start : start + layout.lut_words(bits)].reshape(layout.groups, -1)
    halves = np.concatenate([lut_words & 0xFFFF, lut_words >> 16], axis=-1).astype(np.uint16)
    start = layout.scale_offset_words
    scale = np.ascontiguousarray(pages[MIN_BITS][start : start + rows]).view(np.float32)
    return indices[:, : layout.cols], halves.view(np.float16), scale


def dequantize_pages(layout: BlockLayout, pages: Mapping[int, np.ndarray], bits: int) -> np.ndarray:
    """The float32 `[N, K]` weights that pages 3..bits stand for."""
    indices, lut, scale = unpack_pages(layout, pages, bits)
    table = lut.astype(np.float32).repeat(layout.lut_rows, axis=0)[: layout.rows]
    return np.take_along_axis(table, indices.astype(np.int64), axis=1) * scale[:, None]
