"""Byte-level BPE for the demo model: Qwen2's pre-tokenizer, a vocabulary of 4,096, every digit a token of its own.

Single digits matter: sums and codes are then spelled the same way wherever they occur, which a model of this size
needs in order to learn to add and to copy.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

# Qwen2's own expression, as published in its tokenizer.json; `\p{N}` without a quantifier splits numbers into digits.
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains the BPE on `texts`; the end-of-text token takes the last id, after the learned vocabulary, as in Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}: train on more of it")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length_tokens: int) -> None:
    """Writes the files that `transformers.AutoTokenizer.from_pretrained(directory)` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length_tokens,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
    }
    special = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads `tokenizer.json` of a checkpoint directory with the tokenizers library alone."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """Id of `<|endoftext|>`."""
    token_id = tokenizer.token_to_id(END_OF_TEXT)
    if token_id is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT}: train one with scripts/train_demo_tokenizer.py")
    return token_id
