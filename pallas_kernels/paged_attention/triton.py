"""`paged_attention` for NVIDIA GPUs: Pallas, Triton backend.

A program attends for the heads that share one KV head, over one of `splits` shares of the keys that its queries see,
with an online softmax; where there are several shares, a second kernel combines them. It has two bodies. *vector* (few
queries, bound by memory) multiplies in registers and needs no barrier; *matrix* multiplies tiles of queries by `dot`.

A bfloat16 word holds elements d and d + D/2 of a head, so heads are handled as two halves: the score is the sum of two
products, and the output has two accumulators. float32 heads are one part.

Keys and values are read straight from their slots by pointer loads (`.at[slot, column]`, never a flat index, which
would pass 2**31 in a large arena). In the steps where some key is not seen, positions are clamped to keys that are: a
load needs no mask, and what lies in a block's tail is not read. The layer is an operand: equal layers share a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention.configs import Config, Work, default_config
from pallas_kernels.paged_attention.layout import KVGeometry

_MASKED = -1e30  # peak of no score: finite, so that its difference with itself is 0 and not NaN


def paged_attention(
    q: jax.Array,
    arena: jax.Array,
    kv_table: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    length: jax.Array,
    *,
    layer: int,
    geometry: KVGeometry,
    scale: float,
    window: int,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """See `api.paged_attention`. bfloat16 q meets bfloat16 keys and values as it is, and float32 ones in TF32."""
    sequences, queries, heads, _ = q.shape
    work = Work(
        sequences=sequences,
        queries=queries,
        heads=heads,
        max_context=kv_table.shape[1] * geometry.block_size,
        geometry=geometry,
        exact=q.dtype == jnp.float32,
    )
    config = config or default_config(work)
    static = _Static(work=work, config=config, scale=scale, window=window, interpret=interpret)
    return _attend(jnp.int32(layer), rows, start, length, kv_table, q, arena, static=static)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    work: Work
    config: Config
    scale: float
    window: int
    interpret: bool

    @property
    def geometry(self) -> KVGeometry:
        return self.work.geometry

    @property
    def group(self) -> int:
        return self.work.group

    @property
    def tile_queries(self) -> int:
        return self.work.queries if self.config.body == "vector" else self.config.block_rows // self.group

    @property
    def parts(self) -> int:
        return 2 if self.geometry.dtype == "bfloat16" else 1

    @property
    def width(self) -> int:
        """`head_words` padded to a power of two that `dot` takes."""
        return max(16, pl.next_power_of_2(self.geometry.head_words))

    @property
    def vector_axes(self) -> tuple[int, int, int, int, int]:
        """Runs, keys of a run, pieces of a head, teams, and words of a piece: see `_vector_kernel`."""
        geometry, team_words = self.geometry, min(self.config.team_words, self.width)
        teams = self.config.num_warps * 128 // team_words
        keys, run = self.config.block_keys // teams, 1
        if keys < 1:
            raise ValueError(f"{self.config}: a step has fewer keys than there are teams, {teams}")
        if geometry.slot_words % geometry.row_words == 0:
            run = math.gcd(keys, geometry.slot_words // geometry.row_words, geometry.block_size)
        return keys // run, run, self.width // team_words, teams, team_words

    @property
    def operand_dtype(self) -> Any:
        """What `dot` multiplies: bfloat16 where both sides are, otherwise float32."""
        rounded = self.geometry.dtype == "bfloat16" and not self.work.exact
        return jnp.bfloat16 if rounded else jnp.float32

    def exp(self, x: jax.Array) -> jax.Array:
        """e ** (scale * x). The library's exp2 would spend instructions on results too small to matter."""
        x = x * (self.scale * math.log2(math.e))
        if self.interpret:
            return jnp.exp2(x)
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        assembly = "ex2.approx.ftz.f32 $0, $1;"
        return plt.elementwise_inline_asm(assembly, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[kind])[0]


@functools.partial(jax.jit, static_argnames="static")  # traced and lowered once for all layers
def _attend(layer, rows, start, length, kv_table, q, arena, *, static: _Static) -> jax.Array:
    sequences, queries, heads, head_dim = q.shape
    config = static.config
    out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    if config.splits > 1:
        lead = (sequences, queries, heads, config.splits)
        out_shape = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*lead, head_dim), lead, lead)]
    outputs = pl.pallas_call(
        functools.partial(_vector_kernel if config.body == "vector" else _matrix_kernel, static=static),
        # Heads first: programs that run at the same time then read whole rows.
        grid=(static.geometry.num_kv_heads, config.splits, pl.cdiv(queries, static.tile_queries), sequences),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=static.interpret,
        name="paged_attention",
    )(layer, rows, start, length, kv_table, q, arena)
    return _combine(*outputs, dtype=q.dtype, static=static) if config.splits > 1 else outputs[0]


class _Job(NamedTuple):
    """What a program does, in int32 scalars: keys `[begin, end)`, of which those before `oldest` are not to be read."""

    sequence: jax.Array
    row: jax.Array
    kv_head: jax.Array
    split: jax.Array
    first_query: jax.Array
    start: jax.Array
    length: jax.Array
    oldest: jax.Array
    begin: jax.Array
    end: jax.Array

    def clamped(self, position: jax.Array) -> jax.Array:
        """The nearest position that may be read."""
        return jnp.maximum(jnp.minimum(position, self.end - 1), self.oldest)


def _job(rows_ref, start_ref, length_ref, static: _Static) -> _Job:
    kv_head, split, tile, sequence = (pl.program_id(axis) for axis in range(4))
    start, length = start_ref[sequence], length_ref[sequence]
    first_query = (pl.num_programs(2) - 1 - tile) * static.tile_queries  # tiles that see the most keys first
    # A tile without a real query has no keys, so its row of the table, which may not exist, is not read.
    stop = jnp.where(first_query < length, start + jnp.minimum(first_query + static.tile_queries, length), 0)
    oldest = jnp.maximum(start + first_query - static.window + 1, 0) if static.window else jnp.int32(0)
    begin = oldest - _divide(oldest, static.geometry.block_size)[1]
    share = _ceil_div(stop - begin, static.config.block_keys * static.config.splits) * static.config.block_keys
    begin = begin + split * share
    end = jnp.minimum(begin + share, stop)
    return _Job(sequence, rows_ref[sequence], kv_head, split, first_query, start, length, oldest, begin, end)


def _walk(job: _Job, static: _Static, step: Callable[..., Any], carry: Any) -> Any:
    """Runs `step(index, carry, masked=..)` over the keys. In the middle every row sees every key: nothing is masked."""
    keys = static.config.block_keys
    steps = _ceil_div(job.end - job.begin, keys)
    everyone = jnp.minimum(job.start + job.first_query + 1, job.end)  # the first row sees the keys before this one
    full = _divide(jnp.maximum(everyone - job.begin, 0), keys)[0]
    partial = jnp.int32(0)
    if static.window:  # the last row sees the keys from here on
        first = job.start + job.first_query + static.tile_queries - static.window
        partial = jnp.minimum(_ceil_div(first - job.begin, keys), full)
        carry = lax.fori_loop(0, partial, functools.partial(step, masked=True), carry)
    carry = lax.fori_loop(partial, full, functools.partial(step, masked=False), carry)
    return lax.fori_loop(full, steps, functools.partial(step, masked=True), carry)


def _ceil_div(x: jax.Array, divisor: int) -> jax.Array:
    """Of int32; 0 where it is negative."""
    return _divide(jnp.maximum(x, 0) + (divisor - 1), divisor)[0]


def _divide(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of int32 that is not negative; unsigned, so that powers of two are shifts and masks."""
    x, by = x.astype(jnp.uint32), jnp.uint32(divisor)
    return lax.div(x, by).astype(jnp.int32), lax.rem(x, by).astype(jnp.int32)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """int32 indices along `axis`, of size 1 along the others."""
    return lax.broadcasted_iota(jnp.int32, tuple(n if i == axis else 1 for i, n in enumerate(shape)), axis)


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


class _Cache(NamedTuple):
    """Keys (side 0) and values (1) of a KV head of a sequence; `word`, int32, numbers a head's words along its axes."""

    table_ref: Any
    arena_ref: Any
    row: jax.Array
    layer: jax.Array
    kv_head: jax.Array
    word: jax.Array
    static: _Static

    def read(self, side: int, position: jax.Array, ahead: jax.Array | int = 0) -> jax.Array:
        """uint32 words of tokens `ahead` behind `position`, in its slot; both have size 1 along the axes of `word`."""
        geometry = self.static.geometry
        block, index, column = self._place(side, position)
        slot = plt.load(self.table_ref.at[(*jnp.broadcast_arrays(self.row, block, index),)])
        where = self.arena_ref.at[(*jnp.broadcast_arrays(slot, column + ahead * geometry.row_words),)]
        if self.static.width == geometry.head_words:
            return plt.load(where)
        exists = jnp.broadcast_to(self.word < geometry.head_words, where.shape)
        return plt.load(where, mask=exists, other=jnp.uint32(0))

    def _place(self, side: int, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Block, number of the slot in the block, and columns of the words."""
        geometry = self.static.geometry
        block, token = _divide(position, geometry.block_size)
        head = ((self.layer * 2 + side) * geometry.block_size + token) * geometry.num_kv_heads + self.kv_head
        if geometry.slot_words % geometry.head_words:  # heads straddle slots: every word has its own
            return block, *_divide(head * geometry.head_words + self.word, geometry.slot_words)
        index, head = _divide(head, geometry.slot_words // geometry.head_words)
        # A product with a constant, so that the compiler sees how far the first column is aligned.
        return block, index, head * geometry.head_words + self.word


def _parts(words: jax.Array, dtype: Any, geometry: KVGeometry) -> tuple[jax.Array, ...]:
    """The elements in words: two halves of bfloat16, as they are or in float32; or one part of float32."""
    if geometry.dtype == "float32":
        return (lax.bitcast_convert_type(words, jnp.float32),)
    if dtype == jnp.bfloat16:
        return tuple(lax.bitcast_convert_type(half.astype(jnp.uint16), dtype) for half in (words, words >> 16))
    return tuple(lax.bitcast_convert_type(half, dtype) for half in (words << 16, words & jnp.uint32(0xFFFF0000)))


class _Softmax(NamedTuple):
    """An online softmax, in float32: highest score, sum of weights, and weighted sums of the values' parts."""

    peak: jax.Array
    total: jax.Array
    sums: tuple[jax.Array, ...]


def _empty(rows: int, axes: tuple[int, ...], parts: int) -> _Softmax:
    zeros = jnp.zeros((rows,), jnp.float32)
    return _Softmax(zeros + _MASKED, zeros, tuple(jnp.zeros(axes, jnp.float32) for _ in range(parts)))


def _weigh(softmax: _Softmax, scores: jax.Array, axes: tuple[int, ...], static: _Static):
    """Weights of scores whose keys lie along `axes`, what the sums so far shrink by, and the new peak and total."""
    peak = jnp.maximum(softmax.peak, _reduce(jnp.max, scores, axes))
    weights, decay = static.exp(scores - jnp.expand_dims(peak, axes)), static.exp(softmax.peak - peak)
    return weights, decay, peak, softmax.total * decay + _reduce(jnp.sum, weights, axes)


def _reduce(reduce: Callable[..., jax.Array], x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    for axis in sorted(axes, reverse=True):  # one by one: the lowering of several moves data between threads
        x = reduce(x, axis=axis)
    return x


def _vector_kernel(layer_ref, rows_ref, start_ref, length_ref, table_ref, q_ref, arena_ref, *out_refs, static: _Static):
    """Few rows. A *team* of threads shares a key, four words each, and has softmaxes of its own until the end.

    Axes of words: [runs, keys of a run, pieces of a head, teams, words of a piece]; a run of keys lies in one slot.
    Teams and words of a piece are threads, the others registers.
    """
    config, geometry = static.config, static.geometry
    job = _job(rows_ref, start_ref, length_ref, static)
    axes = _, _, pieces, teams, team_words = static.vector_axes
    word = _iota(axes, 2) * team_words + _iota(axes, 4)
    cache = _Cache(table_ref, arena_ref, job.row, layer_ref[...], job.kv_head, word, static)
    places = [_head(job, row, static) for row in range(static.work.rows)]
    q = [_load_parts(q_ref, place, word, word < geometry.head_words, jnp.float32, static) for place in places]

    def step(index, softmaxes, masked: bool):
        begin = job.begin + index * config.block_keys
        k, v = (_read_runs(cache, job, side, begin, axes, masked) for side in (0, 1))
        scored = axes[0], axes[1], teams
        position = begin + _run_start(scored, 2) + _iota(scored, 1)
        return tuple(add(row, softmax, k, v, position, masked) for row, softmax in enumerate(softmaxes))

    def add(row: int, softmax: _Softmax, k, v, position, masked: bool) -> _Softmax:
        products = _sum(a * b for a, b in zip(q[row], k, strict=True))
        scores = _reduce(jnp.sum, _reduce(jnp.sum, products, (2,)), (3,))  # registers first, then threads
        if masked:
            scores = jnp.where(_seen(position, job.start + row // static.group, job, static), scores, -jnp.inf)
        weights, decay, peak, total = _weigh(softmax, scores, (0, 1), static)
        added = (_reduce(jnp.sum, weights[:, :, None, :, None] * values, (0, 1)) for values in v)
        sums = tuple(s * decay[None, :, None] + more for s, more in zip(softmax.sums, added, strict=True))
        return _Softmax(peak, total, sums)

    softmaxes = _walk(job, static, step, (_empty(teams, axes[2:], static.parts),) * static.work.rows)
    word = _iota((pieces, team_words), 0) * team_words + _iota((pieces, team_words), 1)
    for row, (place, softmax) in enumerate(zip(places, softmaxes, strict=True)):
        peak = jnp.max(softmax.peak)
        factor = jnp.where(row // static.group < job.length, static.exp(softmax.peak - peak), 0.0)
        sums = tuple(jnp.sum(s * factor[None, :, None], axis=1) for s in softmax.sums)
        merged = _Softmax(peak, jnp.sum(softmax.total * factor), sums)
        _store(out_refs, job, place, place, word, (None, word < geometry.head_words), merged, static)


def _run_start(axes: tuple[int, ...], teams_axis: int) -> jax.Array:
    """First keys of the runs, of the keys of a step: a team's runs are a stride of all teams apart."""
    return (_iota(axes, 0) * axes[teams_axis] + _iota(axes, teams_axis)) * axes[1]


def _read_runs(cache: _Cache, job: _Job, side: int, begin, axes: tuple[int, ...], masked: bool):
    """float32 parts of the keys or values of a step; without masks, a table entry serves a run."""
    position, member = begin + _run_start(axes, 3), _iota(axes, 1)
    words = cache.read(side, job.clamped(position + member)) if masked else cache.read(side, position, member)
    return _parts(words, jnp.float32, cache.static.geometry)


def _head(job: _Job, row: int, static: _Static) -> tuple[Any, ...]:
    """Where the head of a row lies in q: rows are the heads of a group, query after query."""
    query, head = divmod(row, static.group)
    return job.sequence, jnp.int32(query), job.kv_head * static.group + head


def _matrix_kernel(layer_ref, rows_ref, start_ref, length_ref, table_ref, q_ref, arena_ref, *out_refs, static: _Static):
    """A tile of queries; its rows are the heads of a group, query after query."""
    config, dtype = static.config, static.operand_dtype
    job = _job(rows_ref, start_ref, length_ref, static)
    member = jnp.arange(config.block_rows, dtype=jnp.int32)
    query, head = _divide(member, static.group)
    query, head = job.first_query + query, job.kv_head * static.group + head
    inside = (member < static.tile_queries * static.group) & (query < static.work.queries)
    last = job.start + query
    word, key = _iota((1, static.width), 1), _iota((config.block_keys, 1), 0)
    cache = _Cache(table_ref, arena_ref, job.row, layer_ref[...], job.kv_head, word, static)
    place = (job.sequence, query[:, None], head[:, None])
    mask = inside[:, None] & (word < static.geometry.head_words)
    q = _load_parts(q_ref, place, word, mask, dtype, static)

    def step(index, softmax: _Softmax, masked: bool) -> _Softmax:
        begin = job.begin + index * config.block_keys
        position = job.clamped(begin + key) if masked else begin + key
        k, v = (_parts(cache.read(side, position), dtype, static.geometry) for side in (0, 1))
        scores = _sum(_dot(a, b, 1, static) for a, b in zip(q, k, strict=True))
        if masked:
            position = begin + _iota((1, config.block_keys), 1)
            scores = jnp.where(_seen(position, last[:, None], job, static), scores, -jnp.inf)
        weights, decay, peak, total = _weigh(softmax, scores, (1,), static)
        added = (_dot(weights.astype(dtype), values, 0, static) for values in v)
        return _Softmax(peak, total, tuple(s * decay[:, None] + a for s, a in zip(softmax.sums, added, strict=True)))

    empty = _empty(config.block_rows, (config.block_rows, static.width), static.parts)
    softmax = _walk(job, static, step, empty)
    real = query < job.length
    sums = tuple(jnp.where(real[:, None], s, 0.0) for s in softmax.sums)
    softmax = _Softmax(softmax.peak, jnp.where(real, softmax.total, 0.0), sums)
    _store(out_refs, job, (job.sequence, query, head), place, word, (inside, mask), softmax, static)


def _seen(position: jax.Array, last: jax.Array, job: _Job, static: _Static) -> jax.Array:
    """Which keys of this share a query sees whose own position is `last`."""
    seen = position <= jnp.minimum(last, job.end - 1)
    return seen & (position > last - static.window) if static.window else seen


def _dot(left: jax.Array, right: jax.Array, axis: int, static: _Static) -> jax.Array:
    """float32 product over the last axis of `left` and `axis` of `right`."""
    precision = lax.Precision.HIGHEST if static.work.exact else lax.Precision.DEFAULT
    dimensions = (((1,), (axis,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _load_parts(ref, place: tuple[Any, ...], word, mask, dtype: Any, static: _Static) -> list[jax.Array]:
    elements = (part * static.geometry.head_words + word for part in range(static.parts))
    return [plt.load(ref.at[*place, element], mask=mask, other=0.0).astype(dtype) for element in elements]


def _store(out_refs, job: _Job, row_place, place, word, masks, softmax: _Softmax, static: _Static) -> None:
    """Writes the output, or the softmax of one of several shares. Places and masks are of rows, then of elements."""
    total, sums = softmax.total, softmax.sums
    if static.config.splits > 1:
        place = (*place, job.split)
        for ref, values in zip(out_refs[1:], softmax[:2], strict=True):
            plt.store(ref.at[*row_place, job.split], values, mask=masks[0])
    else:  # a padded query saw nothing: its sums are zero, and so is its output
        total = jnp.where(total > 0, total, 1.0)
        sums = [s / (total[:, None] if total.ndim else total) for s in sums]
    for part, values in enumerate(sums):
        where = out_refs[0].at[*place, part * static.geometry.head_words + word]
        plt.store(where, values.astype(out_refs[0].dtype), mask=masks[1])


def _combine(sums: jax.Array, peaks: jax.Array, totals: jax.Array, *, dtype: Any, static: _Static) -> jax.Array:
    """The output from the softmaxes of the shares: `[S, Q, heads, splits, D]`, and twice without D."""
    sequences, queries, heads, _, head_dim = sums.shape
    block = min(64, pl.next_power_of_2(head_dim))
    return pl.pallas_call(
        functools.partial(_combine_kernel, block=block, static=static),
        grid=(heads, pl.cdiv(head_dim, block), queries, sequences),
        out_shape=jax.ShapeDtypeStruct((sequences, queries, heads, head_dim), dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=static.interpret,
        name="paged_attention_combine",
    )(sums, peaks, totals)


def _combine_kernel(sums_ref, peaks_ref, totals_ref, out_ref, *, block: int, static: _Static):
    head, tile, query, sequence = (pl.program_id(axis) for axis in range(4))
    place = (sequence, query, head)
    split, element = _iota((static.config.splits, 1), 0), tile * block + _iota((1, block), 1)
    exists = jnp.broadcast_to(element < static.geometry.head_dim, (static.config.splits, block))
    peaks = peaks_ref[place]
    factors = static.exp(peaks - jnp.max(peaks))
    total = jnp.sum(totals_ref[place] * factors)
    sums = plt.load(sums_ref.at[*place, split, element], mask=exists, other=0.0)
    value = jnp.sum(sums * factors[:, None], axis=0) / jnp.where(total > 0, total, 1.0)
    element = tile * block + jnp.arange(block, dtype=jnp.int32)
    plt.store(out_ref.at[*place, element], value.astype(out_ref.dtype), mask=element < static.geometry.head_dim)
