"""Streams of ids: whole characters, stop strings over tokens, and the same text however it is cut."""

import random

import pytest

from pwjax.engine.detokenizer import IncrementalDecoder, OutputStream, StopChecker
from pwjax.engine.sampling_params import SamplingParams
from pwjax.engine.tokenizer import Tokenizer
from tests.byte_tokenizer import save_byte_level, save_sentencepiece

EOS_ID = 256
TEXT = "Zürich 😀👩‍👩‍👧 naïve — 日本語 Ελλάδα ✓\n\tend �!"
# Tokens that end inside a character: "é" and half of the next, and so on.
CROSSING = [b"\xc3\xa9\xe2", b"\x82\xac\xf0", b"\x9f\x98", b"\x80\xe6", b"\x97\xa5\xe6"]
PIECES = ["▁Hello", "▁wor", "ld", "▁", "▁▁", "x"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    merged = [b"\xc3\xa9", b"\x82\xac", b"\x97\xa5", *CROSSING]
    folder = save_byte_level(tmp_path_factory.mktemp("bytes"), merged=merged)
    return Tokenizer.from_folder(folder, vocab_size=320)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Tokenizer.from_folder(save_byte_level(tmp_path_factory.mktemp("plain")), vocab_size=300)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return Tokenizer.from_folder(save_sentencepiece(tmp_path_factory.mktemp("pieces"), PIECES))


def stream(decoder, ids):
    return [decoder.push(token_id) for token_id in ids], decoder.finish()


def run(tokenizer, ids, **fields):
    """All deltas of a request, until it ends or the ids do."""
    output = OutputStream(tokenizer, SamplingParams(**{"max_tokens": 1000, **fields}))
    deltas = []
    for token_id in ids:
        delta, reason = output.push(token_id)
        deltas.append(delta)
        if reason is not None:
            break
    return output, deltas


# Characters ----------------------------------------------------------------------------------------------------------


def test_no_delta_has_a_broken_character(plain):
    text = TEXT.replace("\ufffd", "")
    deltas, rest = stream(IncrementalDecoder(plain), text.encode())
    assert "".join(deltas) == text
    assert rest == ""
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[0] == "Z"  # complete text is not held back


def test_a_true_replacement_character_in_the_text_survives(plain):
    deltas, rest = stream(IncrementalDecoder(plain), TEXT.encode())
    assert "".join(deltas) + rest == TEXT
    deltas, rest = stream(IncrementalDecoder(plain), ("ok" + "\ufffd" * 9).encode())
    assert "".join(deltas) + rest == "ok" + "\ufffd" * 9


def test_tokens_that_end_inside_characters_release_what_is_complete(byte_level):
    first = 256 + 3  # ids follow the order of `merged`, after the bytes
    crossing = list(range(first, first + len(CROSSING)))
    assert byte_level.decode(crossing[:1]) == "é\ufffd"
    deltas, rest = stream(IncrementalDecoder(byte_level), [*crossing, 0x9C, 0xAC])
    assert "".join(deltas) + rest == "é€😀日本"
    assert deltas[0] == "é"
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_incomplete_last_character_comes_as_one_replacement_at_the_end(plain):
    deltas, rest = stream(IncrementalDecoder(plain), "a😀".encode()[:-1])
    assert "".join(deltas) == "a"
    assert rest == "\ufffd"
    assert "".join(deltas) + rest == plain.decode(list("a😀".encode()[:-1]))


def test_broken_bytes_neither_grow_the_window_nor_swallow_what_follows(plain):
    decoder = IncrementalDecoder(plain)
    parts = []
    for _ in range(500):
        parts.append(decoder.push(0x80))
        assert len(decoder._window) <= 8
    parts += [decoder.push(byte) for byte in "€ fine".encode()]
    assert "".join(parts) + decoder.finish() == "\ufffd" * 500 + "€ fine"


def test_random_bytes_stream_to_what_decoding_at_once_gives(plain):
    rng = random.Random(0)
    for _ in range(100):
        ids = [rng.choice([0x80, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xC3, 0xA9, 97, 32]) for _ in range(40)]
        deltas, rest = stream(IncrementalDecoder(plain), ids)
        assert "".join(deltas) + rest == plain.decode(ids) == bytes(ids).decode(errors="replace")


def test_special_and_unknown_ids_give_no_text_and_no_window(plain):
    decoder = IncrementalDecoder(plain)
    deltas = [decoder.push(token_id) for token_id in [0xE2, EOS_ID, 0x82, 299, 0xAC, *[EOS_ID] * 50]]
    assert deltas[4] == "€"
    assert "".join(deltas) == "€"
    assert len(decoder._window) <= 3


def test_sentencepiece_spaces(sentencepiece):
    hello, wor, ld, space, spaces, x = range(257, 257 + len(PIECES))
    for ids in ([hello, wor, ld], [space, hello], [x, space, x], [spaces, x, spaces, spaces, hello], [space] * 6 + [x]):
        deltas, rest = stream(IncrementalDecoder(sentencepiece), ids)
        assert "".join(deltas) + rest == sentencepiece.decode(ids)
    deltas, _ = stream(IncrementalDecoder(sentencepiece), [hello, wor, ld])
    assert deltas == ["Hello", " wor", "ld"]


def test_sentencepiece_bytes_one_character_after_the_other(sentencepiece):
    """Its decoder turns a whole run of bytes into replacements while the last character is incomplete."""
    ids = [byte + 1 for byte in "é€😀😀日本".encode()]
    deltas, rest = stream(IncrementalDecoder(sentencepiece), [257, *ids, 262])
    assert "".join(deltas) + rest == "Helloé€😀😀日本x"
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[2] == "é"


def test_decoding_work_a_token_does_not_grow(plain):
    class Counting:
        eos_ids = ()
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return plain.decode(ids)

        def is_silent(self, token_id):
            return plain.is_silent(token_id)

    counting = Counting()
    stream(IncrementalDecoder(counting), (TEXT * 5).encode() + b"\x80" * 50)
    assert counting.longest <= 12


# Stop strings --------------------------------------------------------------------------------------------------------


def test_stop_string_over_four_tokens_is_cut_and_no_prefix_of_it_was_sent(plain):
    output, deltas = run(plain, b"ABCDEFGHIJKLM", stop="DEFGHIJ")
    assert "".join(deltas) == output.text == "ABC"
    assert output.finish_reason == "stop"
    assert output.stop_reason == "DEFGHIJ"
    assert bytes(output.token_ids) == b"ABCDEFGHIJ"


def test_a_false_start_is_released(plain):
    output, deltas = run(plain, b"ABCDEFX", stop="DEFGHIJ")
    assert deltas == ["A", "B", "C", "", "", "", "DEFX"]
    assert output.finish_reason is None


@pytest.mark.parametrize(
    ("ids", "fields", "reason"),
    [
        ([*b"ABDEF", EOS_ID], {}, "stop"),
        ([*b"ABDEF"], {"max_tokens": 5}, "length"),
        ([*b"ABDEF", 7], {"stop_token_ids": [7]}, "stop"),
    ],
)
def test_held_back_text_is_released_at_the_end(plain, ids, fields, reason):
    output, deltas = run(plain, ids, stop="DEFG", **fields)
    assert "".join(deltas) == output.text == "ABDEF"
    assert output.finish_reason == reason


def test_held_back_text_is_released_on_abort(plain):
    output, _ = run(plain, b"ABDEF", stop="DEFG")
    assert output.finish("abort") == "DEF"
    assert (output.text, output.finish_reason) == ("ABDEF", "abort")
    assert output.finish("length") == ""
    assert output.finish_reason == "abort"


def test_a_stop_string_made_of_split_characters(plain):
    output, deltas = run(plain, "x😀日y".encode(), stop="😀日")
    assert "".join(deltas) == "x"
    assert output.stop_reason == "😀日"


def test_self_overlapping_stop_strings(plain):
    for text, stop, expected in [("aaaab", "aab", "aa"), ("abababc", "ababc", "ab"), ("xyxyz", "xyz", "xy")]:
        output, _ = run(plain, text.encode(), stop=stop)
        assert (output.text, output.stop_reason) == (expected, stop)


def naive_stop(text, stops):
    """Shortest prefix of the text that ends with a stop string, less the longest such stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_any_cutting_of_any_text_gives_the_same_result():
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 25)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 6))) for _ in range(rng.randint(0, 3))]
        expected, matched = naive_stop(text, stops)
        checker, sent, position = StopChecker(stops), "", 0
        while position < len(text):
            size = rng.randint(1, 5)
            sent += checker.push(text[position : position + size])
            position += size
            assert expected.startswith(sent)  # never anything of the stop, never anything taken back
        assert (sent + checker.finish(), checker.matched) == (expected, matched)


def test_one_token_with_text_before_the_stop_and_after_it(tmp_path):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path, merged=[b"a#", b"a#b"]))
    output, deltas = run(tokenizer, [97, 257, 98], stop="#")
    assert (deltas, output.text) == (["a", "a"], "aa")


# The end -------------------------------------------------------------------------------------------------------------


def test_any_eos_id_stops_and_ignore_eos_ignores_all(tmp_path):
    folder = save_byte_level(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    tokenizer = Tokenizer.from_folder(folder, config_eos_ids=(1,))
    for eos_id in (1, 106, EOS_ID):
        output, _ = run(tokenizer, [97, eos_id, 98])
        assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", eos_id)
        assert output.token_ids == [97, eos_id]
        output, _ = run(tokenizer, [97, eos_id, 98, 99], max_tokens=3, ignore_eos=True)
        assert (output.finish_reason, output.token_ids) == ("length", [97, eos_id, 98])
        output, _ = run(tokenizer, [97, eos_id], ignore_eos=True, stop_token_ids=[eos_id])
        assert output.finish_reason == "stop"  # an explicit stop id still stops


def test_immediate_eos_gives_empty_text(plain):
    output, deltas = run(plain, [EOS_ID], max_tokens=1)
    assert (deltas, output.text, output.finish_reason, output.token_ids) == ([""], "", "stop", [EOS_ID])


def test_max_tokens_zero_is_over_before_it_begins(plain):
    output, _ = run(plain, [], max_tokens=0)
    assert (output.finish_reason, output.text) == ("length", "")
    assert output.push(97) == ("", "length")
    assert output.token_ids == []


def test_max_tokens_one_gives_one_token(plain):
    output, deltas = run(plain, [97, 98], max_tokens=1)
    assert (deltas, output.finish_reason) == (["a"], "length")


def test_tokens_after_the_end_change_nothing(plain):
    output, _ = run(plain, [97, EOS_ID])
    assert output.push(98) == ("", "stop")
    assert (output.text, output.token_ids) == ("a", [97, EOS_ID])


def test_a_stop_string_wins_over_the_length_at_the_same_token(plain):
    output, _ = run(plain, b"ab#", stop="#", max_tokens=3)
    assert (output.text, output.finish_reason) == ("ab", "stop")


def test_length_in_mid_character_ends_as_decoding_at_once_does(plain):
    ids = list("ab€".encode()[:-1])
    output, deltas = run(plain, ids, max_tokens=len(ids))
    assert "".join(deltas) == output.text == plain.decode(ids)
