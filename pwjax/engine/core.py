"""The engine's loop: one safe boundary, one step, one step in flight.

A boundary is the host's moment between two dispatched steps and the only time page tables change. In order: finished
page-ins are committed, requests admitted, the next batch chosen, room made for it (the planner first, preemption as
the last resort), copies started, the step dispatched. Then the *previous* step's tokens are read, while the new one
runs: a decode step takes its input tokens from the device, so the device never waits for the host.

Everything that touches the arena is dispatched in this order, which is the only order there is; a slot may be given
to a new owner at once, because what still reads it was dispatched before what will write it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable

import jax
import numpy as np

from pwjax.engine.runner import Runner
from pwjax.engine.scheduler import Batch, Scheduler, Work
from pwjax.engine.sequence import Sequence, Status
from pwjax.engine.step import StepOutputs
from pwjax.engine.weights import WeightManager
from pwjax.kv.block_table import KVBlockTable
from pwjax.paging.allocator import SlotAllocator
from pwjax.paging.mover import Commit

OBSERVE_EVERY_STEPS = 8  # decode steps between two readings of the routing mass
MAX_IDLE_BOUNDARIES = 64


@dataclasses.dataclass(frozen=True)
class Progress:
    """News of one request from one step: the text and id that it gained."""

    sequence: Sequence
    text: str
    token_id: int | None


@dataclasses.dataclass(frozen=True)
class BoundaryReport:
    """What one boundary did; the timeline turns it into a record."""

    step: int
    commits: tuple[Commit, ...]
    preempted: int
    batch: Batch | None


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched step. `epochs` are the preemption counts at dispatch: a result from before one is partly void."""

    batch: Batch
    samples: tuple[bool, ...]
    epochs: tuple[int, ...]
    outputs: StepOutputs
    mass: jax.Array | None
    rows: tuple[tuple[Sequence, int, int], ...]  # (sequence, row, epoch) of all that had run

    @property
    def is_done(self) -> bool:
        """Whether the device has finished the step."""
        return self.outputs.tokens.is_ready()  # pyright: ignore[reportAttributeAccessIssue]  # not declared by jax.Array


class Engine:
    """Serves sequences with a runner, a scheduler and managed weights.

    Args:
        weights: precision of the experts; None for method bf16.
        reserve_slots: slots set aside for a row's KV from the start (`--reserve-kv`), 0 without.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        kv: KVBlockTable,
        allocator: SlotAllocator,
        weights: WeightManager | None,
        reserve_slots: int,
        max_num_seqs: int,
        on_boundary: Callable[[Engine, BoundaryReport], None] = lambda engine, report: None,
    ) -> None:
        self.runner, self.scheduler, self.kv, self.allocator, self.weights = runner, scheduler, kv, allocator, weights
        self._reserve_slots, self._max_num_seqs = reserve_slots, max_num_seqs
        self._on_boundary = on_boundary
        self._flight: deque[_Flight] = deque()
        self.steps = 0
        self.preemptions = 0
        self.max_running = 0
        self.tokens_generated = 0
        self.late_steps = 0  # dispatched when the step before was done: the device waited for the host
        self.wait_s = 0.0  # that the host waited for results of steps
        self._since_observation = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flight)

    def add(self, sequence: Sequence) -> None:
        """Queues a request; one that asks for no token is finished at once."""
        if sequence.max_tokens == 0 and not sequence.is_score:
            sequence.status, sequence.finish_reason = Status.FINISHED, "length"
            sequence.finish_s = time.monotonic()
        else:
            self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Ends a request now; its slots are free at once, and whatever step of it is in flight is ignored."""
        if sequence.status is not Status.FINISHED:
            self._finish(sequence, "abort")

    def step(self) -> list[Progress]:
        """One boundary and, where there is work, one step. Returns what the step before it produced."""
        commits = self.weights.commit_ready() if self.weights else []
        self._admit()
        batch, kv_delta, planned, preempted = self._make_room(self.scheduler.next_batch())
        commits += planned
        if self.weights:
            self.weights.issue()
        if batch is not None:
            self._dispatch(batch, kv_delta)
        self.preemptions += preempted
        self._on_boundary(self, BoundaryReport(self.steps, tuple(commits), preempted, batch))
        if self._flight and (batch is None or len(self._flight) > 1):
            return self._collect(self._flight.popleft())
        return []

    def settle(self) -> None:
        """Boundaries of an idle engine, until no page moves any more."""
        if self.weights is None:
            return
        for _ in range(MAX_IDLE_BOUNDARIES):
            commits = self.weights.commit_ready(wait=True)
            commits += self.weights.plan(self._free_slots(), 0, [], force=True)
            self.weights.issue()
            if not commits and self.weights.settled:
                return
            self._on_boundary(self, BoundaryReport(self.steps, tuple(commits), 0, None))

    def _free_slots(self) -> int:
        """Free slots that nobody has a claim on."""
        if not self._reserve_slots:
            return self.allocator.free_slots
        held = self.kv.used_slots
        return self.allocator.free_slots - (self._reserve_slots * self._max_num_seqs - held)

    def _admit(self) -> None:
        releasable = self.weights.releasable_slots() if self.weights else 0
        for sequence in self.scheduler.admit(self._free_slots() + releasable, self._reserve_slots):
            sequence.started_s = sequence.started_s or time.monotonic()
        self.max_running = max(self.max_running, len(self.scheduler.running))

    def _make_room(
        self, batch: Batch | None
    ) -> tuple[Batch | None, list[tuple[int, int, np.ndarray]], list[Commit], int]:
        """Finds slots for the batch's KV: `(batch, new KV blocks, commits, sequences preempted)`."""
        commits: list[Commit] = []
        preempted = 0
        while True:
            needed = self._needed_slots(batch)
            if self.weights:
                claimed = 0 if self._reserve_slots else needed
                growth = 0 if self._reserve_slots else self.scheduler.growth_slots()
                commits += self.weights.plan(self._free_slots() - claimed, growth, self._requests())
            if batch is None or needed <= self.allocator.free_slots:
                break
            if self.weights and (late := self.weights.cancel_page_ins()) is not None:
                commits += late
                continue
            victim = self.scheduler.victim()
            assert victim is not None, "a batch without a running sequence"
            if len(self.scheduler.running) == 1:
                raise RuntimeError(
                    f"request {victim.id} runs alone and needs {needed} slots with {self.allocator.free_slots} free; "
                    "it should have been refused on arrival"
                )
            self.scheduler.preempt(victim)
            preempted += 1
            batch = self.scheduler.next_batch()
        delta = []
        for work in batch.works if batch else ():
            delta += self.kv.grow(work.sequence.row, work.end)
        return batch, delta, commits, preempted

    def _needed_slots(self, batch: Batch | None) -> int:
        return sum(self.kv.missing_slots(w.sequence.row, w.end) for w in batch.works) if batch else 0

    def _requests(self) -> list[tuple[np.ndarray | None, int]]:
        """Routing mass and KV blocks of every running request."""
        return [(s.mass, self.kv.num_blocks(s.row)) for s in self.scheduler.running]

    def _dispatch(self, batch: Batch, kv_delta: list[tuple[int, int, np.ndarray]]) -> None:
        outputs = self.runner.dispatch(batch, kv_delta)
        if self._flight and self._flight[-1].is_done:
            self.late_steps += 1
        outputs.tokens.copy_to_host_async()
        samples = tuple(work.samples for work in batch.works)
        for work, sampled in zip(batch.works, samples, strict=True):
            work.sequence.computed = work.end
            work.sequence.pending += sampled
        self.steps += 1
        self._since_observation += 1
        mass = None
        if self.weights and (batch.shape.tokens > 1 or self._since_observation >= OBSERVE_EVERY_STEPS):
            mass, self._since_observation = self.runner.snapshot_mass(), 0
        # A row still holds its last owner's mass until the first step of its new one.
        rows = tuple((s, s.row, s.preemptions) for s in self.scheduler.running if s.computed)
        epochs = tuple(work.sequence.preemptions for work in batch.works)
        self._flight.append(_Flight(batch, samples, epochs, outputs, mass, rows))

    def _collect(self, flight: _Flight) -> list[Progress]:
        """Reads a step's results; waits for the step if it is still running."""
        started_s = time.perf_counter()
        tokens = np.asarray(flight.outputs.tokens)
        self.wait_s += time.perf_counter() - started_s
        nats = np.asarray(flight.outputs.nats) if flight.batch.shape.score else None
        progress = []
        for i, work in enumerate(flight.batch.works):
            sequence = work.sequence
            sequence.pending -= flight.samples[i]
            if sequence.status is Status.FINISHED:
                continue
            if flight.samples[i]:
                progress.append(self._take_token(sequence, int(tokens[i])))
            elif nats is not None and sequence.preemptions == flight.epochs[i]:
                self._take_nats(work, nats[i, : work.length])
        if flight.mass is not None:
            mass = np.asarray(flight.mass)
            for sequence, row, epoch in flight.rows:
                if sequence.status is Status.RUNNING and sequence.preemptions == epoch:
                    sequence.mass = mass[row]
            if self.weights:
                self.weights.refresh_due = True
        return progress

    def _take_token(self, sequence: Sequence, token: int) -> Progress:
        assert sequence.stream is not None
        if sequence.first_token_s is None:
            sequence.first_token_s = time.monotonic()
        if token < 0:
            sequence.error = "the model's logits were not finite"
            text = sequence.stream.finish("abort")
            self._finish(sequence, "abort")
            return Progress(sequence, text, None)
        sequence.outputs.append(token)
        self.tokens_generated += 1
        text, reason = sequence.stream.push(token)
        if reason is not None:
            self._finish(sequence, reason)
        return Progress(sequence, text, token)

    def _take_nats(self, work: Work, nats: np.ndarray) -> None:
        work.sequence.nats.append(nats)
        self.tokens_generated += work.length
        if work.end >= work.sequence.goal:
            self._finish(work.sequence, "length")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)
        sequence.finish_s = time.monotonic()
