"""Which sequences run, and what the next step does. No arrays, no device: queues and counts.

Policy: requests are admitted in order of arrival as long as their KV can be found, counting what weights can give up.
A request that does not fit yet lets smaller ones pass, but not for ever. Prefill chunks and decode steps alternate, so
a long prompt delays a token of the others by one chunk at most. Out of memory, the newest request is preempted.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque

from pwjax.engine.config import EngineConfig
from pwjax.engine.sequence import Sequence, Status
from pwjax.engine.step_inputs import StepShape
from pwjax.kv.block_table import KVBlockTable

GROWTH_STEPS = 32  # how far ahead KV growth is foreseen (design: plans are prepared for the next 32 steps)
MAX_SKIPS = 256  # boundaries for which a request that doesn't fit lets later ones pass


@dataclasses.dataclass(frozen=True)
class Work:
    """One sequence's part of a step: tokens at positions `start .. start + length - 1`."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether the token sampled at the end of this work is a new token of the sequence."""
        return not self.sequence.is_score and self.end >= self.sequence.goal


@dataclasses.dataclass(frozen=True)
class Batch:
    shape: StepShape
    works: tuple[Work, ...]


class Scheduler:
    """Queues of waiting and running sequences.

    Args:
        config: bucket sizes and limits.
        kv: the block table, asked for sizes and rows.
    """

    def __init__(self, config: EngineConfig, kv: KVBlockTable) -> None:
        self._config, self._kv = config, kv
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._last_was_prefill = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def admit(self, available_slots: int, reserve_slots_per_sequence: int = 0) -> list[Sequence]:
        """Starts waiting sequences whose KV fits.

        Args:
            available_slots: free slots plus what weights can give up.
            reserve_slots_per_sequence: slots already set aside for every row (`--reserve-kv`).
        """
        admitted = []
        available = available_slots - self.promised_slots()
        for sequence in list(self.waiting):
            if not self._kv.has_free_row:
                break
            if sequence.pending:  # a token of it is still under way; its length is not known to the host yet
                continue
            need = max(0, self._kv.slots_for(self._first_goal(sequence)) - reserve_slots_per_sequence)
            if need <= available:
                available -= need
                self.waiting.remove(sequence)
                sequence.start(self._kv.acquire_row())
                self.running.append(sequence)
                admitted.append(sequence)
            else:
                sequence.skipped += 1
                if sequence.skipped > MAX_SKIPS:
                    break
        return admitted

    def _first_goal(self, sequence: Sequence) -> int:
        """Tokens that admission must have room for: all that is known, and growth while others run."""
        known = len(sequence.known) + 1
        if self.running:
            known += GROWTH_STEPS
        return min(known, sequence.final_length)

    def promised_slots(self) -> int:
        """Slots that running sequences will take to finish their prefill and grow for a while."""
        return sum(self._kv.missing_slots(s.row, self._soon(s)) for s in self.running)

    def growth_slots(self) -> int:
        """KV growth of the next `GROWTH_STEPS` steps."""
        return self.promised_slots()

    @staticmethod
    def _soon(sequence: Sequence) -> int:
        return min(max(sequence.goal, sequence.length) + GROWTH_STEPS, sequence.final_length)

    def next_batch(self) -> Batch | None:
        """The next step's work, or None when nothing can run now."""
        scoring = [s for s in self.running if s.is_score and s.in_prefill]
        if scoring:
            return self._score_batch(scoring)
        prefill = next((s for s in self.running if s.in_prefill), None)
        decoding = [s for s in self.running if not s.in_prefill and s.wants_token]
        if prefill is not None and (not decoding or not self._last_was_prefill):
            self._last_was_prefill = True
            return self._prefill_batch(prefill)
        self._last_was_prefill = False
        return self._decode_batch(decoding) if decoding else None

    def _prefill_batch(self, sequence: Sequence) -> Batch:
        left = sequence.goal - sequence.computed
        chunk = next((c for c in self._config.prefill_buckets if c >= left), self._config.prefill_buckets[-1])
        return Batch(StepShape(1, chunk), (Work(sequence, sequence.computed, min(left, chunk)),))

    def _decode_batch(self, sequences: list[Sequence]) -> Batch:
        size = next(b for b in self._config.decode_buckets if b >= len(sequences))
        return Batch(StepShape(size, 1), tuple(Work(s, s.computed, 1) for s in sequences))

    def _score_batch(self, sequences: list[Sequence]) -> Batch:
        chunk = self._config.prefill_chunk_tokens
        works = tuple(Work(s, s.computed, min(chunk, s.goal - s.computed)) for s in sequences)
        return Batch(StepShape(self._config.max_num_seqs, chunk, score=True), works)

    def victim(self) -> Sequence | None:
        """The newest running sequence: who gives way when memory runs out."""
        return max(self.running, key=lambda s: s.id, default=None)

    def preempt(self, sequence: Sequence) -> None:
        """Drops the sequence's KV and puts it back in the queue, in order of arrival."""
        self._leave(sequence)
        sequence.preempt()
        bisect.insort(self.waiting, sequence, key=lambda s: s.id)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence in any state and frees what it holds."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._kv.release_row(sequence.row)
