"""How the Triton kernel cuts its work: by a table measured on this device, or by rule.

A table (see `pallas_kernels.tuned`) is a list of `{"max_pairs_an_expert": .., "config": {.. fields of Config but splits
..}, "programs_an_sm": ..}`, of which the first that fits a call on bfloat16 rows is used. Splits follow from
`programs_an_sm`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pallas_kernels.bitplane_moe.layout import BlockLayout
from pallas_kernels.tuned import tuned_entries

_MULTIPROCESSORS = 132  # of an H100 or H200; what splits are counted for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes of the kernel, all powers of two.

    Attributes:
        block_m: pairs of a tile, at least 8.
        block_n: rows of W, at least 16.
        block_words: words of a row decoded at a time, at least 4; fewer above 4 bits (`words_at`).
        splits: programs that share the columns of a row; their sums are added afterwards.
    """

    block_m: int = 16
    block_n: int = 64
    block_words: int = 16
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        sizes = (self.block_m, self.block_n, self.block_words, self.splits)
        if any(size < 1 or size & (size - 1) for size in sizes):
            raise ValueError(f"{self}: sizes must be powers of two")
        if self.block_m < 8 or self.block_n < 16 or self.block_words < 4:
            raise ValueError(f"{self}: tensor cores multiply blocks of at least 8 pairs, 16 rows and 4 words")

    def words_at(self, bits: int) -> int:
        """Words decoded at a time. More tables leave fewer registers, and all precisions of a kernel pay for the one
        that takes the most: with twice the words, 6 bits took 254 registers a thread in place of 165."""
        return max(4, self.block_words >> max(0, min(bits - 4, 2)))


# float32 rows: three parts of each are rows of a tile, so it holds few.
_EXACT = Config(block_m=8, block_n=32, block_words=8, num_warps=2, num_stages=2), 14


def default_config(pairs: int, num_experts: int, layout: BlockLayout, *, exact: bool) -> Config:
    """Tiles of about as many pairs as an expert gets, and enough programs to fill the chip.

    Args:
        exact: float32 rows.
    """
    mean = pairs // num_experts
    config, programs_an_sm = _EXACT if exact else _tuned(mean) or _by_rule(mean)
    block_words = min(config.block_words, max(4, 1 << (layout.words_per_row.bit_length() - 1)))
    tiles = min(pairs, num_experts + pairs // config.block_m)
    programs = tiles * -(-layout.rows // config.block_n)
    splits = 1
    while (
        2 * splits * programs <= programs_an_sm * _MULTIPROCESSORS and 2 * splits * block_words <= layout.words_per_row
    ):
        splits *= 2
    return dataclasses.replace(config, block_words=block_words, splits=splits)


def _tuned(pairs_an_expert: int) -> tuple[Config, int] | None:
    """What the device's table says, if it has an entry that fits."""
    for entry in tuned_entries(Path(__file__).parent):
        if pairs_an_expert <= entry["max_pairs_an_expert"]:
            return Config(**entry["config"]), entry["programs_an_sm"]
    return None


def _by_rule(pairs_an_expert: int) -> tuple[Config, int]:
    """A configuration, and how many programs of it a multiprocessor should get at most."""
    if pairs_an_expert <= 16:
        return Config(block_m=8 if pairs_an_expert <= 4 else 16, block_n=32, num_warps=2), 14
    # Eight warps hold the sums of many pairs without spilling, and share their tiles of x.
    block_m = 32 if pairs_an_expert <= 32 else 64
    return Config(block_m=block_m, block_n=128, block_words=8, num_warps=8, num_stages=2), 14
