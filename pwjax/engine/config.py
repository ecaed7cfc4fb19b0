"""Options of the engine, validated. Names are vLLM's where it has one."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from pallas_kernels.bitplane_moe.layout import MAX_BITS, MIN_BITS
from pallas_kernels.platform import Implementation, resolve_implementation
from pwjax.engine.step_inputs import StepShape
from pwjax.errors import UserError
from pwjax.planner import NO_ABLATION, Ablation

MethodName = Literal["bf16", "uniform", "random", "static", "pagedweight"]


@dataclasses.dataclass(frozen=True)
class Method:
    """How the experts' precision is chosen.

    Attributes:
        name: `bf16` dense experts; `uniform` all at `bits`; `random` one-bit raises from all-3 to a mean of `bits`;
            `static` least damage within the memory (or a mean of `bits`), no movement; `pagedweight` moves pages.
        bits: the number after the colon, if any.
    """

    name: MethodName
    bits: float | None = None

    @property
    def moves_pages(self) -> bool:
        return self.name == "pagedweight"

    def __str__(self) -> str:
        return self.name if self.bits is None else f"{self.name}:{self.bits:g}"

    @classmethod
    def parse(cls, text: str) -> Method:
        if not isinstance(text, str):
            raise UserError(f"method is {text!r}; it must be text such as 'pagedweight' or 'uniform:4'")
        match = re.fullmatch(r"(bf16|uniform|random|static|pagedweight)(?::([0-9.]+))?", text)
        try:
            name, bits = match[1], None if match[2] is None else float(match[2])  # type: ignore[index]
        except (TypeError, ValueError):
            raise UserError(
                f"--method {text}: unknown; use bf16, uniform:<bits>, random:<mean>, static, static:<mean> "
                "or pagedweight"
            ) from None
        if name in ("bf16", "pagedweight") and bits is not None:
            raise UserError(f"--method {text}: {name} takes no number; use --mean-bits for a precision target")
        if name in ("uniform", "random") and bits is None:
            raise UserError(f"--method {text}: say how many bits, as in {name}:4")
        if bits is not None and not MIN_BITS <= bits <= MAX_BITS:
            raise UserError(f"--method {text}: bits must lie between {MIN_BITS} and {MAX_BITS}")
        if name == "uniform" and bits != int(bits or 0):
            raise UserError(f"--method {text}: uniform takes whole bits; static:{bits} mixes")
        return cls(name, bits)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine.

    Attributes:
        memory_budget_bytes: device bytes for everything; None takes the default for the device.
        method: see `Method`.
        mean_bits: derive the budget from this mean precision of the experts instead.
        arena_bytes: derive the budget from the arena's size instead: dense weights, tables and workspace come on top.
            Runs on devices whose workspaces differ are compared this way.
        max_model_len: longest sequence in tokens, prompt and generation; None takes the model's limit.
        max_num_seqs: sequences that run at once.
        prefill_chunk_tokens: prompt tokens in one step.
        dtype: of activations and dense weights. float32 is for parity tests.
        max_bits: highest precision served; None takes the store's default.
        low_watermark_blocks, high_watermark_blocks: free KV blocks below which weights give way, and above which they
            come back; None: 8 blocks or 2% of the arena, and twice that.
        reserve_kv: hold the KV of `max_num_seqs` full-length sequences from the start, with both watermarks 0, so that
            quality is judged at the precision that the memory really allows.
        implementation: of the kernels; an explicit choice never falls back.
        exchange: trade bits between cold and hot experts when there is no pressure.
        ablation: parts of `pagedweight` that are switched off.
        replay: a `--timeline FILE.jsonl` of an earlier run, whose moves are repeated exactly.
        scoring: for evaluation by log-probability: only scoring steps are compiled.
        seed: of `random:<mean>` and of requests that name none.
    """

    memory_budget_bytes: int | None = None
    method: Method = Method("pagedweight")
    mean_bits: float | None = None
    arena_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    prefill_chunk_tokens: int = 256
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    kv_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    block_size: int = 16
    max_bits: int | None = None
    low_watermark_blocks: int | None = None
    high_watermark_blocks: int | None = None
    reserve_kv: bool = False
    implementation: Literal["auto", "triton", "xla"] = "auto"
    exchange: bool = True
    ablation: Ablation = NO_ABLATION
    replay: str | None = None
    scoring: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        whole = "max_num_seqs prefill_chunk_tokens block_size max_model_len max_bits seed arena_bytes".split()
        for name in (*whole, "low_watermark_blocks", "high_watermark_blocks"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UserError(f"{name} is {value!r}; it must be a whole number")
        for name in ("max_num_seqs", "prefill_chunk_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise UserError(f"--max-model-len is {self.max_model_len}; it must be at least 2")
        if sum(x is not None for x in (self.memory_budget_bytes, self.mean_bits, self.arena_bytes)) > 1:
            raise UserError("--memory-budget, --mean-bits and --arena all set the budget; give one of them")
        takes_mean = self.method.name == "pagedweight" or str(self.method) == "static"
        if self.mean_bits is not None and not takes_mean:
            raise UserError(f"--mean-bits goes with --method pagedweight or static; {self.method} has its own bits")
        if self.ablation.removed and self.method.name != "pagedweight":
            flags = ", ".join(f"--no-{name}" for name in self.ablation.removed)
            raise UserError(f"{flags}: parts of --method pagedweight; {self.method} has none of them")
        if self.replay is not None and not self.ablation.movement:
            raise UserError("--replay repeats moves and --no-movement forbids them; give one of them")
        if self.replay is not None and not self.method.moves_pages:
            raise UserError(f"--replay goes with --method pagedweight; {self.method} moves no pages")
        if self.mean_bits is not None and not MIN_BITS <= self.mean_bits <= MAX_BITS:
            raise UserError(f"--mean-bits is {self.mean_bits}; it must lie between {MIN_BITS} and {MAX_BITS}")
        if self.max_bits is not None and not MIN_BITS <= self.max_bits <= MAX_BITS:
            raise UserError(f"--max-bits is {self.max_bits}; it must lie between {MIN_BITS} and {MAX_BITS}")
        if self.seed < 0:
            raise UserError(f"--seed is {self.seed}; it must be at least 0")
        low, high = self.low_watermark_blocks, self.high_watermark_blocks
        if min(low or 0, high or 0) < 0:
            raise UserError("--low-watermark-blocks and --high-watermark-blocks must be at least 0")
        if low is not None and high is not None and low > high:
            raise UserError(f"--low-watermark-blocks is {low} and --high-watermark-blocks {high}; low is at most high")
        if self.dtype not in ("bfloat16", "float32") or self.kv_dtype not in ("bfloat16", "float32"):
            raise UserError("--dtype and --kv-dtype are bfloat16 or float32")
        if self.implementation not in ("auto", "triton", "xla"):
            raise UserError(f"--implementation is {self.implementation}; use auto, triton or xla")

    @property
    def moves_pages(self) -> bool:
        """Whether pages move while serving."""
        return self.method.moves_pages and self.ablation.movement

    @property
    def step_shapes(self) -> tuple[StepShape, ...]:
        """All shapes that this engine can ever run."""
        if self.scoring:
            return (StepShape(self.max_num_seqs, self.prefill_chunk_tokens, score=True),)
        decode = (StepShape(size, 1) for size in self.decode_buckets)
        return (*decode, *(StepShape(1, chunk) for chunk in self.prefill_buckets))

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Batch sizes that decode steps are compiled for. The smallest is 2: a row's bits then don't depend on how
        many sequences share its step up to the bucket (a batch of one takes other code paths in XLA)."""
        buckets, size = [], 2
        while size < self.max_num_seqs:
            buckets.append(size)
            size *= 2
        return (*buckets, size)

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Chunk lengths that prefill steps are compiled for."""
        small = max(16, self.prefill_chunk_tokens // 8)
        return (small, self.prefill_chunk_tokens) if small < self.prefill_chunk_tokens else (self.prefill_chunk_tokens,)


def resolved(implementation: Implementation) -> Literal["triton", "xla"]:
    """What runs here for `--implementation`.

    Raises:
        UserError: it can't.
    """
    try:
        return resolve_implementation(implementation)
    except NotImplementedError as error:
        raise UserError(f"--{error}") from None
