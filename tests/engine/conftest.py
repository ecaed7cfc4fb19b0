"""Engines on tiny models. Few distinct sizes, so that most engines find their programs in the session's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from checkpoints.store import PreparedModel
from pallas_kernels.bitplane_moe.layout import MIN_BITS
from pallas_kernels.paged_attention.layout import KVGeometry
from pwjax import LLM
from pwjax.engine.memory import round_slots
from pwjax.paging.allocator import Owner

MAX_MODEL_LEN = 96
COMMON: dict[str, Any] = {
    "max_num_seqs": 4,
    "prefill_chunk_tokens": 16,
    "max_model_len": MAX_MODEL_LEN,
    "low_watermark_blocks": 1,
}
FAMILIES = ("qwen2_moe", "mixtral")


class Sizes:
    """Slots of a prepared model's parts."""

    def __init__(self, model: PreparedModel) -> None:
        config, geometry = model.config, model.geometry()
        self.slot_bytes = 4 * model.manifest.slot_words
        pairs = config.num_moe_layers * config.num_experts
        self.weights = {
            bits: pairs * (geometry.gate_up.resident_slots(bits) + geometry.down.resident_slots(bits))
            for bits in range(MIN_BITS, 9)
        }
        self.block = KVGeometry(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            slot_words=model.manifest.slot_words,
        ).block_slots

    def sequence(self, tokens: int) -> int:
        return -(-tokens // 16) * self.block

    def tight_bytes(self) -> int:
        """All experts at 6 bits and one sequence of full length, no more."""
        return self._arena(1 + self.weights[6] + self.sequence(MAX_MODEL_LEN))

    def roomy_bytes(self) -> int:
        """All experts at 8 bits, four sequences, and watermarks."""
        return self._arena(1 + self.weights[8] + 4 * self.sequence(MAX_MODEL_LEN) + 4 * self.block)

    def _arena(self, slots: int) -> int:
        while round_slots(slots) < slots:
            slots += 1
        return slots * self.slot_bytes


@pytest.fixture(scope="session")
def sizes(prepared) -> Callable[[str], Sizes]:
    return lambda family: Sizes(PreparedModel(prepared(family).path))


@pytest.fixture
def build(prepared, sizes) -> Callable[..., LLM]:
    """`build(family, arena="tight" | "roomy", **options)`: a fresh engine."""

    def make(family: str = "qwen2_moe", arena: str = "tight", **options: Any) -> LLM:
        size = {"tight": sizes(family).tight_bytes, "roomy": sizes(family).roomy_bytes}[arena]()
        return LLM(prepared(family).path, arena_bytes=size, **{**COMMON, **options})

    return make


@pytest.fixture(scope="session")
def shared(prepared, sizes) -> Callable[..., LLM]:
    """As `build`, but the same engine for all tests that ask for the same; they leave it idle."""
    made: dict[str, LLM] = {}

    def make(family: str = "qwen2_moe", arena: str = "roomy", **options: Any) -> LLM:
        key = f"{family}-{arena}-{sorted(options.items())}"
        if key not in made:
            size = {"tight": sizes(family).tight_bytes, "roomy": sizes(family).roomy_bytes}[arena]()
            made[key] = LLM(prepared(family).path, arena_bytes=size, **{**COMMON, **options})
        assert not made[key].has_unfinished_requests
        return made[key]

    return make


def prompt(seed: int, length: int) -> list[int]:
    """Random byte ids."""
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def assert_idle(llm: LLM) -> None:
    """Nothing runs, nothing flies, no KV is held, and every slot in use is a page at its committed bits."""
    engine, allocator = llm.engine, llm.engine.allocator
    assert not engine.has_work and not llm._inboxes and not llm._open
    assert allocator.used_slots(Owner.KV) == allocator.used_slots(Owner.IN_FLIGHT) == 0
    if engine.weights is not None:
        table = engine.weights.table
        column = (table.committed - MIN_BITS)[:, None].astype(int)
        assert allocator.used_slots(Owner.WEIGHTS) == np.take_along_axis(table.resident_slots, column, 1).sum()
        assert engine.weights.pages_in_flight == 0
