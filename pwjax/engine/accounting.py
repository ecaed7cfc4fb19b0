"""Memory and moves, boundary by boundary: the budget is checked, the timeline written, totals kept.

Holds no reference to the engine, which holds this: device memory is then free as soon as the engine's owner is gone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from pwjax.engine import memory
from pwjax.engine.compilations import CompilationCounter
from pwjax.engine.core import BoundaryReport, Engine
from pwjax.paging.allocator import Owner
from pwjax.paging.mover import Commit
from pwjax.paging.page_table import WeightPageTable
from pwjax.timeline import BoundaryRecord, Timeline

if TYPE_CHECKING:
    from pwjax.engine.build import BuiltEngine


def mean_bits(engine: Engine) -> float | None:
    """Committed bits, averaged over the weights; None for dense experts."""
    return None if engine.weights is None else engine.weights.table.mean_bits()


class Accounting:
    """Follows an engine from `start` on; give `on_boundary` to the engine.

    Args:
        on_record: called with every record.
        timeline: takes every record, if there is one.
    """

    def __init__(self, on_record: Callable[[BoundaryRecord], None] | None, timeline: Timeline | None) -> None:
        self._on_record, self._timeline = on_record, timeline
        self._created_s = time.monotonic()
        self._started = False
        self.compilations = CompilationCounter()  # of what runs inside `with accounting.compilations`
        self.peak_bytes = self.offloads = self.reloads = self.released_bytes = 0
        self.first_bits: float | None = None
        self.min_bits: float | None = None

    def start(self, built: BuiltEngine) -> None:
        """Loading is over: from here on, boundaries are recorded."""
        engine = built.engine
        self.fixed, self.budget_bytes, self.arena_bytes = built.fixed, built.budget_bytes, built.arena_bytes
        self.slot_bytes = engine.kv.geometry.slot_words * 4
        self.first_bits = self.min_bits = mean_bits(engine)
        free_bytes = engine.allocator.free_slots * self.slot_bytes
        self.peak_bytes = self.fixed.total_bytes + self.arena_bytes - free_bytes
        self._started = True

    def on_boundary(self, engine: Engine, report: BoundaryReport) -> None:
        """Records a boundary.

        Raises:
            RuntimeError: more bytes are held than the budget allows, which would be a fault of the engine.
        """
        if not self._started:
            return
        record = self._record(engine, report)
        if record.reserved_bytes > record.budget_bytes:
            raise RuntimeError(f"accounting: {record.reserved_bytes} bytes of a budget of {record.budget_bytes}")
        self._add(record)
        if self._timeline is not None:
            self._timeline.append(record)
        if self._on_record is not None:
            self._on_record(record)

    def _record(self, engine: Engine, report: BoundaryReport) -> BoundaryRecord:
        used, slot_bytes, fixed, weights = engine.allocator.used_slots, self.slot_bytes, self.fixed, engine.weights
        return BoundaryRecord(
            step=report.step,
            boundary=report.step if weights is None else weights.boundary,
            tokens_generated=engine.tokens_generated,
            time_s=time.monotonic() - self._created_s,
            dense_bytes=fixed.dense_bytes,
            weight_bytes=(used(Owner.WEIGHTS) + used(Owner.IN_FLIGHT)) * slot_bytes,
            kv_bytes=used(Owner.KV) * slot_bytes,
            workspace_bytes=fixed.workspace_bytes,
            tables_bytes=fixed.tables_bytes,
            staging_bytes=fixed.staging_bytes,
            free_bytes=(engine.allocator.free_slots + 1) * slot_bytes,  # the null slot is nobody's
            budget_bytes=self.budget_bytes,
            mean_bits=mean_bits(engine),
            offloads=sum(c.from_bits - c.to_bits for c in report.commits if c.to_bits < c.from_bits),
            reloads=sum(c.to_bits - c.from_bits for c in report.commits if c.to_bits > c.from_bits),
            moves=() if weights is None else tuple(_move(weights.table, commit) for commit in report.commits),
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            preemptions=report.preempted,
        )

    def _add(self, record: BoundaryRecord) -> None:
        self.peak_bytes = max(self.peak_bytes, record.used_bytes)
        if record.mean_bits is not None and self.min_bits is not None:
            self.min_bits = min(self.min_bits, record.mean_bits)
        self.offloads += record.offloads
        self.reloads += record.reloads
        self.released_bytes += sum(move["bytes"] for move in record.moves if move["to"] < move["from"])

    def stats(self, engine: Engine) -> dict[str, Any]:
        """Figures since `start`; docs/serving.md explains the names."""
        mover = None if engine.weights is None else engine.weights.mover
        return {
            "memory_budget_bytes": self.budget_bytes,
            "memory_bytes_peak": self.peak_bytes,
            "reserved_bytes": self.fixed.total_bytes + self.arena_bytes,
            "measured_bytes_peak": memory.measured_peak_bytes(jax.devices()[0]),
            "memory_parts": {**dataclasses.asdict(self.fixed), "arena_bytes": self.arena_bytes},
            "mean_bits_first": self.first_bits,
            "mean_bits_last": mean_bits(engine),
            "mean_bits_min": self.min_bits,
            "offloads": self.offloads,
            "reloads": self.reloads,
            "exchanged_bits": 0 if mover is None else mover.exchanged_bits,
            "bytes_moved": 0 if mover is None else mover.bytes_moved,
            "bytes_released": self.released_bytes,
            "preemptions": engine.preemptions,
            "max_running": engine.max_running,
            "steps": engine.steps,
            "late_steps": engine.late_steps,
            "wait_seconds": engine.wait_s,
            "tokens_generated": engine.tokens_generated,
            "compilations_after_warmup": self.compilations.count,
        }


def _move(table: WeightPageTable, commit: Commit) -> dict[str, Any]:
    """One structured record of a move."""
    layer, expert, unit = table.locate(commit.index)
    return {
        "index": commit.index,
        "layer": layer,
        "expert": expert,
        "unit": unit,
        "from": commit.from_bits,
        "to": commit.to_bits,
        "bytes": commit.bytes,
        "reason": commit.reason,
    }
