"""The scheduler's policy, without a model: queues and counts only."""

import itertools

import pytest

from pallas_kernels.paged_attention.layout import KVGeometry
from pwjax.engine.config import EngineConfig
from pwjax.engine.sampling_params import SamplingParams
from pwjax.engine.scheduler import GROWTH_STEPS, MAX_SKIPS, Scheduler
from pwjax.engine.sequence import Sequence, Status
from pwjax.engine.step_inputs import StepShape
from pwjax.kv.block_table import KVBlockTable
from pwjax.paging.allocator import SlotAllocator

# One slot a block: a slot is 16 tokens.
GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=16, slot_words=256)


class Bench:
    """A scheduler with its KV table, and steps that only count."""

    def __init__(self, *, slots: int = 1000, seqs: int = 4, chunk: int = 32, scoring: bool = False) -> None:
        self.allocator = SlotAllocator(slots + 1)
        config = EngineConfig(max_num_seqs=seqs, prefill_chunk_tokens=chunk, scoring=scoring)
        self.kv = KVBlockTable(GEOMETRY, self.allocator, seqs, 4096)
        self.scheduler = Scheduler(config, self.kv)
        self.count = 0

    def add(self, prompt: int, max_tokens: int = 100) -> Sequence:
        sequence = Sequence(self.count, [1] * prompt, SamplingParams(), max_tokens)
        self.count += 1
        self.scheduler.add(sequence)
        return sequence

    def admit(self) -> list[int]:
        return [s.id for s in self.scheduler.admit(self.allocator.free_slots)]

    def run(self) -> list[tuple[int, str]]:
        """One step, its tokens read at once: `(sequence, "prefill" | "decode")` of what ran."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return []
        done = []
        for work in batch.works:
            sequence = work.sequence
            done.append((sequence.id, "prefill" if sequence.in_prefill else "decode"))
            self.kv.grow(sequence.row, work.end)
            sampled = work.samples
            sequence.computed = work.end
            if sampled:
                sequence.outputs.append(7)
                if len(sequence.outputs) == sequence.max_tokens:
                    self.scheduler.finish(sequence, "length")
        return done


def test_first_come_first_served():
    bench = Bench(seqs=2)
    for _ in range(3):
        bench.add(16)
    assert bench.admit() == [0, 1] and bench.admit() == []
    bench.scheduler.finish(bench.scheduler.running[0], "abort")
    assert bench.admit() == [2]


def test_small_requests_pass_a_big_one_but_not_for_ever():
    bench = Bench(slots=20, seqs=2)
    bench.add(16, 1000)
    assert bench.admit() == [0]
    big = bench.add(19 * 16, 1)
    small = 0
    for _ in range(MAX_SKIPS + 10):
        sequence = bench.add(16, 1)
        if sequence.id in bench.admit():
            small += 1
            bench.scheduler.finish(sequence, "length")
    assert 0 < small <= MAX_SKIPS + 1
    assert big.status is Status.WAITING
    bench.scheduler.finish(bench.scheduler.running[0], "length")
    assert bench.admit()[0] == big.id


def test_admission_leaves_room_for_the_growth_of_those_that_run():
    bench = Bench(slots=6)
    bench.add(32, 1000)  # 2 blocks now, 4 in GROWTH_STEPS
    assert GROWTH_STEPS == 32 and bench.admit() == [0]
    assert bench.scheduler.promised_slots() == bench.scheduler.growth_slots() == 4
    bench.add(32, 1000)  # 4 again
    assert bench.admit() == []
    bench.add(16, 2)  # one block and a token
    assert bench.admit() == [2]


def test_reserved_slots_count_for_a_request():
    bench = Bench(slots=6)
    bench.add(64, 10)
    assert [s.id for s in bench.scheduler.admit(0, reserve_slots_per_sequence=5)] == [0]


def test_prefill_and_decode_alternate():
    """A running stream waits for one chunk at most, however long another prompt; and a short prompt comes soon."""
    bench = Bench(chunk=32)
    bench.add(16, 200)
    bench.admit()
    bench.run()
    bench.add(32 * 40, 5)
    bench.add(16, 5)
    bench.admit()
    ran = [bench.run() for _ in range(60)]
    decoding = [any(id == 0 and kind == "decode" for id, kind in step) for step in ran]
    assert not any(not a and not b for a, b in itertools.pairwise(decoding))
    prefills = sum(any(kind == "prefill" for _, kind in step) for step in ran)
    assert prefills >= 29  # nor does decoding starve the prompt


def test_chunks_take_the_smallest_shape_that_fits():
    bench = Bench(chunk=32)
    sequence = bench.add(70)
    bench.admit()
    shapes = []
    while sequence.in_prefill or not shapes:
        batch = bench.scheduler.next_batch()
        shapes.append((batch.shape, batch.works[0].start, batch.works[0].length, batch.works[0].samples))
        sequence.computed = batch.works[0].end
    chunk, small = StepShape(1, 32), StepShape(1, 16)
    assert shapes == [(chunk, 0, 32, False), (chunk, 32, 32, False), (small, 64, 6, True)]


def test_decode_takes_the_smallest_bucket():
    bench = Bench()
    for _ in range(3):
        bench.add(16)
    bench.admit()
    while bench.scheduler.running[-1].in_prefill:
        bench.run()
    batch = bench.scheduler.next_batch()
    assert batch.shape == StepShape(4, 1) and [w.sequence.id for w in batch.works] == [0, 1, 2]
    bench.scheduler.finish(bench.scheduler.running[0], "abort")
    assert bench.scheduler.next_batch().shape == StepShape(2, 1)


def test_no_step_for_tokens_that_are_on_their_way():
    bench = Bench()
    sequence = bench.add(16, 1)
    bench.admit()
    sequence.computed, sequence.pending = 16, 1
    assert bench.scheduler.next_batch() is None


def test_the_newest_gives_way_and_comes_back_in_order():
    bench = Bench()
    for _ in range(4):
        bench.add(16)
    bench.admit()
    later = bench.add(16)
    first, second = bench.scheduler.victim(), None
    bench.scheduler.preempt(first)
    second = bench.scheduler.victim()
    bench.scheduler.preempt(second)
    assert (first.id, second.id) == (3, 2)
    assert [s.id for s in bench.scheduler.waiting] == [2, 3, later.id]
    assert bench.kv.used_slots == 0 and first.computed == 0 and first.row == -1 and first.preemptions == 1
    assert bench.admit() == [2, 3]


def test_a_preempted_one_that_had_passed_a_big_one_queues_behind_it():
    bench = Bench(slots=8)
    bench.add(16, 60)
    big = bench.add(100, 10)
    passer = bench.add(16, 2)
    assert bench.admit() == [0, passer.id]
    bench.scheduler.preempt(passer)
    assert [s.id for s in bench.scheduler.waiting] == [big.id, passer.id]


def test_a_preempted_request_prefills_what_it_had_generated():
    bench = Bench(chunk=32)
    sequence = bench.add(16, 50)
    bench.admit()
    for _ in range(10):
        bench.run()
    bench.scheduler.preempt(sequence)
    sequence.pending = 1
    assert bench.admit() == []  # its newest token is unknown to the host
    sequence.pending = 0
    assert bench.admit() == [0]
    assert sequence.goal == 16 + len(sequence.outputs) == 26
    assert bench.run() == [(0, "prefill")] and len(sequence.outputs) == 11


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_finish_frees_everything(state):
    bench = Bench()
    sequence = bench.add(40)
    if state == "running":
        bench.admit()
        bench.run()
        assert bench.kv.used_slots
    bench.scheduler.finish(sequence, "abort")
    assert not bench.scheduler.has_work and bench.kv.used_slots == 0
    assert (sequence.status, sequence.finish_reason) == (Status.FINISHED, "abort")


def test_scoring_runs_in_lockstep():
    bench = Bench(seqs=2, scoring=True)
    for length in (40, 20):
        sequence = Sequence(bench.count, [1] * length, SamplingParams(), 0, targets=[1] * length)
        bench.count += 1
        bench.scheduler.add(sequence)
    bench.admit()
    batch = bench.scheduler.next_batch()
    assert batch.shape == StepShape(2, 32, score=True)
    assert [(w.start, w.length, w.samples) for w in batch.works] == [(0, 32, False), (0, 20, False)]
