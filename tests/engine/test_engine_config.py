"""Options of the engine: what is refused, with which words, and the shapes that follow."""

import pytest

from pwjax.engine.config import EngineConfig, Method
from pwjax.engine.step_inputs import StepShape
from pwjax.errors import UserError


@pytest.mark.parametrize(
    ("text", "name", "bits", "moves"),
    [
        ("pagedweight", "pagedweight", None, True),
        ("bf16", "bf16", None, False),
        ("uniform:4", "uniform", 4.0, False),
        ("random:3.5", "random", 3.5, False),
        ("static", "static", None, False),
        ("static:4.25", "static", 4.25, False),
    ],
)
def test_methods(text, name, bits, moves):
    method = Method.parse(text)
    assert (method.name, method.bits, method.moves_pages, str(method)) == (name, bits, moves, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("awq", "unknown; use bf16"),
        ("", "unknown"),
        ("uniform:", "unknown"),
        ("uniform:x", "unknown"),
        ("uniform:4:4", "unknown"),
        ("uniform:.", "unknown"),
        ("uniform", "say how many bits, as in uniform:4"),
        ("random", "say how many bits"),
        ("uniform:2", "between 3 and 8"),
        ("random:9", "between 3 and 8"),
        ("uniform:3.5", "whole bits; static:3.5 mixes"),
        ("bf16:8", "takes no number"),
        ("pagedweight:4", "takes no number; use --mean-bits"),
    ],
)
def test_bad_methods(text, words):
    with pytest.raises(UserError, match=words):
        Method.parse(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs is 0; it must be at least 1"),
        ({"prefill_chunk_tokens": 0}, "--prefill-chunk-tokens is 0"),
        ({"block_size": -1}, "--block-size is -1"),
        ({"max_model_len": 1}, "--max-model-len is 1; it must be at least 2"),
        ({"memory_budget_bytes": 1, "mean_bits": 4.0}, "give one of them"),
        ({"arena_bytes": 1, "mean_bits": 4.0}, "give one of them"),
        ({"mean_bits": 2.9}, "--mean-bits is 2.9"),
        ({"mean_bits": float("nan")}, "--mean-bits is nan"),
        ({"max_bits": 9}, "--max-bits is 9"),
        ({"dtype": "float16"}, "bfloat16 or float32"),
        ({"kv_dtype": "int8"}, "bfloat16 or float32"),
        ({"implementation": "cuda"}, "--implementation is cuda"),
        ({"seed": -1}, "--seed is -1"),
        ({"low_watermark_blocks": -1}, "at least 0"),
        ({"high_watermark_blocks": -2}, "at least 0"),
        ({"low_watermark_blocks": 3, "high_watermark_blocks": 2}, "low is at most high"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(UserError, match=words):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("seqs", "buckets"), [(1, (2,)), (2, (2,)), (3, (2, 4)), (4, (2, 4)), (5, (2, 4, 8)), (8, (2, 4, 8))]
)
def test_decode_buckets(seqs, buckets):
    assert EngineConfig(max_num_seqs=seqs).decode_buckets == buckets


@pytest.mark.parametrize(("chunk", "buckets"), [(1, (1,)), (16, (16,)), (32, (16, 32)), (256, (32, 256))])
def test_prefill_buckets(chunk, buckets):
    assert EngineConfig(prefill_chunk_tokens=chunk).prefill_buckets == buckets


def test_a_scoring_engine_has_one_shape():
    config = EngineConfig(scoring=True, max_num_seqs=3, prefill_chunk_tokens=32)
    assert config.step_shapes == (StepShape(3, 32, score=True),)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 2), (15, 4), (16, 4), (17, 6)])
def test_kv_delta_has_room_for_a_chunk_that_starts_anywhere(tokens, rows):
    assert StepShape(2, tokens).kv_delta_rows(16) == rows
    worst = max(-(-(start + tokens) // 16) - -(-start // 16) for start in range(32))
    assert StepShape(2, tokens).kv_delta_rows(16) >= 2 * worst
