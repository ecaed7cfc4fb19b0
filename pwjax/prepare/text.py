"""The calibration tokens of a run."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from checkpoints.hf_reader import HFCheckpoint
from pwjax.calibration.text import default_texts, load_texts, token_windows
from pwjax.engine.tokenizer import Tokenizer
from pwjax.prepare.options import PrepareOptions


@dataclasses.dataclass(frozen=True)
class CalibrationText:
    """Windows of tokens and where they come from.

    Attributes:
        tokens: int32 `[n, T]`.
        sha256: of all documents, so that test texts can be told to be others.
        name: file name, or "default".
    """

    tokens: np.ndarray
    sha256: str
    name: str


def calibration_text(options: PrepareOptions, checkpoint: HFCheckpoint) -> CalibrationText:
    """As many of the wanted windows as the text fills, at least one."""
    config = checkpoint.config
    texts = default_texts(options.seed) if options.calibration is None else load_texts(options.calibration)
    tokenizer = Tokenizer.from_folder(
        checkpoint.path, vocab_size=config.vocab_size, config_eos_ids=config.eos_token_ids
    )
    end_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    length = min(options.calibration_tokens, config.max_position_embeddings)
    own_tokens = length - (tokenizer.bos_id is not None)
    ids: dict[str, list[int]] = {}
    available = 0
    for document in texts:
        if available >= options.calibration_sequences * own_tokens:
            break
        ids[document] = tokenizer.encode(document, add_bos=False)
        available += len(ids[document]) + (end_id is not None)
    tokens = token_windows(
        (document for document in texts if document in ids),
        ids.__getitem__,
        num_sequences=min(options.calibration_sequences, max(1, available // max(1, own_tokens))),
        sequence_tokens=length,
        end_id=end_id,
        bos_id=tokenizer.bos_id,
    )
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return CalibrationText(tokens, digest, str(options.calibration.name) if options.calibration else "default")
