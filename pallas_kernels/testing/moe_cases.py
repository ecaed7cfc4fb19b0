"""Random experts in a scattered, poisoned arena, and their outputs in float64 NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.bitplane_moe.layout import BITS, MAX_BITS, BlockLayout, MoEGeometry, dequantize_pages, pack_page

# As float32, float16 and as an index this is the worst that can be read by mistake.
POISON = np.uint32(0xFFFFFFFF)
GARBAGE_SLOT = 2**31 - 1
LAYER = 1
"""Whose rows of the tables are real."""


@dataclasses.dataclass(frozen=True)
class MoECase:
    """Shapes of one call. `bits` 0 draws mixed bits per linear-block.

    `interpreted` cases also run through the interpreted kernel where there is no GPU (seconds of compilation each).
    """

    tokens: int = 5
    hidden: int = 64
    inner: int = 32
    experts: int = 6
    top_k: int = 2
    lut_rows: int = 1
    slot_words: int = 128
    bits: int = 0
    max_bits: int = MAX_BITS
    dtype: str = "float32"
    padding: float = 0.0  # share of the pairs without an expert
    interpreted: bool = False
    seed: int = 0

    def __str__(self) -> str:
        changed = (
            f for f in dataclasses.fields(self) if f.name != "interpreted" and getattr(self, f.name) != f.default
        )
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"


@dataclasses.dataclass(frozen=True)
class MoEInputs:
    geometry: MoEGeometry
    x: np.ndarray  # float32, but of values that the case's dtype holds exactly
    expert_ids: np.ndarray
    expert_weights: np.ndarray
    gate_up_slots: np.ndarray
    down_slots: np.ndarray
    bits: np.ndarray
    arena: np.ndarray
    dense: tuple[list[np.ndarray], list[np.ndarray]]  # float32 gate_up and down of every expert

    @property
    def operands(self) -> tuple[np.ndarray, ...]:
        """Arguments of `bitplane_moe` but x is float32; the tables hold garbage for every layer but `LAYER`."""
        slots = np.concatenate([self.gate_up_slots, self.down_slots], axis=1)
        tables = np.stack([np.full_like(slots, GARBAGE_SLOT), slots])
        bits = np.stack([np.full_like(self.bits, MAX_BITS), self.bits])
        return self.x, self.expert_ids, self.expert_weights, tables, bits, self.arena


def build(case: MoECase) -> MoEInputs:
    """Pages of random linear-blocks in random slots. Everything else in the arena and the tables is poison."""
    rng = np.random.default_rng(case.seed)
    shape = dict(lut_rows=case.lut_rows, slot_words=case.slot_words)
    gate_up = BlockLayout(rows=2 * case.inner, cols=case.hidden, **shape)
    down = BlockLayout(rows=case.hidden, cols=case.inner, **shape)
    bits = rng.integers(3, case.max_bits + 1, (case.experts, 2)).astype(np.int32)
    if case.bits:
        bits[:] = case.bits
    layouts = (gate_up, down)
    used = sum(layouts[u].resident_slots(int(bits[e, u])) for e in range(case.experts) for u in (0, 1))
    arena = np.full((used + 9, case.slot_words), POISON, np.uint32)
    free = list(rng.permutation(np.arange(1, used + 9)))
    tables = [np.full((case.experts, layout.total_slots), GARBAGE_SLOT, np.int32) for layout in layouts]
    dense: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for expert in range(case.experts):
        for unit, layout in enumerate(layouts):
            pages = random_pages(rng, layout, int(bits[expert, unit]))
            dense[unit].append(dequantize_pages(layout, pages, int(bits[expert, unit])))
            for b, page in pages.items():
                for number, words in enumerate(page.reshape(-1, case.slot_words)):
                    slot = free.pop()
                    arena[slot] = words
                    tables[unit][expert, layout.page_offset_slots(b) + number] = slot
    ids = np.stack([rng.permutation(case.experts)[: case.top_k] for _ in range(case.tokens)]).astype(np.int32)
    ids[rng.random(ids.shape) < case.padding] = case.experts
    return MoEInputs(
        geometry=MoEGeometry(gate_up=gate_up, down=down, max_bits=case.max_bits),
        x=round_to(rng.normal(size=(case.tokens, case.hidden)), case.dtype),
        expert_ids=ids,
        expert_weights=rng.uniform(0.05, 1, ids.shape).astype(np.float32),
        gate_up_slots=tables[0],
        down_slots=tables[1],
        bits=bits,
        arena=arena,
        dense=dense,
    )


def random_pages(rng: np.random.Generator, layout: BlockLayout, bits: int) -> dict[int, np.ndarray]:
    """Pages 3..bits of one linear-block; every LUT is drawn on its own, so a wrong one shows."""
    indices = rng.integers(0, 256, (1, layout.rows, layout.cols)).astype(np.uint8)
    scale = rng.uniform(0.5, 2, (1, layout.rows)).astype(np.float32) / np.float32(layout.cols**0.5)
    pages = {}
    for b in BITS[: bits - 2]:
        lut = rng.normal(size=(1, layout.groups, 2**b)).astype(np.float16)
        pages[b] = pack_page(layout, b, indices, lut, scale)[0]
    return pages


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of values that `dtype` holds exactly."""
    values = np.asarray(values, np.float32)
    if dtype == "bfloat16":  # truncation is rounding enough for inputs
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return values


def expected(inputs: MoEInputs) -> tuple[np.ndarray, np.ndarray]:
    """float64 outputs: `y` `[T, H]` and the norms `[T, k]`."""
    x, ids = inputs.x.astype(np.float64), inputs.expert_ids
    y, norms = np.zeros_like(x), np.zeros(ids.shape)
    for token, choice in np.argwhere(ids < len(inputs.dense[0])):
        gate_up, down = (unit[ids[token, choice]].astype(np.float64) for unit in inputs.dense)
        gate, up = np.split(gate_up @ x[token], 2)
        hidden = gate / (1 + np.exp(-gate)) * up
        norms[token, choice] = np.linalg.norm(hidden)
        y[token] += inputs.expert_weights[token, choice] * (down @ hidden)
    return y, norms


TAILS = [
    MoECase(),
    MoECase(tokens=1, seed=1),
    MoECase(tokens=2, hidden=80, inner=24, max_bits=4, interpreted=True, seed=2),  # K no multiple of 32
    MoECase(tokens=5, hidden=96, inner=44, lut_rows=32, max_bits=4, interpreted=True, seed=3),  # N none of lut_rows
    MoECase(tokens=3, hidden=40, inner=22, top_k=6, slot_words=64, max_bits=3, interpreted=True, seed=4),
    MoECase(tokens=4, hidden=72, inner=36, lut_rows=32, slot_words=2048, seed=5),
    MoECase(tokens=5, slot_words=100, max_bits=4, interpreted=True, seed=6),  # slots of no power of two
    MoECase(tokens=6, hidden=704, inner=8, lut_rows=32, experts=3, seed=7),
    MoECase(tokens=2, hidden=32, inner=176, lut_rows=32, experts=3, max_bits=3, interpreted=True, seed=8),
    MoECase(tokens=5, bits=3, seed=9),
    MoECase(tokens=5, bits=8, lut_rows=32, seed=10),
    MoECase(tokens=9, hidden=128, experts=3, dtype="bfloat16", interpreted=True, seed=11),  # every width
    MoECase(tokens=6, padding=0.5, max_bits=3, interpreted=True, seed=12),
    MoECase(tokens=3, padding=1.0, max_bits=3, interpreted=True, seed=13),
    MoECase(tokens=64, experts=4, seed=14),
    MoECase(tokens=64, experts=12, top_k=1, padding=0.3, lut_rows=32, seed=15),
    MoECase(tokens=130, experts=5, hidden=48, top_k=3, seed=16),
    MoECase(tokens=130, experts=5, inner=24, max_bits=3, padding=0.4, slot_words=64, interpreted=True, seed=17),
    MoECase(tokens=5, dtype="bfloat16", seed=18),
    MoECase(tokens=600, experts=4, hidden=96, top_k=1, dtype="bfloat16", seed=19),
    MoECase(tokens=70, dtype="bfloat16", hidden=80, inner=40, lut_rows=32, max_bits=4, interpreted=True, seed=20),
]


def weights_in_arena(inputs: MoEInputs, expert: int, unit: int, bits: int) -> np.ndarray:
    """float32 `[N, K]` of a linear-block at `bits`, read back from its slots; at most its committed bits."""
    layout = (inputs.geometry.gate_up, inputs.geometry.down)[unit]
    table = (inputs.gate_up_slots, inputs.down_slots)[unit][expert]
    pages = {}
    for b in BITS[: bits - 2]:
        first = layout.page_offset_slots(b)
        pages[b] = inputs.arena[table[first : first + layout.page_slots(b)]].reshape(-1)
    return dequantize_pages(layout, pages, bits)


def lowered(inputs: MoEInputs, bits: np.ndarray) -> MoEInputs:
    """The same experts after an offload to `bits` `[E, 2]`: pages above are poisoned and their slots forgotten."""
    arena, tables = inputs.arena.copy(), (inputs.gate_up_slots.copy(), inputs.down_slots.copy())
    dense: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for expert, unit in np.ndindex(bits.shape):
        layout = (inputs.geometry.gate_up, inputs.geometry.down)[unit]
        dense[unit].append(weights_in_arena(inputs, expert, unit, int(bits[expert, unit])))
        span = slice(
            layout.resident_slots(int(bits[expert, unit])), layout.resident_slots(int(inputs.bits[expert, unit]))
        )
        arena[tables[unit][expert, span]] = POISON
        tables[unit][expert, span] = GARBAGE_SLOT
    return dataclasses.replace(
        inputs, arena=arena, gate_up_slots=tables[0], down_slots=tables[1], bits=bits, dense=dense
    )
