"""Puts an engine together from a prepared model: sizes first, then memory, then pages.

Order matters for the budget: what is fixed is measured before the arena is sized, and the arena takes what is left.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.manifest import Manifest
from pallas_kernels.bitplane_moe.layout import MoEGeometry
from pallas_kernels.paged_attention.layout import KVGeometry
from pallas_kernels.platform import Implementation
from pwjax import planner
from pwjax.config import ModelConfig
from pwjax.engine import memory
from pwjax.engine.config import EngineConfig, resolved
from pwjax.engine.core import BoundaryReport, Engine
from pwjax.engine.precision import Precision
from pwjax.engine.replay import Replay
from pwjax.engine.runner import Runner, StepCompiler, TableShapes
from pwjax.engine.scheduler import Scheduler
from pwjax.engine.step import StepSpec
from pwjax.engine.weights import Watermarks, WeightManager
from pwjax.errors import UserError
from pwjax.kv.block_table import KVBlockTable
from pwjax.models import load_dense
from pwjax.paging.allocator import SlotAllocator
from pwjax.paging.device import DeviceTables
from pwjax.paging.host_store import HostStore, StagingShape
from pwjax.paging.mover import Mover
from pwjax.paging.page_table import WeightPageTable

DEFAULT_LOW_WATERMARK_BLOCKS = 8
DEFAULT_LOW_WATERMARK_SHARE = 0.02
BATCHES_IN_FLIGHT = 2
PROBE_SLOTS = 4096  # arena of the trial compilation that measures the workspace, which does not depend on its size


class ModelSource(Protocol):
    """What an engine needs of a model: `checkpoints.store.PreparedModel`, or one made in memory.

    One that keeps its pages in its own way has an attribute `host_store`, used in place of `HostStore`.
    """

    path: Path
    manifest: Manifest
    config: ModelConfig

    def geometry(self) -> MoEGeometry: ...

    def iter_dense(self) -> Iterable[tuple[str, Any]]: ...

    def load_layer(self, layer: int) -> dict[str, dict[int, np.ndarray]]: ...

    def load_source(self, layer: int) -> tuple[Any, Any]: ...

    def tables(self) -> dict[str, np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class BuiltEngine:
    """An engine and what it was built with."""

    engine: Engine
    fixed: memory.FixedMemory
    budget_bytes: int
    arena_bytes: int
    host_store_bytes: int
    implementation: str
    max_model_len: int
    least_weight_slots: int
    compile_seconds: float  # tracing, compiling and first runs of all step shapes


def build_engine(
    model: ModelSource,
    config: EngineConfig,
    on_boundary: Callable[[Engine, BoundaryReport], None],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> BuiltEngine:
    """Loads a prepared model and compiles its steps.

    Args:
        on_boundary: called after every boundary.
        progress: called with what is being loaded, how much of it is done, and how much there is.

    Raises:
        UserError: the budget is too small or more than the device admits; the model lacks what the method needs.
    """
    return _Builder(model, config, on_boundary, progress).build()


class _Builder:
    def __init__(self, model: ModelSource, config: EngineConfig, on_boundary, progress) -> None:
        self.model, self.options, self.on_boundary, self.progress = model, config, on_boundary, progress
        self.config = model.config
        self.device = jax.devices()[0]
        self.implementation: Implementation = resolved(config.implementation)
        self.paged = config.method.name != "bf16"
        self.max_bits = self._max_bits()
        self.max_model_len = self._max_model_len()
        chunk = min(config.prefill_chunk_tokens, self.max_model_len)  # longer chunks would only cost workspace
        self.options = dataclasses.replace(config, prefill_chunk_tokens=chunk)
        self.geometry = dataclasses.replace(model.geometry(), max_bits=self.max_bits)
        self.kv = KVGeometry(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            slot_words=model.manifest.slot_words,
            block_size=config.block_size,
            dtype=config.kv_dtype,
        )
        self.shape = (self.config.num_moe_layers, self.config.num_experts if self.paged else 0)
        self.table = WeightPageTable(self.geometry, *self.shape)
        self.staging = StagingShape.choose(self.geometry, self.config.num_moe_layers * self.config.num_experts)
        self.slot_bytes = self.kv.slot_words * 4
        sensitivity = np.asarray(model.tables()["sensitivity"], np.float64)
        self.precision = Precision(
            method=config.method,
            table=self.table,
            sensitivity=sensitivity.reshape(-1, sensitivity.shape[-1]),
            max_bits=self.max_bits,
            slot_bytes=self.slot_bytes,
            seed=config.seed,
            ablation=config.ablation,
        )

    def _max_bits(self) -> int:
        stored = self.model.manifest.page_bits
        chosen = self.options.max_bits or self.model.manifest.max_bits
        if self.options.method.name == "uniform":
            chosen = max(chosen, int(self.options.method.bits or 0))
        if chosen > stored:
            raise UserError(f"{chosen} bits asked for, but {self.model.path} holds pages of 3 to {stored} bits")
        return chosen

    def _max_model_len(self) -> int:
        limit = self.config.max_position_embeddings
        chosen = self.options.max_model_len or limit
        if chosen > limit:
            raise UserError(f"--max-model-len is {chosen}; the model's positions end at {limit}")
        return chosen

    def build(self) -> BuiltEngine:
        self._load_dense()
        blocks = -(-self.max_model_len // self.options.block_size)
        rows = self.options.max_num_seqs
        self.tables = TableShapes(
            kv_table=(rows, blocks, self.kv.block_slots),
            mass=(rows, self.config.num_moe_layers, self.config.num_experts),
        )
        spec = StepSpec(
            self.config, self.definition, self.geometry if self.paged else None, self.kv, self.implementation
        )
        compiler = StepCompiler(spec, self.params, self.experts, self.table.shape, self.tables)
        started_s = time.monotonic()
        fixed, num_slots = self._size_arena(compiler)
        compile_seconds = time.monotonic() - started_s
        bits = self.precision.at_load(num_slots - 1 - self._set_aside_slots(num_slots))
        memory.check_device_admits(num_slots * self.slot_bytes, self.device)

        allocator = SlotAllocator(num_slots)
        device = DeviceTables(num_slots, self.kv.slot_words, self.table.shape, self.staging, self.device)
        started_s = time.monotonic()
        runner = Runner(compiler, self.params, self.experts, device.state, self.tables, self.options.step_shapes)
        compile_seconds += time.monotonic() - started_s
        fixed = dataclasses.replace(fixed, workspace_bytes=max(fixed.workspace_bytes, runner.workspace_bytes))
        kv_table = KVBlockTable(self.kv, allocator, rows, self.max_model_len)
        weights = self._weights(allocator, device, bits, num_slots) if self.paged else None
        engine = Engine(
            runner,
            Scheduler(self.options, kv_table),
            kv_table,
            allocator,
            weights,
            self._reserve_per_sequence() if self.options.reserve_kv else 0,
            rows,
            self.on_boundary,
        )
        total = fixed.total_bytes + num_slots * self.slot_bytes
        return BuiltEngine(
            engine=engine,
            fixed=fixed,
            budget_bytes=self.options.memory_budget_bytes or total,
            arena_bytes=num_slots * self.slot_bytes,
            host_store_bytes=weights.mover.host_bytes if weights else 0,
            implementation=self.implementation,
            max_model_len=self.max_model_len,
            least_weight_slots=self.precision.least_slots,
            compile_seconds=compile_seconds,
        )

    # Weights outside the arena.

    def _load_dense(self) -> None:
        dtype = jnp.dtype(self.options.dtype)
        self.definition, self.params = load_dense(self.config, self.model.iter_dense(), dtype)
        self.experts = None
        self.dense_bytes = sum(leaf.nbytes for leaf in self.params)
        if not self.paged:
            self.experts = tuple(self._load_source(dtype))
            self.dense_bytes += sum(a.nbytes for pair in self.experts for a in pair)

    def _load_source(self, dtype):
        layers = self.config.num_moe_layers
        for layer in range(layers):
            gate_up, down = self.model.load_source(layer)
            yield jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)
            self.progress("experts", layer + 1, layers)

    # Sizes.

    def _size_arena(self, compiler: StepCompiler) -> tuple[memory.FixedMemory, int]:
        """What is fixed, and the slots of the arena: from the budget, or as many as are asked for without one."""
        budget = self.options.memory_budget_bytes
        if budget is None and self.options.mean_bits is None and self.options.arena_bytes is None:
            free = memory.device_free_bytes(self.device)
            budget = None if free is None else self.dense_bytes + int(memory.GPU_DEFAULT_SHARE * free)
        fixed = self._fixed(workspace_bytes=0)
        if budget is None:
            slots = self._wanted_slots(fixed)
            return dataclasses.replace(fixed, workspace_bytes=self._probe(compiler, slots)), slots
        memory.check_device_admits(budget - self.dense_bytes, self.device)
        fixed = dataclasses.replace(fixed, workspace_bytes=self._probe(compiler, PROBE_SLOTS))
        slots = memory.arena_slots(budget, fixed, self.slot_bytes, self._least_slots())
        # The budget is a cap: what could never be used is not taken.
        return fixed, min(slots, max(self._useful_slots(), self._least_slots()))

    def _fixed(self, workspace_bytes: int) -> memory.FixedMemory:
        table_entries = int(np.prod(self.table.shape)) + self.table.num_linear_blocks
        return memory.FixedMemory(
            dense_bytes=self.dense_bytes,
            tables_bytes=self.tables.nbytes + 4 * table_entries,
            staging_bytes=self.staging.nbytes * BATCHES_IN_FLIGHT if self.paged else 0,
            workspace_bytes=workspace_bytes,
        )

    def _probe(self, compiler: StepCompiler, num_slots: int) -> int:
        """Workspace of the largest decode, prefill or scoring step."""
        largest: dict[tuple[bool, bool], Any] = {}
        for shape in self.options.step_shapes:
            kind = (shape.score, shape.tokens > 1)
            if kind not in largest or shape.sequences * shape.tokens > largest[kind].sequences * largest[kind].tokens:
                largest[kind] = shape
        return max(map(memory.workspace_bytes, compiler.compile_all(largest.values(), num_slots)))

    def _wanted_slots(self, fixed: memory.FixedMemory) -> int:
        """Without a budget: `--arena`, `--mean-bits`, or all pages and all KV on a CPU, at most 4 GiB."""
        if self.options.arena_bytes is not None:
            return memory.arena_slots(self.options.arena_bytes, None, self.slot_bytes, self._least_slots())
        if self.options.mean_bits is not None and self.paged:
            return 1 + self.precision.slots_for_mean(self.options.mean_bits) + self._set_aside_slots(0)
        limit = (memory.CPU_DEFAULT_LIMIT_BYTES - fixed.total_bytes) // self.slot_bytes
        return max(min(self._useful_slots(), limit), self._least_slots())

    def _useful_slots(self) -> int:
        """Slots of all pages, of the KV of all sequences at full length, and of the watermarks."""
        used = self.precision.most_slots + self.options.max_num_seqs * self._reserve_per_sequence()
        return memory.round_up_slots(1 + used + self._watermark_slots(used))

    def _reserve_per_sequence(self) -> int:
        return -(-self.max_model_len // self.options.block_size) * self.kv.block_slots

    def _watermarks(self, num_slots: int) -> Watermarks:
        options = self.options
        if options.reserve_kv:
            return Watermarks(0, 0, reserved=True)
        low = options.low_watermark_blocks
        if low is None:
            share = int(DEFAULT_LOW_WATERMARK_SHARE * num_slots / self.kv.block_slots)
            low = max(DEFAULT_LOW_WATERMARK_BLOCKS, share)
        high = options.high_watermark_blocks
        return Watermarks(low, 2 * low) if high is None else Watermarks(min(low, high), high)

    def _watermark_slots(self, num_slots: int) -> int:
        marks = self._watermarks(num_slots)
        return max(marks.high_blocks, marks.low_blocks + 1) * self.kv.block_slots

    def _set_aside_slots(self, num_slots: int) -> int:
        """Slots that weights must not take at load: the reserve, or room above the high watermark; where pages don't
        move, room for one sequence of full length."""
        if self.options.reserve_kv:
            return self.options.max_num_seqs * self._reserve_per_sequence()
        if not self.options.moves_pages:
            return self._reserve_per_sequence()
        return self._watermark_slots(num_slots)

    def _least_slots(self) -> int:
        return 1 + self.precision.least_slots + self._set_aside_slots(0)

    # Weight pages.

    def _weights(
        self, allocator: SlotAllocator, device: DeviceTables, bits: np.ndarray, num_slots: int
    ) -> WeightManager:
        layers = self.config.num_moe_layers
        report = lambda done: self.progress("weight pages", done, layers)  # noqa: E731
        make_store = getattr(self.model, "host_store", HostStore)
        store = make_store(
            self.model, self.geometry, self.shape, self.staging, self.device, self.max_bits, progress=report
        )
        store.compile()
        mover = Mover(self.table, allocator, store, device, BATCHES_IN_FLIGHT)
        manager = WeightManager(
            self.table,
            mover,
            allocator,
            self._calibration(),
            self._watermarks(num_slots),
            self.kv.block_slots,
            self.max_bits,
            self.slot_bytes,
            moves_pages=self.options.moves_pages,
            replay=Replay(self.options.replay) if self.options.replay else None,
        )
        manager.load_initial(bits)
        return manager

    def _calibration(self) -> planner.Calibration:
        stored = self.model.manifest.policy
        policy = planner.Policy.from_dict(stored) if stored else planner.default_policy()
        if not self.options.ablation.routing:
            policy = policy.without_routing()
        if not self.options.exchange:
            policy = dataclasses.replace(policy, exchange_moves=0)
        calibration = planner.Calibration(
            sensitivity=self.precision.planned_sensitivity,
            num_layers=self.shape[0],
            num_experts=self.shape[1],
            policy=policy,
            ablation=self.options.ablation,
        )
        if calibration.residual is None and not self.options.ablation.residual:
            raise UserError(f"--no-residual: {self.model.path} has no prompt residuals to leave out")
        return calibration
