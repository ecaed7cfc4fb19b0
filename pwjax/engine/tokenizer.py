"""Text to ids and back for a local model folder, with one rule for BOS and one for end of sequence.

BOS: the tokenizer's own `bos_token` decides. If it has one, a prompt starts with exactly one, whether or not the
tokenizer's settings would add it and whether or not a chat template already wrote it. The `bos_token_id` of a
config.json alone does not count: Qwen2's names an id that its tokenizer never puts in front.

End of sequence: the union of config.json, generation_config.json and the tokenizer; any of them ends a request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import numbers
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pwjax.errors import UserError

_NO_LIMIT = 10**30  # what transformers writes for "no limit"
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """A Hugging Face tokenizer of one model folder.

    Attributes:
        bos_id: id that every prompt starts with, or None.
        eos_ids: ids that end a request, sorted.
        vocab_size: rows of the model's embedding; every id of a prompt is below it.
        silent_ids: special tokens, which decode to no text.
    """

    def __init__(self, backend: Any, *, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        """Wraps a loaded `PreTrainedTokenizerFast`.

        Args:
            backend: the transformers tokenizer.
            vocab_size: the model's; 0 takes the tokenizer's own.
            eos_ids: further end-of-sequence ids; the tokenizer's own is always one.

        Raises:
            UserError: the tokenizer has ids that the model has no embedding for, or an end-of-sequence id is none.
        """
        self._backend = backend
        backend.model_max_length = _NO_LIMIT  # the engine's limit counts, and a warning about long texts would mislead
        largest = max(backend.get_vocab().values(), default=-1)
        self.vocab_size = vocab_size or largest + 1
        if largest >= self.vocab_size:
            raise UserError(
                f"tokenizer: its largest id is {largest}, but the model's vocab_size is {self.vocab_size}; "
                "the tokenizer files belong to another model"
            )
        self.bos_id: int | None = backend.bos_token_id
        own = () if backend.eos_token_id is None else (backend.eos_token_id,)
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *own}))
        for eos_id in self.eos_ids:
            if not 0 <= eos_id < self.vocab_size:
                raise UserError(f"end-of-sequence id {eos_id} is not in the model's vocabulary of {self.vocab_size}")
        self.silent_ids: frozenset[int] = frozenset(backend.all_special_ids)
        self._known_ids: frozenset[int] = frozenset(backend.get_vocab().values())

    @classmethod
    def from_folder(cls, folder: str | Path, *, vocab_size: int = 0, config_eos_ids: Sequence[int] = ()) -> Tokenizer:
        """Loads the tokenizer of a local folder; nothing is fetched and no code of the folder is run.

        Args:
            folder: with tokenizer files and, if the model has one, generation_config.json.
            vocab_size: `ModelConfig.vocab_size`; 0 skips the check.
            config_eos_ids: `ModelConfig.eos_token_ids`.

        Raises:
            UserError: no tokenizer there, or one that can't be read.
        """
        folder = Path(folder)
        if not any((folder / name).is_file() for name in _FILES):
            raise UserError(f"{folder}: no tokenizer files ({', '.join(_FILES[:3])})")
        with _quiet_import():
            from transformers import AutoTokenizer

            try:
                backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            except Exception as error:  # transformers raises many kinds for a bad folder
                reason = " ".join(str(error).split()) or type(error).__name__
                raise UserError(f"{folder}: the tokenizer can't be loaded: {reason[:300]}") from error
        eos_ids = {*config_eos_ids, *_generation_config_eos_ids(folder / "generation_config.json")}
        return cls(backend, vocab_size=vocab_size, eos_ids=tuple(eos_ids))

    def encode(self, text: str, *, add_bos: bool = True) -> list[int]:
        """Ids of `text`; with `add_bos`, exactly one BOS in front if the tokenizer defines one."""
        ids = list(self._backend.encode(text, add_special_tokens=False))
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Ids of a prompt given as text or as ids; ids are taken as they are, without a BOS of ours.

        Raises:
            UserError: an empty prompt where no BOS is defined, or an id outside the model's vocabulary.
        """
        if isinstance(prompt, str):
            ids = self.encode(prompt)
        elif isinstance(prompt, Iterable) and all(isinstance(token_id, numbers.Integral) for token_id in prompt):
            ids = [int(token_id) for token_id in prompt]
        else:
            raise UserError("a prompt must be text or a list of integer token ids")
        if not ids and self.bos_id is not None:
            ids = [self.bos_id]
        if not ids:
            raise UserError("the prompt is empty, and this tokenizer has no BOS token to start from; give some text")
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise UserError(
                    f"the prompt's id {token_id} (index {index}) is not in the model's vocabulary of {self.vocab_size}"
                )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; ids that the tokenizer doesn't know (padding rows) give no text."""
        known = [token_id for token_id in ids if not self.is_silent(token_id)]
        return self._backend.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def is_silent(self, token_id: int) -> bool:
        """Whether an id never gives text: a special token, or one that only the model's padded embedding has."""
        return token_id in self.silent_ids or token_id not in self._known_ids


def _generation_config_eos_ids(path: Path) -> tuple[int, ...]:
    if not path.is_file():
        return ()
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"{path}: not a JSON object that can be read ({error})") from None
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise UserError(f"{path}: eos_token_id is {value!r}; it must be an id or a list of ids")
    return ids


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """transformers advises about missing frameworks when imported; users of a tokenizer need none of them."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
