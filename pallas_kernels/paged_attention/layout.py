"""How the keys and values of a KV block lie in arena slots.

A KV block is `block_size` tokens of one sequence in all layers of one attention type. Its words are ordered
`[layer, key-or-value, token, row]`; a *row* is one token's keys (or values) of all KV heads of one layer. The words
fill whole slots, which lie anywhere in the arena: word `w` of a block is in its slot number `w // slot_words`, at
column `w % slot_words`.

A bfloat16 row packs elements `d` and `d + head_dim / 2` of a head in one word (low and high half), head after head;
a float32 row has one element a word.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

KVDtype = Literal["bfloat16", "float32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """Shape of the KV blocks of one attention type. `num_layers` counts the layers of that type."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    slot_words: int
    block_size: int = 16
    dtype: KVDtype = "bfloat16"

    @property
    def head_words(self) -> int:
        return self.head_dim // 2 if self.dtype == "bfloat16" else self.head_dim

    @property
    def row_words(self) -> int:
        return self.num_kv_heads * self.head_words

    @property
    def chunk_words(self) -> int:
        """The largest piece of a row that never straddles two slots."""
        return math.gcd(self.row_words, self.slot_words)

    @property
    def block_words(self) -> int:
        """Payload of a block in words."""
        return self.num_layers * 2 * self.block_size * self.row_words

    @property
    def block_slots(self) -> int:
        return -(-self.block_words // self.slot_words)

    def row_offset_words(self, layer: int, is_value: int) -> int:
        """Word of a block at which the rows of `layer` start; token `t` of the block is `t * row_words` further."""
        return (layer * 2 + is_value) * self.block_size * self.row_words
