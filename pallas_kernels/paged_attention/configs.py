"""How the Triton kernels cut their work: by a table measured on this device, or by rule.

A table (see `pallas_kernels.tuned`) is a list of
`{"max_rows": .., "max_head_dim": .., "config": {.. fields of Config but splits ..}, "programs_an_sm": ..}`, of which
the first that fits a call in bfloat16 is used. Splits follow from `programs_an_sm`, the batch and the longest context.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.tuned import tuned_entries

_MULTIPROCESSORS = 132  # of an H100 or H200; what splits are counted for
_LONGEST_SHARE = 4096  # keys: bounds how long a program runs where the other sequences are short


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes are powers of two.

    Attributes:
        body: `vector` multiplies in registers, for all queries of a KV head at once; `matrix` tiles of them by `dot`.
        splits: shares of the keys, each a program; where there are several, a second kernel combines them.
        block_keys: keys a step; at least 16 for `matrix`.
        block_rows: of `matrix`, rows (queries x heads of a group) a tile; at least 16.
        team_words: of `vector`, words of a head that threads share, four each; the threads' next words come after them.
    """

    body: Literal["vector", "matrix"]
    splits: int = 1
    block_keys: int = 64
    block_rows: int = 64
    team_words: int = 64
    num_warps: int = 4
    num_stages: int = 1

    def __post_init__(self) -> None:
        sizes = (self.splits, self.block_keys, self.block_rows, self.team_words, self.num_warps)
        if any(size < 1 or size & (size - 1) for size in sizes):
            raise ValueError(f"{self}: sizes must be powers of two")
        if self.body == "matrix" and min(self.block_keys, self.block_rows) < 16:
            raise ValueError(f"{self}: the matrix body multiplies blocks of at least 16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Shape of a call. `exact`: float32 q, whose products must not be rounded."""

    sequences: int
    queries: int
    heads: int
    max_context: int
    geometry: KVGeometry
    exact: bool

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.heads // self.geometry.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of scores of a KV head of a sequence."""
        return self.queries * self.group


def default_config(work: Work) -> Config:
    config, programs_an_sm = _tuned(work) or _by_rule(work)
    config = dataclasses.replace(config, block_rows=max(config.block_rows, _next_power_of_two(work.group)))
    return dataclasses.replace(config, splits=_splits(work, config, programs_an_sm * _MULTIPROCESSORS))


def _tuned(work: Work) -> tuple[Config, int] | None:
    """What the device's table says, if it has an entry that fits."""
    if work.exact or work.geometry.dtype != "bfloat16":
        return None
    for entry in tuned_entries(Path(__file__).parent):
        if work.rows <= entry["max_rows"] and work.geometry.head_dim <= entry["max_head_dim"]:
            return Config(**entry["config"]), entry["programs_an_sm"]
    return None


def _by_rule(work: Work) -> tuple[Config, int]:
    """A configuration, and how many programs of it a multiprocessor should get."""
    wide = work.geometry.head_words > 64
    if work.rows <= (4 if work.exact else 2):
        return Config(body="vector", block_keys=32), 8
    rows = max(16, _next_power_of_two(work.rows))
    if work.exact:  # products of float32 are done one by one: small blocks, or they spill
        return Config(body="matrix", block_rows=min(rows, 32), block_keys=16, num_warps=8 if wide else 4), 4
    if rows <= 32:
        return Config(body="matrix", block_rows=rows, block_keys=32 if wide else 64, num_stages=2), 4
    if rows == 64 or wide:
        return Config(body="matrix", block_rows=64, block_keys=32 if wide else 64), 2
    return Config(body="matrix", block_rows=128, num_warps=8, num_stages=2), 1


def _splits(work: Work, config: Config, programs: int) -> int:
    """Enough for `programs` programs in all, none without at least two steps in the longest context."""
    tiles = 1 if config.body == "vector" else -(-work.queries // (config.block_rows // work.group))
    wanted = max(programs // (work.sequences * work.geometry.num_kv_heads * tiles), work.max_context // _LONGEST_SHARE)
    most = max(1, min(wanted, work.max_context // (2 * config.block_keys)))
    return _next_power_of_two(most // 2 + 1)


def _next_power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
