"""The experts' precision while serving: the planner's eyes and hands.

Turns the engine's state into the planner's inputs, and its plans into page moves. Holds the plan queue.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pwjax.engine.replay import Replay
from pwjax.paging.allocator import Owner, SlotAllocator
from pwjax.paging.mover import Commit, Mover
from pwjax.paging.page_table import WeightPageTable
from pwjax.planner import Calibration, Observation, Plan, PlanQueue, TableView, plan_step
from pwjax.planner.pressure import pressure_triggered

RELOAD_CHECK_BOUNDARIES = 16  # boundaries without news after which the planner looks for room to reload


@dataclasses.dataclass(frozen=True)
class Watermarks:
    """In KV blocks. `reserved` marks `--reserve-kv`: KV has its slots already, so it makes no pressure."""

    low_blocks: int
    high_blocks: int
    reserved: bool = False


class WeightManager:
    """Moves pages as the planner says, or not at all.

    Args:
        moves_pages: False for static methods: pages are loaded once and stay.
        replay: a run whose moves to repeat; the planner is not asked.

    Attributes:
        boundary: boundaries so far; numbers the moves.
        refresh_due: set when new routing statistics have come in.
    """

    def __init__(
        self,
        table: WeightPageTable,
        mover: Mover,
        allocator: SlotAllocator,
        calibration: Calibration,
        watermarks: Watermarks,
        block_slots: int,
        max_bits: int,
        slot_bytes: int,
        *,
        moves_pages: bool,
        replay: Replay | None = None,
    ) -> None:
        self.table, self.mover, self.calibration = table, mover, calibration
        self._allocator, self._watermarks, self._block_slots = allocator, watermarks, block_slots
        self._max_bits, self._slot_bytes = max_bits, slot_bytes
        self._moves_pages, self._replay = moves_pages, replay
        self._queue = PlanQueue()
        self.boundary = 0
        self._quiet = 0
        self.refresh_due = False
        self._lowest_slots = int(table.resident_slots[:, 0].sum())

    @property
    def pages_in_flight(self) -> int:
        return self.mover.pages_in_flight

    def load_initial(self, bits: np.ndarray) -> None:
        """Brings the pages of the initial assignment to the device, waiting for the copies."""
        self.mover.request_raise([(int(i), int(b), "load") for i, b in enumerate(bits)])
        self.mover.commit_ready(wait=True)
        self.mover.bytes_moved = 0
        self.table.initial[:] = self.table.committed

    def releasable_slots(self) -> int:
        """Slots that weights can give up. Page-ins under way count: they can be dropped, or lowered once they are here.

        So admission does not depend on how long copies take, and a replayed run admits as the recorded one did.
        """
        if not self._moves_pages:
            return 0
        used = self._allocator.used_slots
        return used(Owner.WEIGHTS) + used(Owner.IN_FLIGHT) - self._lowest_slots

    def commit_ready(self, *, wait: bool = False) -> list[Commit]:
        """First part of a boundary: page-ins that have arrived take effect."""
        self.boundary += 1
        if self._replay is None:
            return self.mover.commit_ready(wait=wait)
        return self._replay.commit_ready(self.boundary, self.table, self.mover)

    @property
    def settled(self) -> bool:
        """Whether an idle engine is done, given that this boundary changed nothing."""
        if self._replay is not None:
            return not self._replay.recorded(self.boundary)
        return not self.mover.pages_in_flight

    def check_replay_finished(self) -> None:
        """After the last request of a replayed run: raises UserError if the recorded run went on."""
        if self._replay is not None:
            self._replay.check_finished(self.boundary)

    def issue(self) -> None:
        self.mover.issue()

    def cancel_page_ins(self) -> list[Commit] | None:
        """Out of memory: gives back what page-ins hold, or waits for those under way; None if there are none."""
        if not self.mover.pages_in_flight:
            return None
        if self.mover.cancel_exchange() or self.mover.drop_waiting():
            return []
        return self.mover.commit_ready(wait=True)

    def plan(
        self, free_slots: int, growth_slots: int, requests: list[tuple[np.ndarray | None, int]], *, force: bool = False
    ) -> list[Commit]:
        """Second part of a boundary: asks the planner, carries out its plan; returns what was lowered.

        Args:
            free_slots: free after the next step's needs; negative if these do not fit.
            growth_slots: KV growth of the steps after it.
            requests: routing mass (None before the first reading) and KV blocks of every running request.
        """
        if self._replay is not None:
            return self._replay.plan(self.boundary, self.table, self.mover, idle=force)
        if not self._moves_pages:
            return []
        observation = self._observe(free_slots, growth_slots, requests)
        self._quiet += 1
        due = force or self.refresh_due or self._quiet >= RELOAD_CHECK_BOUNDARIES
        if not (due or pressure_triggered(observation)):
            return []
        self._quiet, self.refresh_due = 0, False
        self._queue, plan = plan_step(self._view(), observation, self.calibration, self._queue)
        return self._carry_out(plan)

    def _observe(self, free_slots: int, growth_slots: int, requests) -> Observation:
        layers, experts = self.table.num_layers, self.table.num_experts
        mass = np.zeros((len(requests), layers, experts))
        for i, (seen, _) in enumerate(requests):
            if seen is not None:
                mass[i] = seen
        # Equation 7 asks for one block beyond the watermark; where KV is reserved, it is among the reserved ones.
        spare = self._block_slots if self._watermarks.reserved else 0
        return Observation(
            free_slots=free_slots + spare,
            growth_slots=growth_slots,
            block_slots=self._block_slots,
            low_watermark_blocks=self._watermarks.low_blocks,
            high_watermark_blocks=self._watermarks.high_blocks,
            total_slots=self._allocator.usable_slots,
            routing_mass=mass,
            kv_blocks=np.array([float(blocks) for _, blocks in requests]),
        )

    def _view(self) -> TableView:
        table = self.table
        return TableView(
            committed=table.committed,
            desired=table.desired,
            initial=table.initial,
            slots=table.resident_slots,
            weights=table.weights,
            movable=self.mover.movable(),
            max_bits=self._max_bits,
            slot_bytes=self._slot_bytes,
        )

    def _carry_out(self, plan: Plan) -> list[Commit]:
        if plan.reason == "exchange":
            self.mover.request_exchange((m.index, m.from_bits, m.to_bits, m.slots) for m in plan.moves)
            return []
        down = [(m.index, m.to_bits, plan.reason) for m in plan.moves if m.to_bits < m.from_bits]
        up = [(m.index, m.to_bits, plan.reason) for m in plan.moves if m.to_bits > m.from_bits]
        commits = self.mover.lower(down)
        self.mover.request_raise(up)
        return commits
