"""`LLM`: the Python interface. Names and meanings are vLLM's where it has one."""

from __future__ import annotations

import dataclasses
import numbers
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.store import PreparedModel
from pwjax.cli_common import parse_bytes
from pwjax.engine.accounting import Accounting, mean_bits
from pwjax.engine.build import BuiltEngine, ModelSource, build_engine
from pwjax.engine.config import EngineConfig, Method
from pwjax.engine.core import Progress
from pwjax.engine.detokenizer import OutputStream
from pwjax.engine.outputs import RequestOutput, StreamEvent
from pwjax.engine.sampling_params import SamplingParams
from pwjax.engine.sequence import Sequence, Status
from pwjax.engine.tokenizer import Tokenizer
from pwjax.errors import UserError
from pwjax.timeline import BoundaryRecord, Timeline

Prompt = str | Seq[int]


class LLM:
    """A prepared model, ready to generate under a memory budget.

    Args:
        path: folder that `pwjax prepare` made, or a model that is in memory and has its own `tokenizer`.
        memory_budget: bytes, or a size such as "12GiB": device memory for everything.
        method: "pagedweight", "bf16", "uniform:4", "random:3.5", "static" or "static:4".
        on_record: called with a `BoundaryRecord` after every boundary.
        keep_timeline: keep all records in `timeline`.
        on_progress: called while loading with what is loaded, how much is done, and how much there is.
        **options: fields of `EngineConfig`.

    Raises:
        UserError: bad options, a damaged or unfinished store, a budget that is too small.

    Example:
        llm = LLM("out/demo/model", memory_budget="24MiB")
        print(llm.generate(["The code of amber is"], SamplingParams(max_tokens=32))[0].text)
    """

    def __init__(
        self,
        path: str | Path | ModelSource,
        *,
        memory_budget: int | str | None = None,
        method: str = "pagedweight",
        on_record: Callable[[BoundaryRecord], None] | None = None,
        keep_timeline: bool = False,
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
        **options: Any,
    ) -> None:
        budget = None if memory_budget is None else parse_bytes(memory_budget, "--memory-budget")
        self.config = EngineConfig(memory_budget_bytes=budget, method=Method.parse(method), **options)
        self.timeline = Timeline() if keep_timeline else None
        self._accounting = Accounting(on_record, self.timeline)
        self.model, self.tokenizer = _open_model(path)
        self._next_id = 0
        self.score_mean_bits: float | None = None  # mean bits over the tokens of the last `score`
        self._open: dict[int, Sequence] = {}  # requests of `add_request` that have not finished
        self._news: deque[StreamEvent] = deque()  # of these, since the last `step`
        self._inboxes: dict[int, deque[StreamEvent]] = {}  # where news of a request goes, whoever runs the engine
        self.built: BuiltEngine = build_engine(self.model, self.config, self._accounting.on_boundary, on_progress)
        self.engine = self.built.engine
        self._accounting.start(self.built)

    # Sizes.

    @property
    def max_model_len(self) -> int:
        return self.built.max_model_len

    @property
    def mean_bits(self) -> float | None:
        """Committed bits, averaged over the weights; None for dense experts."""
        return mean_bits(self.engine)

    @property
    def _slot_bytes(self) -> int:
        return self.engine.kv.geometry.slot_words * 4

    # Requests.

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        on_event: Callable[[StreamEvent], None] | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to their end, batched continuously; results in the order of the prompts.

        Args:
            prompts: text or token ids; one prompt or several.
            params: one for all, or one a prompt.
            on_event: called with every piece of text.

        Raises:
            UserError: before anything runs, if any prompt can't be served.
        """
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], numbers.Integral)):
            prompts = [prompts]  # type: ignore[list-item]
        many = [params or SamplingParams()] * len(prompts) if not isinstance(params, (list, tuple)) else list(params)
        if len(many) != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {len(many)} sampling params; give one for all or one each")
        sequences = [self._sequence(p, q) for p, q in zip(prompts, many, strict=True)]  # type: ignore[arg-type]
        inbox: deque[StreamEvent] = deque()
        for sequence in sequences:
            self._submit(sequence, inbox)
        try:
            while any(s.status is not Status.FINISHED for s in sequences):
                self._advance()
                while inbox:
                    event = inbox.popleft()
                    if on_event is not None:
                        on_event(event)
        finally:
            for sequence in sequences:
                self._cancel(sequence)
        self._drain()
        return [self._output(s) for s in sequences]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """Yields a request's text as it comes. Closing the iterator cancels the request.

        The prompt is checked at once; the request is queued when the first event is asked for. Several streams, and
        other requests, may be open at a time: whichever is read runs the engine for all.
        """
        return self._stream(self._sequence(prompt, params or SamplingParams()))

    def _stream(self, sequence: Sequence) -> Iterator[StreamEvent]:
        inbox: deque[StreamEvent] = deque()
        self._submit(sequence, inbox)
        try:
            if sequence.status is Status.FINISHED:
                yield StreamEvent(
                    request_id=sequence.id, text="", finish_reason="length", output=self._output(sequence)
                )
            while sequence.status is not Status.FINISHED or inbox:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._advance()
        finally:
            self._cancel(sequence)
            self._drain()

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queues a request for `step`; returns its id."""
        sequence = self._sequence(prompt, params or SamplingParams())
        self._submit(sequence, self._news)
        if sequence.status is Status.FINISHED:
            self._news.append(
                StreamEvent(request_id=sequence.id, text="", finish_reason="length", output=self._output(sequence))
            )
        else:
            self._open[sequence.id] = sequence
        return sequence.id

    def step(self) -> list[StreamEvent]:
        """One boundary and one step for all queued requests; news of those of `add_request` since the last call."""
        self._advance()
        self._drain()
        events = list(self._news)
        self._news.clear()
        for event in events:
            if event.finish_reason is not None:
                self._open.pop(event.request_id, None)  # type: ignore[arg-type]
        return events

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self.engine.has_work or bool(self._news)

    def abort(self, request_id: int) -> None:
        """Cancels a request at any moment; its memory is free at once. Unknown and finished ids are ignored."""
        sequence = self._open.pop(request_id, None)
        if sequence is not None:
            self._cancel(sequence)
            self._drain()

    def score(self, windows: Seq[Seq[int]]) -> list[np.ndarray]:
        """Minus log-probability in nats of every token of each window but its first: float32 `[len - 1]`.

        Windows run in lockstep, `max_num_seqs` at once, a boundary after each chunk. Needs `scoring=True`.
        """
        if not self.config.scoring:
            raise UserError("LLM.score needs LLM(..., scoring=True), which compiles scoring steps")
        sequences = []
        for window in windows:
            if not 2 <= len(window) <= self.max_model_len + 1:
                raise UserError(
                    f"a window to score has {len(window)} tokens; it must have 2 to {self.max_model_len + 1} "
                    "(the last one needs no position)"
                )
            ids = self.tokenizer.prompt_ids(window)
            sequences.append(self._queueable(Sequence(self._next_id, ids[:-1], SamplingParams(), 0, targets=ids[1:])))
        for sequence in sequences:
            self.engine.add(sequence)
        weighted = tokens = 0.0
        while self.engine.has_work:
            before = self.engine.tokens_generated
            self._advance()
            scored = self.engine.tokens_generated - before
            weighted, tokens = weighted + scored * (self.mean_bits or 0.0), tokens + scored
        self.score_mean_bits = weighted / tokens if self.mean_bits is not None and tokens else None
        return [np.concatenate(s.nats) for s in sequences]

    def _submit(self, sequence: Sequence, inbox: deque[StreamEvent]) -> None:
        """Queues a request whose news goes to `inbox`."""
        self.engine.add(sequence)
        if sequence.status is not Status.FINISHED:
            self._inboxes[sequence.id] = inbox

    def _cancel(self, sequence: Sequence) -> None:
        self.engine.abort(sequence)
        self._inboxes.pop(sequence.id, None)

    def _advance(self) -> None:
        """One boundary and one step; everybody's news to their inboxes."""
        with self._accounting.compilations:
            progresses = self.engine.step()
        for progress in progresses:
            inbox = self._inboxes.get(progress.sequence.id)
            if inbox is not None:
                inbox.append(self._event(progress))
                if progress.sequence.status is Status.FINISHED:
                    del self._inboxes[progress.sequence.id]

    def _sequence(self, prompt: Prompt, params: SamplingParams) -> Sequence:
        """Checks a prompt against every limit, so that nothing fails later.

        Raises:
            UserError: an empty prompt, one that is too long, or a request that the budget can never hold.
        """
        if self.config.scoring:
            raise UserError("an LLM with scoring=True only scores; make another one to generate")
        ids = self.tokenizer.prompt_ids(prompt)
        limit = self.max_model_len
        if len(ids) >= limit:
            raise UserError(
                f"the prompt has {len(ids)} tokens and the limit is {limit} with at least one generated; "
                "shorten it or raise --max-model-len"
            )
        max_tokens = min(params.max_tokens, limit - len(ids))
        stream = OutputStream(self.tokenizer, dataclasses.replace(params, max_tokens=max_tokens))
        seed = params.seed_for(self.config.seed, self._next_id)
        return self._queueable(Sequence(self._next_id, ids, params, max_tokens, seed=seed, stream=stream))

    def _queueable(self, sequence: Sequence) -> Sequence:
        """Refuses a request whose KV can never fit; else takes the next request number."""
        needed = self.engine.kv.slots_for(sequence.final_length)
        available = self.engine.allocator.usable_slots - self.built.least_weight_slots
        if needed > available:
            raise UserError(
                f"a prompt of {len(sequence.prompt)} tokens with {sequence.max_tokens} to generate needs "
                f"{needed * self._slot_bytes} bytes of KV cache and the memory budget leaves "
                f"{available * self._slot_bytes} at the lowest precision; lower --max-tokens or raise --memory-budget"
            )
        self._next_id += 1
        return sequence

    def _drain(self) -> None:
        """Reads what is still in flight and, when nothing is left to do, lets page moves settle."""
        if not self.engine.scheduler.has_work:
            while self.engine.has_work:
                self._advance()
            with self._accounting.compilations:
                self.engine.settle()

    def _event(self, progress: Progress) -> StreamEvent:
        sequence = progress.sequence
        done = sequence.status is Status.FINISHED
        return StreamEvent(
            request_id=sequence.id,
            text=progress.text,
            token_ids=() if progress.token_id is None else (progress.token_id,),
            finish_reason=sequence.finish_reason if done else None,  # type: ignore[arg-type]
            output=self._output(sequence) if done else None,
        )

    def _output(self, sequence: Sequence) -> RequestOutput:
        stream = sequence.stream
        assert stream is not None
        stream.finish(sequence.finish_reason or "abort")  # type: ignore[arg-type]
        since = lambda moment: None if moment is None else moment - sequence.arrival_s  # noqa: E731
        return RequestOutput(
            request_id=sequence.id,
            prompt_tokens=len(sequence.prompt),
            token_ids=tuple(stream.token_ids),
            text=stream.text,
            finish_reason=stream.finish_reason or "abort",
            stop_reason=stream.stop_reason,
            queued_s=since(sequence.started_s) or 0.0,
            first_token_s=since(sequence.first_token_s),
            seconds=since(sequence.finish_s) or 0.0,
            preemptions=sequence.preemptions,
        )

    # Figures.

    def stats(self) -> dict[str, Any]:
        """Figures since the engine was built; docs/serving.md explains the names."""
        built = self.built
        experts = {"bitplane_moe": built.implementation} if self.engine.weights else {"dense_moe": "xla"}
        return {
            "method": str(self.config.method),
            "ablated": list(self.config.ablation.removed),
            "device": jax.devices()[0].device_kind,
            "implementations": {"paged_attention": built.implementation, **experts},
            "host_store_bytes": built.host_store_bytes,
            "max_model_len": built.max_model_len,
            **self._accounting.stats(self.engine),
        }


def _open_model(source: str | Path | ModelSource) -> tuple[ModelSource, Any]:
    """The model and its tokenizer."""
    if not isinstance(source, (str, Path)):
        return source, source.tokenizer  # type: ignore[attr-defined]
    model = PreparedModel(source)
    tokenizer = Tokenizer.from_folder(
        model.tokenizer_path, vocab_size=model.config.vocab_size, config_eos_ids=model.config.eos_token_ids
    )
    return model, tokenizer
