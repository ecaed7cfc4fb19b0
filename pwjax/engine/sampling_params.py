"""How the next token is chosen and when a request ends: `SamplingParams`, with vLLM's names and meanings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from pwjax.errors import UserError

GREEDY_BELOW_TEMPERATURE = 1e-5  # vLLM's limit: below it, dividing logits by the temperature only loses precision
_SEED_LIMIT = 2**32  # seeds travel to the device as uint32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request.

    Filters apply in this order: temperature, min-p, top-k, top-p (over what the first two left). None ever empties the
    set: the most probable token always stays.

    Attributes:
        temperature: 0 (anything below 1e-5) is greedy; the filters and the seed then have no effect.
        top_k: keep the k most probable tokens; 0 or -1 is off, more than the vocabulary is off too.
        top_p: keep the smallest set of most probable tokens whose mass reaches top_p; 1 is off.
        min_p: keep tokens with at least min_p times the probability of the most probable one; 0 is off.
        seed: same seed, same prompt, same tokens, whatever else is in the batch. None: the engine draws one.
        max_tokens: tokens to generate at most; 0 only processes the prompt's request and returns no text.
        stop: strings that end the request; neither they nor any part of them is returned.
        stop_token_ids: ids that end the request, like the model's own end-of-sequence ids; not affected by ignore_eos.
        ignore_eos: go on past every end-of-sequence id.

    Raises:
        UserError: a value out of range; the message names the field and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda v: v >= 0, "0 (greedy) or more, and finite")
        _check_number("top_p", self.top_p, lambda v: 0 < v <= 1, "above 0 and at most 1 (1 is off)")
        _check_number("min_p", self.min_p, lambda v: 0 <= v <= 1, "0 (off) to 1")
        _check_integer("top_k", self.top_k, lambda v: v >= -1, "1 or more, or 0 or -1 (off)")
        _check_integer("max_tokens", self.max_tokens, lambda v: v >= 0, "0 or more")
        if self.seed is not None:
            _check_integer("seed", self.seed, lambda v: 0 <= v < _SEED_LIMIT, "0 to 2**32 - 1, or None")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    def seed_for(self, engine_seed: int, request_number: int) -> int:
        """The uint32 seed of a request: its own, or one mixed from the engine's seed and the request's number.

        The mixing is the finalizer of SplitMix64, so that neighbouring requests get unrelated seeds.
        """
        if self.seed is not None:
            return self.seed
        mask = 2**64 - 1
        x = (engine_seed * 0x9E3779B97F4A7C15 + request_number * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return (x ^ (x >> 31)) % _SEED_LIMIT


def _check_number(name: str, value: Any, valid: Any, expected: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and valid(value)):
        raise UserError(f"{name} is {value!r}; it must be {expected}")


def _check_integer(name: str, value: Any, valid: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not valid(value):
        raise UserError(f"{name} is {value!r}; it must be an integer: {expected}")


def _stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """A lone string is one stop string, not its characters."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UserError(f"stop has the entry {string!r}; stop strings must be non-empty text")
    return strings


def _token_ids(ids: int | Iterable[int] | None) -> tuple[int, ...]:
    if isinstance(ids, int):
        ids = (ids,)
    result = tuple(ids or ())
    for token_id in result:
        _check_integer("an entry of stop_token_ids", token_id, lambda v: v >= 0, "0 or more")
    return result
