"""Between both products of an expert: `act(gate) * up`, its norm and its parts for the second one, in one launch."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.bitplane_moe.activation import activate
from pallas_kernels.bitplane_moe.halves import HalfRows, column_of, padded_words, row_scale
from pallas_kernels.bitplane_moe.layout import BlockLayout
from pallas_kernels.rounding import rounded_in_kernel


def gate_rows(
    sums: jax.Array, layout: BlockLayout, block_words: int, *, activation: str, exact: bool, interpret: bool
) -> HalfRows:
    """Rows for the down projection; their bounds are their L2 norms.

    Args:
        sums: float32 `[P, splits, 2I]`, to be added along `splits`; gate first.
        layout: of the down projection, `I` columns.
        block_words, exact: as for `split_rows`.
    """
    pairs, splits, _ = sums.shape
    width = 32 * padded_words(layout, block_words)
    parts = 3 if exact else 1
    static = _Static(
        splits=splits, inner=layout.cols, width=width, parts=parts, activation=activation, interpret=interpret
    )
    columns, norms = pl.pallas_call(
        functools.partial(_kernel, static=static),
        grid=(pairs,),
        out_shape=(
            jax.ShapeDtypeStruct((pairs, parts, width), jnp.float16),
            jax.ShapeDtypeStruct((pairs,), jnp.float32),
        ),
        compiler_params=plt.CompilerParams(num_warps=min(16, max(1, static.block // 512)), num_stages=1),
        interpret=interpret,
        name="gate_rows",
    )(sums)
    return HalfRows(columns, norms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    splits: int
    inner: int
    width: int
    parts: int
    activation: str
    interpret: bool

    @property
    def block(self) -> int:
        return pl.next_power_of_2(self.width)


def _kernel(sums_ref, columns_ref, norms_ref, *, static: _Static):
    """A row."""
    pair = pl.program_id(0)
    element = jnp.arange(static.block, dtype=jnp.int32)
    column = column_of(element)
    real = column < static.inner

    def total(first: int) -> jax.Array:
        loads = (plt.load(sums_ref.at[pair, s, first + column], mask=real, other=0.0) for s in range(static.splits))
        return functools.reduce(jnp.add, loads)

    hidden = activate(total(0), total(static.inner), static.activation)
    norm = jnp.sqrt(jnp.sum(hidden * hidden))
    rest = hidden * row_scale(norm)
    for part in range(static.parts):
        half = rounded_in_kernel(rest, jnp.float16, interpret=static.interpret)
        plt.store(columns_ref.at[pair, part, element], half.astype(jnp.float16), mask=element < static.width)
        rest = rest - half
    norms_ref[pair] = norm
