"""Moves weight pages between host and device at safe boundaries (paper section 3.3, Figure 4).

Offload: q falls, the slots above it are free; there is no copy. Reload: slots are taken, copies issued in batches of
one page kind, and the first boundary at which a batch is ready scatters it into the arena and then raises q. Batches
commit in the order in which they were issued. Bytes in flight are bounded by `max_batches`.

Exchange: the pages that rise are staged while those that fall still serve; one boundary swaps them (trades.py).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pallas_kernels.bitplane_moe.layout import MIN_BITS
from pwjax.paging.allocator import Owner, SlotAllocator
from pwjax.paging.device import DeviceTables
from pwjax.paging.host_store import HostStore, Kind
from pwjax.paging.page_table import PageState, WeightPageTable
from pwjax.paging.trades import ExchangeMove, Trades, choose_trades


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Page-ins under way. `entries` are `(index, slots, reason)` of pages of one kind, in staging order."""

    kind: Kind
    staging: Any  # jax.Array
    entries: tuple[tuple[int, np.ndarray, str], ...]


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Trades whose rising pages are on their way to staging, or there; they have no slots yet."""

    trades: Trades
    staging: Mapping[Kind, Any]  # jax.Array

    def is_ready(self) -> bool:
        return all(array.is_ready() for array in self.staging.values())


@dataclasses.dataclass(frozen=True)
class Commit:
    """One change of q that took effect at this boundary."""

    index: int
    from_bits: int
    to_bits: int
    bytes: int
    reason: str


class Mover:
    """Executes moves on the page table, the allocator and the device.

    Args:
        table, allocator, store, device: the parts it keeps in step.
        max_batches: batches in flight; each holds a staging buffer of `store.staging.nbytes`.
    """

    def __init__(
        self,
        table: WeightPageTable,
        allocator: SlotAllocator,
        store: HostStore,
        device: DeviceTables,
        max_batches: int = 2,
    ) -> None:
        self._table, self._allocator, self._store, self._device = table, allocator, store, device
        self.max_batches = max_batches
        self._slot_bytes = store.staging.slot_words * 4
        self._waiting: collections.deque[tuple[int, int, np.ndarray, str]] = collections.deque()
        self._flight: collections.deque[_Batch] = collections.deque()
        self._exchange: _Exchange | None = None
        self.bytes_moved = 0  # host to device, since the start
        self.exchanged_bits = 0  # bits that exchanges raised, since the start

    @property
    def host_bytes(self) -> int:
        """Host memory of all pages."""
        return self._store.nbytes

    @property
    def pages_in_flight(self) -> int:
        staged = self._exchange.trades.num_ups if self._exchange else 0
        return len(self._waiting) + sum(len(batch.entries) for batch in self._flight) + staged

    def movable(self) -> np.ndarray:
        """bool `[n]`: linear-blocks that may be moved now: no page in flight, and not part of an exchange."""
        movable = self._table.movable()
        if self._exchange is not None:
            movable[list(self._exchange.trades.indices)] = False
        return movable

    def lower(self, moves: list[tuple[int, int, str]]) -> list[Commit]:
        """Offloads now. `moves` are `(index, to_bits, reason)`; each must have no page in flight."""
        commits = []
        for index, bits, reason in moves:
            old = int(self._table.committed[index])
            slots = self._table.lower(index, bits)
            self._allocator.release(slots, Owner.WEIGHTS)
            commits.append(Commit(index, old, bits, len(slots) * self._slot_bytes, reason))
        self._send_bits([commit.index for commit in commits])
        return commits

    def request_raise(self, moves: list[tuple[int, int, str]]) -> None:
        """Takes slots for the pages that `(index, to_bits, reason)` need, and queues their copies.

        Raises, with nothing taken for that linear-block: MemoryError if the arena has too few free slots, ValueError
        if `to_bits` is no raise or a page of the linear-block is in flight.
        """
        table = self._table
        for index, bits, reason in moves:
            first = max(int(table.committed[index]) + 1, MIN_BITS)
            pages = range(first, bits + 1)
            if not pages or any(table.state(index, b) != PageState.HOST for b in pages):
                raise ValueError(f"linear-block {index} can't be asked up from {first - 1} to {bits} bits now")
            slots = self._allocator.allocate(sum(table.page_slots(index, b) for b in pages), Owner.IN_FLIGHT)
            table.desired[index] = bits
            start = 0
            for b in pages:
                count = table.page_slots(index, b)
                table.begin_page_in(index, b, slots[start : start + count])
                self._waiting.append((index, b, slots[start : start + count], reason))
                start += count

    def request_exchange(self, moves: Iterable[ExchangeMove]) -> bool:
        """Starts staging the pages that rise; returns False, with nothing done, while other pages are in flight.

        Args:
            moves: as `choose_trades` takes them; every linear-block must be movable.
        """
        if self.pages_in_flight:
            return False
        trades = choose_trades(moves, self._store.staging.pages, self.max_batches)
        if not trades.ups:
            return False
        fetch = lambda pages: np.array([index // 2 for index, _ in pages], np.int32)  # noqa: E731
        staging = {kind: self._store.fetch(kind, fetch(pages)) for kind, pages in trades.ups.items()}
        self._exchange = _Exchange(trades, staging)
        return True

    def cancel_exchange(self) -> bool:
        """Drops an exchange that has not taken effect; its linear-blocks are free to move. Nothing else changes."""
        pending, self._exchange = self._exchange is not None, None
        return pending

    def _commit_exchange(self) -> list[Commit]:
        """Cold pages give up their slots, hot ones take them, at one boundary."""
        assert self._exchange is not None
        exchange, self._exchange = self._exchange, None
        commits = self.lower([(index, bits, "exchange") for index, bits in exchange.trades.downs])
        for kind, pages in exchange.trades.ups.items():
            entries = []
            for index, bits in pages:
                slots = self._allocator.allocate(self._table.page_slots(index, bits), Owner.IN_FLIGHT)
                self._table.begin_page_in(index, bits, slots)
                entries.append((index, slots, "exchange"))
            commits += self._commit(_Batch(kind, exchange.staging[kind], tuple(entries)))
        self.exchanged_bits += exchange.trades.num_ups
        return commits

    def issue(self) -> None:
        """Starts copies of waiting pages, as many batches as may be in flight. Call before the step is dispatched."""
        in_use = 0 if self._exchange is None else len(self._exchange.staging)
        while self._waiting and len(self._flight) + in_use < self.max_batches:
            self._flight.append(self._next_batch())

    def _next_batch(self) -> _Batch:
        """The oldest waiting page and later ones of its kind, as many as fit a batch.

        No page overtakes a lower one of its linear-block: `drop_waiting` could else leave it on the device above a gap.
        """
        index, bits, _, _ = self._waiting[0]
        kind = (index % 2, bits)
        limit = self._store.staging.pages[kind]
        taken, kept, waiting_blocks = [], collections.deque(), set()
        for entry in self._waiting:
            if (entry[0] % 2, entry[1]) == kind and len(taken) < limit and entry[0] not in waiting_blocks:
                taken.append(entry)
            else:
                kept.append(entry)
                waiting_blocks.add(entry[0])
        self._waiting = kept
        staging = self._store.fetch(kind, np.array([entry[0] // 2 for entry in taken], np.int32))
        return _Batch(kind, staging, tuple((entry[0], entry[2], entry[3]) for entry in taken))

    def commit_ready(self, *, wait: bool = False) -> list[Commit]:
        """Commits finished batches in order; with `wait`, all that are in flight or queued."""
        commits: list[Commit] = []
        self.issue()
        while self._flight and (wait or self._flight[0].staging.is_ready()):
            commits += self._commit(self._flight.popleft())
            self.issue()
        if self._exchange is not None and (wait or self._exchange.is_ready()):
            commits += self._commit_exchange()
        return commits

    def _commit(self, batch: _Batch) -> list[Commit]:
        table, bits = self._table, batch.kind[1]
        row_slots = table.row_slots
        ids = np.concatenate([slots for _, slots, _ in batch.entries])
        columns = [table.columns(index, bits) for index, _, _ in batch.entries]
        positions = [
            np.arange(c.start, c.stop, dtype=np.int64) + index // 2 * row_slots
            for c, (index, _, _) in zip(columns, batch.entries, strict=True)
        ]
        self._device.commit_pages(batch.staging, ids, np.concatenate(positions))
        commits = []
        for index, slots, reason in batch.entries:
            self._allocator.transfer(slots, Owner.IN_FLIGHT, Owner.WEIGHTS)
            old = int(table.committed[index])
            self.bytes_moved += len(slots) * self._slot_bytes
            if table.finish_page_in(index, bits):
                new = int(table.committed[index])
                commits.append(Commit(index, old, new, len(slots) * self._slot_bytes, reason))
        self._send_bits([commit.index for commit in commits])
        return commits

    def drop_waiting(self) -> int:
        """Forgets page-ins whose copy has not started (their reason is gone); returns the slots that came free."""
        freed = 0
        while self._waiting:
            index, bits, slots, _ = self._waiting.pop()
            self._table.abandon_page_in(index, bits)
            self._allocator.release(slots, Owner.IN_FLIGHT)
            freed += len(slots)
        return freed

    def _send_bits(self, indices: list[int]) -> None:
        if indices:
            unique = np.unique(np.array(indices, np.int32))
            self._device.set_bits(unique, self._table.committed[unique].astype(np.int32))
