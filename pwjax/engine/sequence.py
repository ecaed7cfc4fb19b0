"""A request while the engine works on it."""

from __future__ import annotations

import dataclasses
import enum
import time

import numpy as np

from pwjax.engine.detokenizer import OutputStream
from pwjax.engine.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Sequence:
    """One request.

    Attributes:
        prompt: token ids.
        params: how to sample, when to stop.
        max_tokens: new tokens at most, the model's length limit counted in.
        targets: for a request that scores its prompt: the tokens whose log-probability is wanted, one a prompt token.
        outputs: tokens that the host has read.
        pending: tokens sampled on the device that the host has not read yet.
        computed: positions whose KV is written by steps dispatched so far.
        goal: positions to prefill before decoding starts (prompt, and after a preemption the outputs too).
        row: row of the KV table while running.
        mass: float32 `[moe_layers, experts]`, routing mass when last observed; None before.
        nats: scores read so far.
        error: why the engine gave up on the request, for `finish_reason` "abort".
        seed: of this request's random numbers, uint32.
        stream: ids to text; None for a request that scores.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0
    stream: OutputStream | None = None
    targets: list[int] | None = None
    status: Status = Status.WAITING
    outputs: list[int] = dataclasses.field(default_factory=list)
    pending: int = 0
    computed: int = 0
    goal: int = 0
    row: int = -1
    skipped: int = 0
    preemptions: int = 0
    finish_reason: str | None = None
    error: str | None = None
    mass: np.ndarray | None = None
    nats: list[np.ndarray] = dataclasses.field(default_factory=list)
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)
    started_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None

    @property
    def is_score(self) -> bool:
        return self.targets is not None

    @property
    def known(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def length(self) -> int:
        """Tokens that exist, those on the device included."""
        return len(self.prompt) + len(self.outputs) + self.pending

    @property
    def final_length(self) -> int:
        """Positions that can ever need KV: the last new token is never fed back."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.goal

    @property
    def wants_token(self) -> bool:
        """Whether one more token is to be sampled, as far as lengths tell."""
        return not self.is_score and len(self.outputs) + self.pending < self.max_tokens

    def start(self, row: int) -> None:
        self.status, self.row = Status.RUNNING, row
        self.computed, self.goal = 0, len(self.prompt) + len(self.outputs)

    def preempt(self) -> None:
        """Back to the queue: KV is gone and will be computed again."""
        self.status, self.row, self.computed, self.mass = Status.WAITING, -1, 0, None
        self.preemptions += 1
        if self.is_score:
            self.nats.clear()
