"""Owns the device: parameters, arena, tables, and one compiled program a step shape.

Everything is compiled ahead of time and called with fresh host arrays, so nothing compiles later and no array that
the host may still write is ever aliased by a running step.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pwjax.engine.memory import workspace_bytes
from pwjax.engine.scheduler import Batch
from pwjax.engine.step import StepOutputs, StepSpec, StepState, make_step
from pwjax.engine.step_inputs import FROM_DEVICE, LENGTH, ROW, SEED, START, TOP_K, InputLayout, StepInputs, StepShape
from pwjax.paging.device import WeightState

Array = jax.Array | jax.ShapeDtypeStruct

GPU_OPTIONS: dict[str, str | bool] = {
    # What does not depend on each other may run at the same time: router and routed experts beside the shared one.
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    # In per cent. XLA counts a large arena several times, finds that the step does not fit the device, and computes
    # two fusions a layer twice to save memory that nobody uses. Sizes are settled before a step is compiled.
    "xla_gpu_memory_limit_slop_factor": "1000",
}


@dataclasses.dataclass(frozen=True)
class TableShapes:
    """Shapes of the per-sequence device tables."""

    kv_table: tuple[int, int, int]
    mass: tuple[int, int, int]

    @property
    def max_num_seqs(self) -> int:
        return self.kv_table[0]

    @property
    def nbytes(self) -> int:
        """All entries are 4 bytes; the newest tokens are one a row."""
        return 4 * (int(np.prod(self.kv_table)) + int(np.prod(self.mass)) + self.max_num_seqs)


class StepCompiler:
    """Lowers and compiles steps against abstract arguments.

    Args:
        spec: static part of the step.
        params: dense weights, flat leaves; these and the experts may be abstract.
        experts: dense experts a layer (method bf16), or None where weights are paged.
        page_table_shape: of the slot table, `[moe_layers, experts, row_slots]`.
        tables: per-sequence tables.
    """

    def __init__(
        self,
        spec: StepSpec,
        params: tuple[Array, ...],
        experts: tuple[tuple[Array, Array], ...] | None,
        page_table_shape: tuple[int, int, int],
        tables: TableShapes,
    ) -> None:
        self.spec = spec
        self._params, self._experts, self._tables = params, experts, tables
        self._page_table_shape = page_table_shape
        self._compiled: dict[tuple[StepShape, int], jax.stages.Compiled] = {}

    def compile(self, shape: StepShape, num_slots: int) -> jax.stages.Compiled:
        """The step for one shape with an arena of `num_slots`; all its state is donated. Compiled once."""
        if (shape, num_slots) not in self._compiled:
            options = GPU_OPTIONS if jax.default_backend() == "gpu" else None
            self._compiled[shape, num_slots] = self.lower(shape, num_slots).compile(options)
        return self._compiled[shape, num_slots]

    def compile_all(self, shapes: Iterable[StepShape], num_slots: int) -> list[jax.stages.Compiled]:
        """The steps for these shapes, compiled side by side."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda shape: self.compile(shape, num_slots), shapes))

    def lower(
        self, shape: StepShape, num_slots: int, sharding: jax.sharding.Sharding | None = None
    ) -> jax.stages.Lowered:
        """The step before compilation.

        Args:
            sharding: of every argument, for a device that is not here; all of them must be abstract then.
        """
        spec, tables = self.spec, self._tables
        int32 = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)  # noqa: E731
        float32 = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
        state = StepState(
            jax.ShapeDtypeStruct((num_slots, spec.kv.slot_words), jnp.uint32),
            int32(*tables.kv_table),
            int32(tables.max_num_seqs),
            float32(*tables.mass),
        )
        layers, experts, _ = self._page_table_shape
        paged = (int32(*self._page_table_shape), int32(layers, experts, 2))
        inputs = int32(shape.inputs(spec.kv.block_size, spec.kv.block_slots).words)
        step = jax.jit(make_step(spec, shape), donate_argnums=2)
        arguments = (self._params, self._experts or paged, state, inputs)
        if sharding is not None:
            arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
        return step.lower(*arguments)


class Runner:
    """Runs compiled steps on the device.

    Args:
        compiler: makes the programs.
        weights: arena and weight page tables; the arena is donated through every step and put back.
        tables: per-sequence tables.
        shapes: step shapes; all are compiled now, and run once on nothing but padding.
    """

    def __init__(
        self,
        compiler: StepCompiler,
        params: tuple[jax.Array, ...],
        experts: tuple[tuple[jax.Array, jax.Array], ...] | None,
        weights: WeightState,
        tables: TableShapes,
        shapes: Iterable[StepShape],
    ) -> None:
        self._compiler, self._params, self._experts = compiler, params, experts
        self.weights, self._tables = weights, tables
        zeros = jax.jit(
            lambda: (
                jnp.zeros(tables.kv_table, jnp.int32),
                jnp.zeros(tables.max_num_seqs, jnp.int32),
                jnp.zeros(tables.mass, jnp.float32),
            )
        )
        self._kv_table, self._last_tokens, self._mass = zeros()
        self._snapshot = jax.jit(jnp.copy).lower(self._mass).compile()
        shapes = list(shapes)
        programs = compiler.compile_all(shapes, weights.arena.shape[0])
        self.steps = dict(zip(shapes, programs, strict=True))
        for shape in shapes:  # the first run loads kernels
            packed, _ = self._layout(shape).padding(tables.max_num_seqs)
            jax.block_until_ready(self._run(shape, packed))

    @property
    def workspace_bytes(self) -> int:
        return max(map(workspace_bytes, self.steps.values()))

    def _layout(self, shape: StepShape) -> InputLayout:
        kv = self._compiler.spec.kv
        return shape.inputs(kv.block_size, kv.block_slots)

    def dispatch(self, batch: Batch, kv_delta: list[tuple[int, int, np.ndarray]]) -> StepOutputs:
        """Starts a step and returns at once; outputs are on the device.

        Args:
            kv_delta: `(row, block, slots)` of the KV blocks taken for this step.
        """
        packed, inputs = self._layout(batch.shape).padding(self._tables.max_num_seqs)
        for i, work in enumerate(batch.works):
            _fill_row(inputs, i, work)
        for i, (row, block, slots) in enumerate(kv_delta):
            inputs.kv_delta[i, 0], inputs.kv_delta[i, 1] = row, block
            inputs.kv_delta[i, 2:] = slots
        return self._run(batch.shape, packed)

    def _run(self, shape: StepShape, packed: np.ndarray) -> StepOutputs:
        state = StepState(self.weights.arena, self._kv_table, self._last_tokens, self._mass)
        experts: Any = self._experts or (self.weights.slot_table, self.weights.bits)
        state, outputs = self.steps[shape](self._params, experts, state, packed)
        self.weights.arena, self._kv_table, self._last_tokens, self._mass = state
        return outputs

    def snapshot_mass(self) -> jax.Array:
        """A copy of the routing mass `[max_num_seqs, moe_layers, experts]` as of the steps dispatched so far."""
        snapshot = self._snapshot(self._mass)
        snapshot.copy_to_host_async()
        return snapshot


def _fill_row(inputs: StepInputs, i: int, work) -> None:
    sequence, params = work.sequence, work.sequence.params
    decoding = not sequence.in_prefill
    row = inputs.sequences[i]
    row[ROW], row[START], row[LENGTH], row[FROM_DEVICE] = sequence.row, work.start, work.length, decoding
    row[TOP_K], row[SEED] = max(params.top_k, 0), np.uint32(sequence.seed).view(np.int32)
    inputs.sampling[i] = params.temperature, params.top_p, params.min_p
    if not decoding:
        inputs.tokens[i, : work.length] = sequence.known[work.start : work.end]
    if sequence.is_score:
        inputs.targets[i, : work.length] = sequence.targets[work.start : work.end]
