"""Perplexity through the serving engine, with windows, prefix and stride stated in the result.

Windows are `context` positions long. The default stride is `context`: windows don't overlap, and every token is scored
exactly once. A token needs something before it to be scored: the first of a window follows BOS if the tokenizer has
one (in every window, not only the first), otherwise the token before it in the text, which is fed as context only. So
without BOS just the first token of the whole text has no score. A stride below `context` gives every token more
context and still scores it once. The last window is shorter and counts by its tokens.

Standard errors treat windows as the independent units (tokens of a window are not).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pwjax.errors import UserError

DOCUMENT_SEPARATOR = "\n\n"


class TextEncoder(Protocol):
    """The part of `Tokenizer` that perplexity needs."""

    bos_id: int | None

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]: ...


class ScoringModel(Protocol):
    """The part of `LLM` that perplexity needs."""

    @property
    def tokenizer(self) -> TextEncoder: ...

    @property
    def max_model_len(self) -> int: ...

    def score(self, windows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """For every window, f32 [len - 1]: entry j is -log p(window[j + 1] | window[: j + 1]) in nats.

        The last token of a window is a target only and takes no position. Windows run in lockstep.
        """
        ...


class Window(NamedTuple):
    """Tokens to feed, the prefix included; those from index `score_from` (at least 1) on are scored."""

    tokens: list[int]
    score_from: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityResult:
    """Perplexity of one text.

    Attributes:
        tokens: scored tokens.
        nats_per_token: mean of -log p over them.
        standard_error: of `nats_per_token`, from windows; None with fewer than two.
        context, stride: positions a window, tokens between windows.
        bos: the BOS id that every window starts with; None where the tokenizer has none.
        text_sha256: of the data file's bytes.
        window_nats: the scores of each window, for paired comparisons.
    """

    nats_per_token: float
    tokens: int
    standard_error: float | None
    context: int
    stride: int
    bos: int | None
    text_sha256: str
    window_nats: list[np.ndarray] = dataclasses.field(repr=False)

    @property
    def perplexity(self) -> float:
        """exp of the mean; infinite where that overflows."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 709 else math.inf

    def to_json(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields.update(windows=len(fields.pop("window_nats")), perplexity=self.perplexity)
        return fields


class PairedDifference(NamedTuple):
    """Mean of a - b in nats a token, its standard error over windows (None with fewer than two), and the counts."""

    mean: float
    standard_error: float | None
    tokens: int
    windows: int


def make_windows(token_ids: Sequence[int], context: int, stride: int, bos: int | None) -> list[Window]:
    """Cuts a text into windows that score every token once (without BOS: every token but the first).

    Args:
        token_ids: the text, without BOS.
        context: most positions of a window; it holds up to `context + 1` tokens, as its last takes no position.
        stride: tokens between the starts of windows, at most `context`.
        bos: id in front of every window, or None.

    Raises:
        UserError: context or stride out of range, or nothing to score.
    """
    if context < 1 or (context < 2 and bos is None):
        raise UserError(f"--context is {context}; it must be at least {1 if bos is not None else 2}")
    if not 1 <= stride <= context:
        raise UserError(f"--stride is {stride}; it must be 1 to --context ({context}), or tokens would be left out")
    windows: list[Window] = []
    scored_end = 0
    for begin in range(0, len(token_ids), stride):
        end = min(begin + context, len(token_ids))
        if end > scored_end:
            window = _window(token_ids, begin, end, scored_end, bos)
            if window.score_from < len(window.tokens):
                windows.append(window)
            scored_end = end
    if not windows:
        raise UserError(f"the text has {len(token_ids)} tokens; that leaves nothing to score")
    return windows


def _window(token_ids: Sequence[int], begin: int, end: int, scored_end: int, bos: int | None) -> Window:
    prefix = [bos] if bos is not None else list(token_ids[begin - 1 : begin]) if begin else []
    score_from = len(prefix) + scored_end - begin
    return Window([*prefix, *token_ids[begin:end]], max(score_from, 1))


def mean_over_windows(window_nats: Sequence[np.ndarray]) -> tuple[float, float | None]:
    """Mean a token and its standard error, windows being the independent units (ratio estimator, float64)."""
    sums = np.array([np.sum(nats, dtype=np.float64) for nats in window_nats])
    tokens = np.array([len(nats) for nats in window_nats], np.float64)
    mean = float(sums.sum() / tokens.sum())
    count = len(sums)
    if count < 2:
        return mean, None
    residual = sums - mean * tokens
    return mean, float(math.sqrt(count / (count - 1) * np.sum(residual**2)) / tokens.sum())


def paired_difference(nats_a: Sequence[np.ndarray], nats_b: Sequence[np.ndarray]) -> PairedDifference:
    """Compares two runs over the same windows; the noise that the text itself brings cancels.

    Raises:
        ValueError: the runs have other windows.
    """
    if [len(nats) for nats in nats_a] != [len(nats) for nats in nats_b]:
        raise ValueError("paired_difference needs two runs over the same windows")
    differences = [np.asarray(a, np.float64) - np.asarray(b, np.float64) for a, b in zip(nats_a, nats_b, strict=True)]
    mean, error = mean_over_windows(differences)
    return PairedDifference(mean, error, sum(map(len, differences)), len(differences))


def read_text(path: str | Path) -> tuple[str, str]:
    """The text of a .txt file, or the `text` fields of a .jsonl file joined by empty lines; and the file's SHA-256.

    Raises:
        UserError: no such file, another suffix, no UTF-8, a bad line (by number), or no text at all.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"--data: {path} must end in .txt or .jsonl")
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
    except OSError as error:
        raise UserError(f"--data: {path} can't be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--data: {path} is not UTF-8 (byte {error.start})") from None
    if path.suffix == ".jsonl":
        # split("\n"), as splitlines() would cut at characters that JSON strings may hold, such as U+2028
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        text = DOCUMENT_SEPARATOR.join(_document(path, number, line) for number, line in lines)
    if not text.strip():
        raise UserError(f"--data: {path} has no text")
    return text, hashlib.sha256(raw).hexdigest()


def _document(path: Path, number: int, line: str) -> str:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UserError(f"--data: {path} line {number} is not JSON ({error})") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise UserError(f"--data: {path} line {number} has no field 'text' with a string")
    return fields["text"]


def run_perplexity(
    llm: ScoringModel,
    text_path: str | Path,
    *,
    context: int | None = None,
    stride: int | None = None,
    limit_tokens: int | None = None,
) -> PerplexityResult:
    """Scores a text with the serving engine.

    Args:
        llm: a loaded engine.
        text_path: .txt or .jsonl.
        context: positions a window; by default 2048 or the engine's limit, whichever is less.
        stride: by default `context`.
        limit_tokens: use only the first so many tokens of the text.

    Raises:
        UserError: an option out of range or a file that can't be used.
        FloatingPointError: the engine returned a score that is not finite.
    """
    context = min(2048, llm.max_model_len) if context is None else context
    stride = context if stride is None else stride
    if context > llm.max_model_len:
        raise UserError(f"--context is {context}, but the engine's --max-model-len is {llm.max_model_len}")
    if limit_tokens is not None and limit_tokens < 1:
        raise UserError(f"--limit-tokens is {limit_tokens}; it must be at least 1")
    text, digest = read_text(text_path)
    bos = llm.tokenizer.bos_id
    windows = make_windows(llm.tokenizer.encode(text, add_bos=False)[:limit_tokens], context, stride, bos)
    scores = llm.score([window.tokens for window in windows])
    window_nats = _scored_parts(windows, scores)
    mean, error = mean_over_windows(window_nats)
    return PerplexityResult(
        nats_per_token=mean,
        tokens=sum(map(len, window_nats)),
        standard_error=error,
        context=context,
        stride=stride,
        bos=bos,
        text_sha256=digest,
        window_nats=window_nats,
    )


def _scored_parts(windows: Sequence[Window], scores: Sequence[np.ndarray]) -> list[np.ndarray]:
    parts: list[np.ndarray] = []
    for index, (window, nats) in enumerate(zip(windows, scores, strict=True)):
        if np.shape(nats) != (len(window.tokens) - 1,):
            raise ValueError(f"window {index} of {len(window.tokens)} tokens got scores of shape {np.shape(nats)}")
        part = np.asarray(nats, np.float64)[window.score_from - 1 :]
        if not np.isfinite(part).all():
            count = int(np.sum(~np.isfinite(part)))
            raise FloatingPointError(f"window {index}: {count} of {len(part)} scores are not finite")
        parts.append(part)
    return parts
