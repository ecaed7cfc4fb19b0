"""Windows cover every token once, averages weigh by tokens, and runs go through `score`."""

import hashlib
import json
import math

import numpy as np
import pytest

from pwjax.errors import UserError
from pwjax.eval.perplexity import (
    make_windows,
    mean_over_windows,
    paired_difference,
    read_text,
    run_perplexity,
)

BOS = 1000


class Bytes:
    """A tokenizer whose ids are bytes."""

    def __init__(self, bos_id=None):
        self.bos_id = bos_id

    def encode(self, text, *, add_bos=True):
        return [*([self.bos_id] if add_bos and self.bos_id is not None else []), *text.encode()]


class FakeLLM:
    """Scores depend on the token, the one before it and the number before it, so that a wrong window shows."""

    max_model_len = 64

    def __init__(self, bos_id=None):
        self.tokenizer = Bytes(bos_id)
        self.calls = []

    def score(self, windows):
        self.calls.append(windows)
        return [np.array([nats(w[: i + 1]) for i in range(1, len(w))], np.float32) for w in windows]


def nats(tokens):
    return tokens[-1] / 50 + tokens[-2] / 1000 + 1 / len(tokens)


def scored(windows, num_tokens):
    """How often each text position is scored, found by content (tokens are their positions)."""
    counts = np.zeros(num_tokens, int)
    for window in windows:
        for token in window.tokens[window.score_from :]:
            counts[token] += 1
    return counts


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 16, 17, 30])
@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (8, 7), (2, 2), (100, 100)])
@pytest.mark.parametrize("bos", [BOS, None])
def test_every_token_is_scored_once(num_tokens, context, stride, bos):
    if num_tokens == 1 and bos is None:
        with pytest.raises(UserError, match="nothing to score"):
            make_windows(range(num_tokens), context, stride, bos)
        return
    windows = make_windows(range(num_tokens), context, stride, bos)
    counts = scored(windows, num_tokens)
    assert counts[0] == (bos is not None)  # without BOS, nothing stands before the first token
    assert (counts[1:] == 1).all()
    for window in windows:
        assert len(window.tokens) - 1 <= context  # the last token takes no position
        text = [token for token in window.tokens if token != BOS]
        assert text == list(range(text[0], text[0] + len(text)))


def test_default_windows_do_not_overlap_and_bos_opens_each():
    windows = make_windows(range(20), 8, 8, BOS)
    assert [window.tokens for window in windows] == [
        [BOS, *range(8)],
        [BOS, *range(8, 16)],
        [BOS, *range(16, 20)],
    ]
    assert [window.score_from for window in windows] == [1, 1, 1]


def test_without_bos_the_token_before_is_context_only():
    windows = make_windows(range(20), 8, 8, None)
    assert [window.tokens for window in windows] == [[*range(8)], [*range(7, 16)], [*range(15, 20)]]
    assert [window.score_from for window in windows] == [1, 1, 1]


def test_overlapping_windows_score_only_new_tokens():
    windows = make_windows(range(14), 8, 4, BOS)
    assert [window.tokens[window.score_from :] for window in windows] == [
        [*range(8)],
        [*range(8, 12)],
        [12, 13],
    ]
    assert windows[1].tokens == [BOS, *range(4, 12)]


@pytest.mark.parametrize(("context", "stride"), [(0, 1), (-1, 1), (8, 0), (8, 9), (8, -1), (1, 1)])
def test_windows_that_would_skip_tokens_are_refused(context, stride):
    with pytest.raises(UserError, match=r"--context|--stride"):
        make_windows(range(20), context, stride, None)


def test_a_context_of_one_needs_bos():
    assert len(make_windows(range(5), 1, 1, BOS)) == 5


def test_an_empty_text_has_nothing_to_score():
    with pytest.raises(UserError, match="0 tokens"):
        make_windows([], 8, 8, BOS)


def test_the_last_window_counts_by_its_tokens():
    mean, _ = mean_over_windows([np.full(100, 1.0), np.full(100, 1.0), np.full(10, 22.0)])
    assert mean == pytest.approx((200 + 220) / 210)


def test_standard_error_equals_that_of_the_mean_for_equal_windows_and_is_calibrated_for_unequal_ones():
    rng = np.random.default_rng(0)
    equal = [rng.normal(3, 1) + rng.normal(0, 0.2, 50) for _ in range(30)]
    means = np.array([window.mean() for window in equal])
    mean, error = mean_over_windows(equal)
    assert mean == pytest.approx(means.mean())
    assert error == pytest.approx(means.std(ddof=1) / math.sqrt(30))
    runs = [[np.full(rng.integers(10, 60), rng.normal(3, 1)) for _ in range(60)] for _ in range(300)]
    z = [(mean - 3) / error for mean, error in map(mean_over_windows, runs)]
    assert np.std(z) == pytest.approx(1, abs=0.15)


def test_one_window_has_no_standard_error():
    assert mean_over_windows([np.ones(5)]) == (1.0, None)


def test_pairing_removes_the_noise_of_the_text():
    rng = np.random.default_rng(1)
    a = [rng.normal(3, 2) + rng.normal(0, 1, 40).astype(np.float32) for _ in range(50)]
    b = [window - 0.01 + rng.normal(0, 0.01, 40) for window in a]
    difference = paired_difference(a, b)
    assert difference.mean == pytest.approx(0.01, abs=0.002)
    assert difference.standard_error < 0.001 < mean_over_windows(a)[1] / 50
    assert (difference.tokens, difference.windows) == (2000, 50)
    assert paired_difference(b, a).mean == pytest.approx(-difference.mean)
    with pytest.raises(ValueError, match="same windows"):
        paired_difference(a, b[:-1])


def write(tmp_path, text, name="data.txt"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize(("context", "stride"), [(16, None), (16, 4), (None, None)])
def test_a_run_equals_the_sum_done_by_hand(tmp_path, bos, context, stride):
    text = "The quick brown fox jumps over the lazy dog. " * 4
    ids = list(text.encode())
    llm = FakeLLM(bos)
    path = write(tmp_path, text)
    result = run_perplexity(llm, path, context=context, stride=stride)
    width, step = context or 64, stride or context or 64
    expected = []
    for position in range(0 if bos is not None else 1, len(ids)):
        begin = 0 if position < width else (position - width) // step * step + step
        prefix = [bos] if bos is not None else ids[max(begin - 1, 0) : begin]
        expected.append(nats([*prefix, *ids[begin : position + 1]]))
    assert result.tokens == len(expected)
    assert result.nats_per_token == pytest.approx(np.mean(expected), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-5)
    assert (result.context, result.stride, result.bos) == (width, step, bos)
    assert result.text_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_limit_counts_tokens_of_the_text(tmp_path):
    path = write(tmp_path, "x" * 1000)
    assert run_perplexity(FakeLLM(BOS), path, limit_tokens=100).tokens == 100
    assert run_perplexity(FakeLLM(), path, limit_tokens=100).tokens == 99


def test_the_json_says_how_it_was_measured(tmp_path):
    fields = run_perplexity(FakeLLM(BOS), write(tmp_path, "abc" * 100), context=32).to_json()
    names = {"tokens", "nats_per_token", "perplexity", "standard_error", "context", "stride", "bos", "windows"}
    assert names | {"text_sha256"} == set(fields)
    assert fields["windows"] == 10
    json.dumps(fields, allow_nan=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 65}, "65.*64"),
        ({"limit_tokens": 0}, "--limit-tokens"),
        ({"context": 8, "stride": 9}, "--stride"),
    ],
)
def test_options_out_of_range(tmp_path, options, message):
    llm = FakeLLM()
    with pytest.raises(UserError, match=message):
        run_perplexity(llm, write(tmp_path, "some text"), **options)
    assert llm.calls == []


def test_scores_that_are_not_finite_or_missing_are_faults(tmp_path):
    llm = FakeLLM(BOS)
    path = write(tmp_path, "x" * 100)
    good = llm.score
    llm.score = lambda windows: [np.where(np.arange(len(s)) == 2, np.nan, s) for s in good(windows)]
    with pytest.raises(FloatingPointError, match=r"window 0: 1 of 64"):
        run_perplexity(llm, path)
    llm.score = lambda windows: [s[:-1] for s in good(windows)]
    with pytest.raises(ValueError, match="shape"):
        run_perplexity(llm, path)


def test_jsonl_documents_are_joined_by_empty_lines(tmp_path):
    lines = [json.dumps({"text": "one\u2028\x85two", "id": 1}, ensure_ascii=False), "", json.dumps({"text": "three"})]
    path = write(tmp_path, "\n".join(lines) + "\n", "data.jsonl")
    text, digest = read_text(path)
    assert text == "one\u2028\x85two\n\nthree"
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", "a", r"must end in \.txt or \.jsonl"),
        ("data.txt", b"ab\xff", r"not UTF-8 \(byte 2\)"),
        ("data.txt", " \n", "no text"),
        ("data.jsonl", '{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("data.jsonl", '{"body": "a"}', "line 1 has no field 'text'"),
        ("data.jsonl", '{"text": 5}', "line 1 has no field 'text'"),
        ("data.jsonl", "[1]", "line 1 has no field 'text'"),
    ],
)
def test_bad_data_files_are_named(tmp_path, name, content, message):
    with pytest.raises(UserError, match=message) as error:
        read_text(write(tmp_path, content, name))
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_data_file(tmp_path):
    with pytest.raises(UserError, match="can't be read"):
        read_text(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match="can't be read"):
        read_text(tmp_path / "folder.txt")
