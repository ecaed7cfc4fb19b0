"""The layout inside a weight page: planes, lookup table and row scales as 32-bit words.

Page `b` of a linear-block `[N, K]` holds what bit-width `b` adds: plane `b - 1` and LUT `b`; the base page (3) holds
planes 0 to 2, LUT 3 and the row scales, one piece after the other. The words are padded with zeros to whole slots.

It is made for a kernel that looks weights up by byte permutation (PTX `prmt`), four at a time: the top three bits of an
index choose among the eight entries of a table, each further bit between two tables. A word holds 32 columns of a row;
column `4 * g + m` is member `m` (0..3) of group `g` (0..7).

* planes 0 to 2 are three words together. In word q < 3, bits `4 * n .. 4 * n + 2` are the top three bits of the column
  `8 * q + n`, ready to select with; the fourth bits `4 * n + 3` of words 0, 1, 2 are bits 0, 1, 2 of those of column
  `24 + n`. (Plane 0 is the most significant.)
* plane `p` > 2: bit `8 * m + 7 - g` is bit `7 - p` of the 8-bit index of column `4 * g + m`: shifted left by `g`, the
  sign of byte `m` is that of member `m`.
* the words of a plane lie as `[W / run_words, N, run_words]` (W words a row): what a block of rows reads at a time is
  contiguous. Bits past K are zero.
* LUT `b` is `[G, 2**(b - 1)]` words for `G = ceil(N / lut_rows)` groups of rows. Up to 6 bits: for each value of the
  bits below the top three, four words: the low bytes of the eight float16 entries (two words), then the high bytes.
  Above: two entries a word, in order of index.
* row scales: `[N]` float32, in the base page only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

MIN_BITS = 3
MAX_BITS = 8
BITS = tuple(range(MIN_BITS, MAX_BITS + 1))
MAX_BYTE_TABLE_BITS = 6
"""Up to here a LUT is stored as separate low and high bytes, to be looked up by byte permutation."""

_NIBBLE_SHIFTS = 4 * np.arange(8, dtype=np.uint32)
# Of member m of group g, `[8, 4]`: the sign of byte m once the word is shifted left by g.
_SIGN_SHIFTS = 8 * np.arange(4, dtype=np.uint32) + 7 - np.arange(8, dtype=np.uint32)[:, None]


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
    def run_words(self) -> int:
        """Words of a row that lie together in a plane, never across two slots."""
        return math.gcd(self.words_per_row, self.slot_words, 4)

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

    def plane_start_words(self, plane: int) -> int:
        """Where a plane starts, counted from the linear-block's first slot."""
        page, offset = self.plane_offset_words(plane)
        return self.page_offset_slots(page) * self.slot_words + offset

    def lut_start_words(self, bits: int) -> int:
        """Where LUT `bits` starts, counted from the linear-block's first slot."""
        return self.page_offset_slots(bits) * self.slot_words + self.lut_offset_words(bits)

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
    max_bits: int = MAX_BITS  # no linear-block is ever committed at more

    @property
    def total_slots(self) -> int:
        return self.gate_up.total_slots + self.down.total_slots


def pack_planes(layout: BlockLayout, indices: np.ndarray, planes: tuple[int, ...]) -> np.ndarray:
    """Packs bits of 8-bit indices.

    Args:
        indices: uint8 `[B, N, K]`.
        planes: (0, 1, 2), or one of the others.

    Returns:
        uint32 `[B, len(planes) * plane_words]`.
    """
    batch, rows, cols = indices.shape
    padded = np.pad(indices, ((0, 0), (0, 0), (0, -cols % 32)))
    groups = padded.reshape(batch, rows, -1, 8, 4)
    words = _pack_base(groups >> 5) if len(planes) > 1 else [_pack_signs((groups >> (7 - max(planes))) & 1)]
    runs = (word.reshape(batch, rows, -1, layout.run_words).swapaxes(1, 2).reshape(batch, -1) for word in words)
    return np.concatenate(list(runs), axis=-1)


def _pack_base(top: np.ndarray) -> list[np.ndarray]:
    """Three words `[B, N, W]` from the top three bits of every index, uint8 `[B, N, W, 8, 4]`."""
    top = top.reshape(*top.shape[:3], 4, 8).astype(np.uint32)  # nibble n of word q
    nibbles = (top[..., q, :] | ((top[..., 3, :] >> q) & 1) << 3 for q in range(3))
    return [(nibble << _NIBBLE_SHIFTS).sum(-1, dtype=np.uint32) for nibble in nibbles]


def _pack_signs(bits: np.ndarray) -> np.ndarray:
    """One word `[B, N, W]` from a bit of every index, uint8 `[B, N, W, 8, 4]`."""
    return (bits.astype(np.uint32) << _SIGN_SHIFTS).sum((-2, -1), dtype=np.uint32)


def unpack_planes(layout: BlockLayout, pages: Mapping[int, Any], bits: int) -> Any:
    """Inverse of `pack_planes`: uint8 `[B, N, K]`, the top `bits` bits of every index.

    Args:
        pages: uint32 `[B, page_slots(b) * slot_words]` for every page 3..bits, all NumPy arrays or all JAX ones; so is
            what is returned.
    """
    xp = pages[MIN_BITS].__array_namespace__()

    def plane(number: int) -> Any:
        page, start = layout.plane_offset_words(number)
        words = pages[page][:, start : start + layout.plane_words]
        runs = words.reshape(len(words), -1, layout.rows, layout.run_words)
        return runs.swapaxes(1, 2).reshape(len(words), layout.rows, -1, 1)

    base = [plane(number) for number in range(3)]
    first, second, third = ((word >> (_NIBBLE_SHIFTS + 3)) & 1 for word in base)
    last = first | second << 1 | third << 2
    # Bytes as soon as possible: a layer of a large model has billions of indices.
    indices = xp.concat([*((word >> _NIBBLE_SHIFTS) & 7 for word in base), last], axis=-1).astype(np.uint8)
    for number in range(3, bits):
        indices = indices * 2 + ((plane(number) >> _SIGN_SHIFTS.reshape(-1)) & 1).astype(np.uint8)
    return indices.reshape(*indices.shape[:2], -1)[..., : layout.cols]


def pack_lut(lut: np.ndarray) -> np.ndarray:
    """float16 `[..., G, 2**b]` to uint32 `[..., G, 2**b / 2]`."""
    lut = np.ascontiguousarray(lut)
    leading = lut.shape[:-1]
    if lut.shape[-1] <= 2**MAX_BYTE_TABLE_BITS:
        tables = lut.reshape(*lut.shape[:-1], 8, -1).swapaxes(-1, -2)  # entry = top three bits, then the others
        lut = np.ascontiguousarray(tables).view(np.uint8).reshape(*tables.shape, 2).swapaxes(-1, -2)
    return np.ascontiguousarray(lut).view("<u4").astype(np.uint32, copy=False).reshape(*leading, -1)


def unpack_lut(words: np.ndarray) -> np.ndarray:
    """Inverse of `pack_lut`."""
    data = np.ascontiguousarray(words).astype("<u4", copy=False)
    lut = data.view(np.float16)
    if lut.shape[-1] <= 2**MAX_BYTE_TABLE_BITS:
        halves = data.view(np.uint8).reshape(*words.shape[:-1], -1, 2, 8)
        tables = np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.float16)[..., 0]
        lut = tables.swapaxes(-1, -2).reshape(lut.shape)
    return lut


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
    pieces = [pack_planes(layout, indices, layout.planes_in_page(bits)), pack_lut(lut).reshape(batch, -1)]
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
    indices = unpack_planes(layout, {b: page[None] for b, page in pages.items()}, bits)[0]
    start = layout.lut_offset_words(bits)
    lut = unpack_lut(pages[bits][start : start + layout.lut_words(bits)].reshape(layout.groups, -1))
    start = layout.scale_offset_words
    scale = np.ascontiguousarray(pages[MIN_BITS][start : start + layout.rows]).view(np.float32)
    return indices, lut, scale


def dequantize_pages(layout: BlockLayout, pages: Mapping[int, np.ndarray], bits: int) -> np.ndarray:
    """The float32 `[N, K]` weights that pages 3..bits stand for."""
    indices, lut, scale = unpack_pages(layout, pages, bits)
    table = lut.astype(np.float32).repeat(layout.lut_rows, axis=0)[: layout.rows]
    return np.take_along_axis(table, indices.astype(np.int64), axis=1) * scale[:, None]
