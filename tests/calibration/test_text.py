"""Calibration text: errors that name the file and line, windows, and the embedded default."""

import importlib.resources
import json

import numpy as np
import pytest

from pwjax.calibration import default_texts, load_texts, token_windows
from pwjax.errors import UserError


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_txt_and_jsonl(tmp_path):
    assert load_texts(write(tmp_path, "a.txt", "one\ntwo\n")) == ["one\ntwo\n"]
    records = [{"text": "first\u2028line"}, {"text": "  "}, {"text": "second", "other": 1}]
    content = "\n\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    assert load_texts(write(tmp_path, "b.jsonl", content)) == ["first\u2028line", "second"]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("missing.txt", None, r"missing\.txt does not exist"),
    ("a.csv", "x", r"a\.csv must be \.txt, or \.jsonl"),
    ("empty.txt", " \n ", r"empty\.txt is empty"),
    ("empty.jsonl", "\n", r"empty\.jsonl is empty"),
    ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 \(byte 3\)"),
    ("bad.jsonl", '{"text": "a"}\n\n{"text"', r"bad\.jsonl, line 3: not JSON"),
    ("field.jsonl", '{"text": "a"}\n{"content": "b"}', r"field\.jsonl, line 2: no field 'text'"),
    ("number.jsonl", '{"text": 3}', r"number\.jsonl, line 1: no field 'text'"),
    ("list.jsonl", "[1]", r"list\.jsonl, line 1: no field 'text'"),
])  # fmt: skip
def test_bad_files(tmp_path, name, content, message):
    path = tmp_path / name if content is None else write(tmp_path, name, content)
    with pytest.raises(UserError, match=message):
        load_texts(path)


def encode(text):
    return list(text.encode())


def test_windows():
    got = token_windows(["abc", "de", "fghij"], encode, num_sequences=2, sequence_tokens=4, end_id=256)
    np.testing.assert_array_equal(got, [[97, 98, 99, 256], [100, 101, 256, 102]])
    assert got.dtype == np.int32
    got = token_windows(["abcd"], encode, num_sequences=2, sequence_tokens=3, end_id=None, bos_id=1)
    np.testing.assert_array_equal(got, [[1, 97, 98], [1, 99, 100]])


def test_too_little_text_gives_both_numbers():
    with pytest.raises(UserError, match=r"has 8 tokens, but 2 sequences of 5 need 10"):
        token_windows(["abc", "def"], encode, num_sequences=2, sequence_tokens=5, end_id=256)
    with pytest.raises(UserError, match="at least 1 sequence"):
        token_windows(["abc"], encode, num_sequences=0, sequence_tokens=5, end_id=256)


def test_default_text_is_mixed_sufficient_and_repeatable():
    texts = default_texts()
    assert texts == default_texts() != default_texts(seed=1)
    synthetic = [t for t in texts if t.startswith("Question: ") or "What is the code of" in t]
    assert 0.2 < sum(map(len, synthetic)) / sum(map(len, texts)) < 0.5
    # 64 sequences of 512 at 4.5 characters a token; every kind is among the first 16 sequences.
    assert sum(map(len, texts)) > 64 * 512 * 4.5
    head = "".join(texts)[: 16 * 512 * 3]
    assert "#### " in head and "The code of " in head and ": " in head


def test_licence_of_the_excerpt_is_packaged():
    licence = importlib.resources.files("pwjax.calibration").joinpath("wordnet_licence.md").read_text(encoding="utf-8")
    assert "WordNet 3.0 Copyright 2006 by Princeton University" in licence
    assert "appear on ALL copies" in licence
