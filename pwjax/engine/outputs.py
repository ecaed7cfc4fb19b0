"""What a request gives back: the final `RequestOutput`, and the `StreamEvent`s on the way to it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One finished request.

    Attributes:
        request_id: the engine's number or the caller's name of the request.
        prompt_tokens: tokens of the prompt, BOS included.
        token_ids: generated ids, with the end-of-sequence id or stop id that ended the request, if one did.
        text: generated text; no end-of-sequence token, nothing of a stop string.
        finish_reason: "stop" (end of sequence, stop id or stop string), "length" or "abort".
        stop_reason: the stop string or token id that ended it; None for "length" and "abort".
        queued_s: seconds from arrival to the first step that worked on the request.
        first_token_s: seconds from arrival to its first token; None if it never had one.
        seconds: seconds from arrival to the end.
        preemptions: times its KV was dropped and computed again.
    """

    request_id: int | str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    queued_s: float = 0.0
    first_token_s: float | None = None
    seconds: float = 0.0
    preemptions: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time from arrival; 0 where there were none or no time passed."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The entry of `results` in the JSON of `pwjax generate`."""
        fields = dataclasses.asdict(self)
        fields["token_ids"] = list(self.token_ids)
        return fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """News of one request: text and ids since its last event.

    Joining `text` of all events of a request gives `RequestOutput.text`; joining `token_ids` gives its ids. `text` is
    often empty while a character or a possible stop string is incomplete.

    Attributes:
        finish_reason: None except in the last event, which also carries `output`.
    """

    request_id: int | str
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    output: RequestOutput | None = None
