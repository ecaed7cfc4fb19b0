"""Decode speed of the serving engine: steps as users get them, the same steps without the host, and their floor."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pwjax.bench import floors
from pwjax.bench.launches import count_command_buffers, count_launches
from pwjax.bench.timing import ROUNDS, CacheEvents, copy_bytes_per_second
from pwjax.engine.llm import LLM
from pwjax.engine.sampling_params import SamplingParams
from pwjax.engine.scheduler import Batch

WARMUP_STEPS = 8
ROUTING_SAMPLES = 4  # steps over which routing is counted
DEVICE_STEPS = 20  # steps dispatched back to back
MAX_CHUNK_TOKENS = 2048  # prompts of the usual context are one chunk, so that filling the cache is quick


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What to measure.

    Attributes:
        batches: sequences that decode together, descending, each once.
        context: tokens of every sequence in the middle of the measured steps (of those that later run in a smaller
            batch, a little less in the larger ones).
        steps: measured steps a batch.
    """

    batches: tuple[int, ...]
    context: int
    steps: int

    @property
    def stage_steps(self) -> int:
        return WARMUP_STEPS + self.steps

    @property
    def max_model_len(self) -> int:
        return self.context + self.stage_steps + 2 * WARMUP_STEPS

    def prompt_lengths(self, chunk_tokens: int) -> list[int]:
        """Prompts in order of arrival; the last `b` sequences are those of batch `b`.

        A sequence decodes a step beside every prefill chunk of those after it, and in every batch it is part of.
        """
        chunks = -(-self.context // chunk_tokens)
        count = self.batches[0]
        lengths = []
        for i in range(count):
            beside = chunks * (count - 1 - i)
            stages_before = sum(batch >= count - i for batch in self.batches) - 1
            decoded = beside + stages_before * self.stage_steps + WARMUP_STEPS + self.steps // 2
            lengths.append(max(1, self.context - decoded))
        return lengths


def bench_decode(llm: LLM, options: DecodeOptions, copy_rate: float, seed: int = 0) -> list[dict[str, Any]]:
    """Fills the KV cache by prefilling random prompts, then decodes at every batch size, the largest first.

    Args:
        llm: with room for the largest batch.
        copy_rate: bytes a second, for the floors.

    Returns:
        A row a batch size.
    """
    rng = np.random.default_rng(seed)
    vocabulary = llm.model.config.vocab_size
    params = SamplingParams(max_tokens=llm.max_model_len, ignore_eos=True)
    lengths = options.prompt_lengths(llm.config.prefill_chunk_tokens)
    requests = [llm.add_request(rng.integers(0, vocabulary, n).tolist(), params) for n in lengths]
    scheduler = llm.engine.scheduler
    while scheduler.waiting or any(s.in_prefill for s in scheduler.running):
        llm.step()
    rows = []
    for batch in options.batches:
        for request in requests[: len(requests) - batch]:
            llm.abort(request)
        rows.append(_measure_batch(llm, batch, options.steps, copy_rate))
    for request in requests:
        llm.abort(request)
    return rows


def _measure_batch(llm: LLM, batch: int, steps: int, copy_rate: float) -> dict[str, Any]:
    for _ in range(WARMUP_STEPS):
        llm.step()
    late_steps, wait_s = llm.engine.late_steps, llm.engine.wait_s
    moments = [time.perf_counter()]
    for _ in range(steps):
        llm.step()
        moments.append(time.perf_counter())
    late_steps, wait_s = llm.engine.late_steps - late_steps, llm.engine.wait_s - wait_s
    work = _decode_work(llm)
    assert len(work.works) == batch, f"{len(work.works)} sequences decode, not {batch}"
    contexts = [item.end - steps // 2 for item in work.works]
    step_s = statistics.median(np.diff(moments).tolist())
    device_s = _device_step_seconds(llm, work)
    reads, bits = _step_bytes(llm, work, contexts)
    floor_s = reads.total / copy_rate
    hlo = _optimized_hlo(llm, work)
    launches = count_launches(hlo)
    return {
        "batch": batch,
        "method": str(llm.config.method),
        "bits": bits,
        "context": float(np.mean(contexts)),
        "tokens_per_second": batch / step_s,
        "step_ms": 1e3 * step_s,
        "mean_step_ms": 1e3 * (moments[-1] - moments[0]) / steps,
        "host_ms": 1e3 * (moments[-1] - moments[0] - wait_s) / steps,
        "late_steps": late_steps,
        "device_step_ms": 1e3 * device_s,
        "floor_ms": 1e3 * floor_s,
        "floor_share": floor_s / step_s,
        "device_floor_share": floor_s / device_s,
        "bytes": dataclasses.asdict(reads) | {"total": reads.total},
        "launches": launches["total"],
        "launches_by_opcode": launches,
        "command_buffers": count_command_buffers(hlo),
        "memory_bytes": _used_bytes(llm),
    }


def _decode_work(llm: LLM) -> Batch:
    """The next decode step of all running sequences, with KV blocks for it. The engine may run it again later."""
    work = llm.engine.scheduler.next_batch()
    assert work is not None and work.shape.tokens == 1, "sequences are to decode"
    delta = []
    for item in work.works:
        delta += llm.engine.kv.grow(item.sequence.row, item.end)
    llm.engine.runner.dispatch(work, delta)
    return work


def _device_step_seconds(llm: LLM, work: Batch) -> float:
    """Seconds of a step dispatched again and again without boundaries: it rewrites one position."""
    runner = llm.engine.runner
    rounds = []
    for _ in range(ROUNDS):
        jax.block_until_ready(runner.dispatch(work, []))
        started_s = time.perf_counter()
        jax.block_until_ready([runner.dispatch(work, []) for _ in range(DEVICE_STEPS)][-1])
        rounds.append((time.perf_counter() - started_s) / DEVICE_STEPS)
    return statistics.median(rounds)


def _step_bytes(llm: LLM, work: Batch, contexts: list[int]) -> tuple[floors.StepBytes, float | None]:
    """What a step reads, with the experts that steps really chose; and the mean bits of these."""
    config = llm.model.config
    samples = [_chosen_experts(llm, work) for _ in range(ROUTING_SAMPLES)]
    chosen = np.mean(samples, axis=0)
    bits = None
    if llm.engine.weights:
        bits = llm.engine.weights.table.committed.reshape(*chosen.shape, 2)
    reads = floors.StepBytes(
        dense=floors.dense_bytes(config, len(work.works)),
        kv=floors.kv_bytes(config, contexts),
        experts=floors.expert_bytes(config, chosen, bits, llm.model.manifest.lut_rows),
    )
    return reads, None if bits is None else floors.traffic_bits(config, chosen, bits)


def _chosen_experts(llm: LLM, work: Batch) -> np.ndarray:
    """bool `[L, E]`: experts that one step chose, by what it added to the routing mass."""
    runner = llm.engine.runner
    rows = [item.sequence.row for item in work.works]
    before = np.asarray(runner.snapshot_mass())
    runner.dispatch(work, [])
    after = np.asarray(runner.snapshot_mass())
    return np.asarray(np.any((after > before)[rows], axis=0))


def _used_bytes(llm: LLM) -> int:
    """Bytes that this moment needs: all that is fixed, and the slots in use."""
    allocator = llm.engine.allocator
    used = allocator.usable_slots - allocator.free_slots
    return llm.built.fixed.total_bytes + used * llm.engine.kv.geometry.slot_words * 4


def _optimized_hlo(llm: LLM, work: Batch) -> str:
    runner = llm.engine.runner
    return runner.steps[work.shape].as_text() or ""


def run_decode(
    make_llm: Callable[..., LLM], options: DecodeOptions, *, max_num_seqs: int | None = None, seed: int = 0
) -> tuple[LLM, dict[str, Any]]:
    """Measures the copy rate, builds the engine, and benches it.

    Args:
        make_llm: called with the options `max_num_seqs`, `max_model_len` and `prefill_chunk_tokens`.
        max_num_seqs: of the engine; None takes the largest batch.
    """
    copy_rate = copy_bytes_per_second()
    started_s = time.monotonic()
    with CacheEvents() as cache:
        llm = make_llm(
            max_num_seqs=max_num_seqs or options.batches[0],
            max_model_len=options.max_model_len,
            prefill_chunk_tokens=min(options.context, MAX_CHUNK_TOKENS),
        )
    load_s = time.monotonic() - started_s
    rows = bench_decode(llm, options, copy_rate, seed)
    return llm, {
        "rows": rows,
        "copy_bytes_per_second": copy_rate,
        "cold_start_seconds": llm.built.compile_seconds,
        "load_seconds": load_s,
        "step_shapes": len(llm.config.step_shapes),
        "compilation_cache_hits": cache.hits,
        "compilation_cache_misses": cache.misses,
    }
