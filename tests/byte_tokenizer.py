"""Tiny tokenizers for tests, as folders that `AutoTokenizer` reads.

`save_byte_level`: byte-level BPE like Qwen2's; the id of a byte is the byte itself, so that any text and any broken
UTF-8 can be written down by hand. `save_sentencepiece`: Llama's and Mixtral's kind, with a marker for spaces and
`<0xNN>` tokens for bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

EOS = "<|end|>"
BOS = "<|start|>"


def byte_characters() -> list[str]:
    """The character that GPT-2's byte-level tokenizers write for each of the 256 bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


def save_byte_level(folder: Path, *, merged: Sequence[bytes] = (), bos: bool = False, **config: object) -> Path:
    """Ids: 0-255 the bytes, then one for each of `merged` (each must be two earlier tokens), then EOS and BOS."""
    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    merges: list[tuple[str, str]] = []
    for token in merged:
        text = "".join(characters[byte] for byte in token)
        split = next(at for at in range(1, len(text)) if text[:at] in vocab and text[at:] in vocab)
        merges.append((text[:split], text[split:]))
        vocab[text] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(folder, tokenizer, bos, config)


def save_sentencepiece(folder: Path, pieces: Sequence[str] = (), *, bos: bool = False) -> Path:
    """Ids: 0 `<unk>`, 1-256 the bytes, then `pieces` (written with U+2581 for a space), then EOS and BOS."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {piece: 257 + index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _save(folder, tokenizer, bos, {})


def _save(folder: Path, tokenizer: Tokenizer, bos: bool, config: dict[str, object]) -> Path:
    tokenizer.add_special_tokens([EOS, BOS] if bos else [EOS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": BOS if bos else None}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | config))
    return folder
