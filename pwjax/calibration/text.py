"""Calibration text: a user's file, or the default that comes with the package, cut into windows of tokens."""

from __future__ import annotations

import importlib.resources
import json
import lzma
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from pwjax.demo.synthetic import arithmetic_document, retrieval_document
from pwjax.errors import UserError

DEFAULT_SEED = 20_261_202
_EXCERPT = "wordnet_excerpt.txt.xz"
_PIECE_CHARS = 1_500
# One synthetic document to this many pieces of glosses: about a third of the text.
_PIECES_A_SYNTHETIC = 2
_MAX_KEYS = 40


def load_texts(path: str | Path) -> list[str]:
    """Documents of a `.txt` file (one document) or a `.jsonl` file (the field `text` of every line).

    Raises:
        UserError: no such file, another suffix, not UTF-8, a bad line (by number), or nothing but white space.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"calibration file {path} must be .txt, or .jsonl with a field 'text'")
    if not path.is_file():
        raise UserError(f"calibration file {path} does not exist")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"calibration file {path} is not UTF-8 (byte {error.start}); convert it first") from None
    texts = [content] if path.suffix == ".txt" else [_text_of(path, *item) for item in _lines(content)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"calibration file {path} is empty")
    return texts


def _lines(content: str) -> Iterable[tuple[int, str]]:
    # split, not splitlines: JSON strings may hold U+2028, which splitlines would cut at.
    return ((number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip())


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"calibration file {path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise UserError(f"calibration file {path}, line {number}: no field 'text' that is a string")
    return record["text"]


def default_texts(seed: int = DEFAULT_SEED) -> list[str]:
    """About 300 kB: WordNet glosses (see `wordnet_licence.md`) mixed with documents of the demo's two tasks."""
    packed = importlib.resources.files("pwjax.calibration").joinpath(_EXCERPT).read_bytes()
    pieces = _pieces(lzma.decompress(packed).decode("utf-8").splitlines(keepends=True))
    rng = random.Random(f"calibration-{seed}")
    synthetic = []
    for index in range(len(pieces) // _PIECES_A_SYNTHETIC):
        is_arithmetic = index % 2 == 0
        synthetic.append(
            arithmetic_document(rng) if is_arithmetic else retrieval_document(rng, rng.randint(3, _MAX_KEYS))
        )
    texts = pieces + synthetic
    rng.shuffle(texts)
    return texts


def _pieces(lines: Sequence[str]) -> list[str]:
    """Whole lines, joined to documents of about `_PIECE_CHARS`."""
    pieces, current = [], ""
    for line in lines:
        current += line
        if len(current) >= _PIECE_CHARS:
            pieces.append(current)
            current = ""
    return [*pieces, current] if current else pieces


def token_windows(
    texts: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    *,
    num_sequences: int,
    sequence_tokens: int,
    end_id: int | None,
    bos_id: int | None = None,
) -> np.ndarray:
    """Tokenizes documents, joins them with `end_id`, and cuts the first windows.

    Args:
        encode: text to ids, without special tokens.
        end_id: between documents, or None.
        bos_id: first token of every window, for models that expect one; part of `sequence_tokens`.

    Returns:
        int32 `[num_sequences, sequence_tokens]`.

    Raises:
        UserError: fewer tokens than that in the text; the message has both numbers.
    """
    if num_sequences < 1 or sequence_tokens < 2:
        raise UserError(
            f"calibration needs at least 1 sequence of 2 tokens, not {num_sequences} of {sequence_tokens} tokens"
        )
    start = [] if bos_id is None else [bos_id]
    own_tokens = sequence_tokens - len(start)
    wanted = num_sequences * own_tokens
    stream: list[int] = []
    for text in texts:
        stream.extend(encode(text))
        if end_id is not None:
            stream.append(end_id)
        if len(stream) >= wanted:
            break
    if len(stream) < wanted:
        raise UserError(
            f"the calibration text has {len(stream)} tokens, but {num_sequences} sequences of {sequence_tokens} need "
            f"{wanted}; give more text or ask for fewer or shorter sequences"
        )
    windows = np.array(stream[:wanted], np.int32).reshape(num_sequences, own_tokens)
    return np.concatenate([np.tile(np.array(start, np.int32), (num_sequences, 1)), windows], axis=1)
