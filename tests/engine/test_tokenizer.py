"""BOS exactly once or not at all, end of sequence from three places, and folders that can't be used."""

import json
import logging

import pytest

from pwjax.engine.tokenizer import Tokenizer
from pwjax.errors import UserError
from tests.byte_tokenizer import BOS, EOS, save_byte_level, save_sentencepiece

EOS_ID, BOS_ID, VOCAB = 256, 257, 258


def test_text_round_trips_without_bos_where_none_is_defined(tmp_path):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path), vocab_size=VOCAB)
    text = "naïve 😀 déjà  vu\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.bos_id is None


def test_config_bos_alone_adds_nothing(tmp_path):
    """Qwen2's config.json names a bos_token_id that its tokenizer never writes."""
    save_byte_level(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_moe", "bos_token_id": 256}))
    tokenizer = Tokenizer.from_folder(tmp_path, vocab_size=VOCAB)
    assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"add_bos_token": True}])
@pytest.mark.parametrize("text", ["ab", BOS + "ab"])
def test_exactly_one_bos_for_raw_and_for_templated_text(tmp_path, settings, text):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path, bos=True, **settings))
    assert tokenizer.encode(text) == [BOS_ID, 97, 98]
    assert tokenizer.encode("ab", add_bos=False) == [97, 98]


def test_no_eos_is_added_to_a_prompt(tmp_path):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path, add_eos_token=True))
    assert tokenizer.encode("ab") == [97, 98]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_bos_where_defined_and_an_error_otherwise(tmp_path, prompt):
    with_bos = Tokenizer.from_folder(save_byte_level(tmp_path / "with", bos=True))
    without = Tokenizer.from_folder(save_byte_level(tmp_path / "without"))
    assert with_bos.prompt_ids(prompt) == [BOS_ID]
    with pytest.raises(UserError, match="empty"):
        without.prompt_ids(prompt)
    assert without.prompt_ids("a") == [97]  # the next request works


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, bad):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path, bos=True), vocab_size=VOCAB)
    assert tokenizer.prompt_ids([5, 6]) == [5, 6]
    with pytest.raises(UserError, match=rf"id {bad} \(index 1\)"):
        tokenizer.prompt_ids([5, bad])


def test_eos_is_the_union_of_config_generation_config_and_tokenizer(tmp_path):
    save_byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106]}))
    tokenizer = Tokenizer.from_folder(tmp_path, vocab_size=VOCAB, config_eos_ids=(2,))
    assert tokenizer.eos_ids == (1, 2, 106, EOS_ID)


@pytest.mark.parametrize(("value", "expected"), [(7, (7, EOS_ID)), (None, (EOS_ID,)), ([], (EOS_ID,))])
def test_generation_config_names_one_id_or_none(tmp_path, value, expected):
    save_byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == expected


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'])
def test_a_bad_generation_config_is_named(tmp_path, text):
    save_byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_an_eos_id_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match="999"):
        Tokenizer.from_folder(save_byte_level(tmp_path), vocab_size=VOCAB, config_eos_ids=(999,))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"largest id is 256.*vocab_size is 256"):
        Tokenizer.from_folder(save_byte_level(tmp_path), vocab_size=256)


def test_padding_rows_of_the_embedding_are_silent(tmp_path):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path), vocab_size=300)
    assert tokenizer.decode([97, 280, EOS_ID, 98]) == "ab"
    assert tokenizer.is_silent(280)
    assert tokenizer.is_silent(EOS_ID)
    assert not tokenizer.is_silent(97)


def test_folders_without_a_usable_tokenizer(tmp_path):
    with pytest.raises(UserError, match="no tokenizer files"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match="can't be loaded") as error:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_sentencepiece_kind_decodes_spaces_and_bytes(tmp_path):
    tokenizer = Tokenizer.from_folder(save_sentencepiece(tmp_path, ["▁Hello", "▁world"], bos=True))
    assert tokenizer.decode([257, 258]) == "Hello world"
    assert tokenizer.decode([257, 1 + 0xE2, 1 + 0x82, 1 + 0xAC]) == "Hello€"
    assert tokenizer.encode("x")[0] == tokenizer.bos_id
    assert tokenizer.eos_ids == (tokenizer.bos_id - 1,)


def test_special_tokens_in_text_are_read_as_such(tmp_path):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path))
    assert tokenizer.encode(f"a{EOS}b") == [97, EOS_ID, 98]


def test_long_text_is_neither_cut_nor_warned_about(tmp_path):
    tokenizer = Tokenizer.from_folder(save_byte_level(tmp_path, model_max_length=4))
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        assert len(tokenizer.encode("x" * 100)) == 100
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert records == []
