"""From token ids to text as they come: whole characters only, and nothing of a stop string.

Three layers, each usable alone:

* `IncrementalDecoder`: ids -> text that is final. Byte-level BPE splits multi-byte characters over tokens; a decoder
  shows the incomplete tail as U+FFFD, which is held back until it is complete, is certainly broken, or the end comes.
* `StopChecker`: text -> text that can't be part of a stop string any more.
* `OutputStream`: both, with end-of-sequence ids and the token limit; what streams is exactly the final text.

Cost a token is constant: decoding looks at a window of a few tokens, never at the whole output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pwjax.engine.outputs import FinishReason
from pwjax.engine.sampling_params import SamplingParams

_BROKEN = "\ufffd"
_INCOMPLETE_TOKENS = 3  # a UTF-8 character has 4 bytes at most and a token 1 at least: 3 tokens can be incomplete


class TextDecoder(Protocol):
    """What the detokenizer needs of `pwjax.engine.tokenizer.Tokenizer`."""

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def is_silent(self, token_id: int) -> bool: ...


class IncrementalDecoder:
    """Text of a growing list of ids, in pieces that never take anything back.

    The window holds the tokens of the last piece (as context: sentencepiece drops a space at the start of a text, so
    a token can't be decoded alone) and the tokens whose text is not complete yet.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context_tokens = 0  # tokens of the window whose text is all sent
        self._sent_chars = 0  # characters of the window's text that are sent

    def push(self, token_id: int) -> str:
        """The text that is final now that `token_id` has come; often empty."""
        if self._tokenizer.is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        complete = text.rstrip(_BROKEN)
        delta = complete[self._sent_chars :]
        if len(complete) == len(text):
            if delta:
                self._move_window(self._context_tokens)
            return delta
        self._sent_chars = max(self._sent_chars, len(complete))
        if len(self._window) - self._context_tokens > _INCOMPLETE_TOKENS:
            delta += self._give_up_broken(text)
        return delta

    def finish(self) -> str:
        """The rest, with an incomplete last character as U+FFFD, as decoding everything at once shows it."""
        delta = self._tokenizer.decode(self._window)[self._sent_chars :]
        self._window, self._context_tokens, self._sent_chars = [], 0, 0
        return delta

    def _move_window(self, start: int) -> None:
        self._window = self._window[start:]
        self._context_tokens = len(self._window)
        self._sent_chars = len(self._tokenizer.decode(self._window))

    def _give_up_broken(self, text: str) -> str:
        """Releases U+FFFDs too old to be completed, and keeps only the tokens that still can be.

        Without this a model that emits invalid bytes would make the window, and the cost a token, grow for ever.
        """
        self._window = self._window[-_INCOMPLETE_TOKENS:]
        self._context_tokens = 0
        # The old and the new window's texts end alike, so what is unsent is counted from the end; characters that the
        # new window has no tokens for are released.
        kept_chars = len(self._tokenizer.decode(self._window))
        release_end = max(self._sent_chars, len(text) - min(_INCOMPLETE_TOKENS, kept_chars))
        delta = text[self._sent_chars : release_end]
        self._sent_chars = kept_chars - (len(text) - release_end)
        return delta


class StopChecker:
    """Finds stop strings in text that comes in pieces, whatever the pieces.

    The stop string that is complete first ends the text; of several complete at the same character, the longest. One
    Knuth-Morris-Pratt automaton a stop string gives, at every character, how much of it the text ends with: that much
    is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = [_fallback_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is free to go; once `matched` is set, nothing more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = self._advance(char)
            if complete is not None:
                self.matched, self._held = complete, ""
                return pending[: end - len(complete)]
        free = len(pending) - max(self._matched)
        self._held = pending[free:]
        return pending[:free]

    def finish(self) -> str:
        """Held-back text that turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feeds one character; the longest stop string that it completes, if any."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != char:
                length = self._fallbacks[index][length - 1]
            length += stop[length] == char
            self._matched[index] = length
            if length == len(stop) and (complete is None or len(stop) > len(complete)):
                complete = stop
        return complete


class OutputStream:
    """One request's output: ids in, text out, and the reason it ends.

    Attributes:
        token_ids: ids so far, the one that ended the request included.
        finish_reason: None while the request runs; "length" from the start if `max_tokens` is 0.
        stop_reason: the stop string or id that ended it.
    """

    def __init__(self, tokenizer: TextDecoder, params: SamplingParams) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._checker = StopChecker(params.stop)
        self._stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(tokenizer.eos_ids)
        )
        self._max_tokens = params.max_tokens
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.stop_reason: str | int | None = None
        self.finish_reason: FinishReason | None = "length" if params.max_tokens == 0 else None

    @property
    def text(self) -> str:
        """Everything returned so far: the deltas, joined."""
        return "".join(self._parts)

    def push(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Takes the next id.

        Ids that come after the end are ignored: with a step in flight, one more than needed is computed.

        Returns:
            The text that is final now, and the reason if this id ended the request.
        """
        if self.finish_reason is not None:
            return "", self.finish_reason
        self.token_ids.append(token_id)
        if token_id in self._stop_ids:
            delta = self.finish("stop")
            if self.stop_reason is None:
                self.stop_reason = token_id
            return delta, self.finish_reason
        delta = self._checker.push(self._decoder.push(token_id))
        self._parts.append(delta)
        if self._checker.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._checker.matched
        elif len(self.token_ids) >= self._max_tokens:
            delta += self.finish("length")
        return delta, self.finish_reason

    def finish(self, reason: FinishReason) -> str:
        """Ends the request and returns the text still held back; a second call changes nothing.

        A stop string that only this last text completes still counts: `finish_reason` is then "stop".
        """
        if self.finish_reason is not None:
            return ""
        delta = self._checker.push(self._decoder.finish()) + self._checker.finish()
        self.finish_reason = reason
        if self._checker.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._checker.matched
        self._parts.append(delta)
        return delta


def _fallback_table(pattern: str) -> list[int]:
    """For every prefix, the length of its longest proper suffix that is also a prefix of `pattern`."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        length += pattern[index] == pattern[length]
        table[index] = length
    return table
