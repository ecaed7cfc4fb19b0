"""What the host sends for a step: one array, so one copy to the device.

A copy waits for the step that runs, and the next step waits for the copy: with an array a field the device would stand
still for five of them between any two steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Columns of `StepInputs.sequences`.
ROW, START, LENGTH, FROM_DEVICE, TOP_K, SEED = range(6)


class StepInputs(NamedTuple):
    """The fields; on the host they are views of the array that is sent.

    sequences: int32 `[S, 6]`: row (max_num_seqs is padding), position of the first token, number of real tokens,
        whether the token is the row's newest on the device, top_k, seed.
    sampling: float32 `[S, 3]`: temperature, top_p, min_p.
    tokens: int32 `[S, Q]`.
    targets: int32 `[S, Q]`, the tokens to score; `[S, 0]` where a step doesn't score.
    kv_delta: int32 `[P, 2 + block_slots]`: row, block and slots of every new KV block; row max_num_seqs is padding.
    """

    sequences: Any
    sampling: Any
    tokens: Any
    targets: Any
    kv_delta: Any


@dataclasses.dataclass(frozen=True)
class StepShape:
    """`sequences` S and `tokens` Q of a compiled step; `score` says whether it returns nats."""

    sequences: int
    tokens: int
    score: bool = False

    def kv_delta_rows(self, block_size: int) -> int:
        """Blocks that such a step can need at most: a chunk may start in the middle of one."""
        return self.sequences * (-(-self.tokens // block_size) + (self.tokens > 1))

    def inputs(self, block_size: int, block_slots: int) -> InputLayout:
        """How its inputs lie in one array, given KV blocks of `block_size` tokens in `block_slots` slots."""
        return InputLayout(
            StepInputs(
                sequences=(self.sequences, 6),
                sampling=(self.sequences, 3),
                tokens=(self.sequences, self.tokens),
                targets=(self.sequences, self.tokens if self.score else 0),
                kv_delta=(self.kv_delta_rows(block_size), 2 + block_slots),
            )
        )


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """`StepInputs` one after the other in an int32 array; float32 fields by their bits.

    Attributes:
        shapes: of the fields.
    """

    shapes: StepInputs

    @property
    def words(self) -> int:
        """Length of the array."""
        return sum(map(math.prod, self.shapes))

    def _fields(self, packed: Any) -> StepInputs:
        fields, end = [], 0
        for shape in self.shapes:
            start, end = end, end + math.prod(shape)
            fields.append(packed[start:end].reshape(shape))
        return StepInputs(*fields)

    def padding(self, rows: int) -> tuple[np.ndarray, StepInputs]:
        """A new array for a step of nothing but padding, and views of its fields to fill in.

        Args:
            rows: of the per-sequence tables; row number `rows` is padding.
        """
        packed = np.zeros(self.words, np.int32)
        fields = self._fields(packed)
        fields = fields._replace(sampling=fields.sampling.view(np.float32))
        fields.sequences[:, ROW] = rows
        fields.sampling[:, 1] = 1.0
        fields.kv_delta[:, 0] = rows
        return packed, fields

    def unpack(self, packed: jax.Array) -> StepInputs:
        """The fields of an array on the device."""
        fields = self._fields(packed)
        return fields._replace(sampling=lax.bitcast_convert_type(fields.sampling, jnp.float32))
