"""Floors against numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from pwjax.bench import floors
from pwjax.bench.calls import INTEGER_INSTRUCTIONS_PER_SECOND, Ceilings, Result, Work, figures
from pwjax.config import ModelConfig

CONFIG = ModelConfig.from_hf(
    dict(
        model_type="qwen2_moe",
        vocab_size=10,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=5,
        moe_intermediate_size=3,
        shared_expert_intermediate_size=5,
        num_experts=2,
        num_experts_per_tok=1,
        rms_norm_eps=1e-6,
        max_position_embeddings=100,
    )
)


@pytest.mark.parametrize(
    ("lut_rows", "bits", "expected"),
    [
        (1, 3, 96 + 4 * 8 * 2 + 16),  # 4 x 64 weights at 3 bits, four tables of 8 halves, four scales
        (32, 3, 96 + 1 * 8 * 2 + 16),
        (1, 5, 160 + 4 * 32 * 2 + 16),
    ],
)
def test_linear_block(lut_rows, bits, expected):
    assert floors.linear_block_bytes(4, 64, lut_rows, bits) == expected


def test_dense_weights():
    # norms 12, q 20, k 10, v 10, o 16, router 8, shared expert 60 and its gate 4, head 40; three embedding rows
    assert floors.dense_bytes(CONFIG, tokens=3) == 2 * (180 + 3 * 4)
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    assert floors.dense_bytes(tied, tokens=3) == 2 * (140 + 40)


def test_kv():
    assert floors.kv_bytes(CONFIG, [5, 7]) == 12 * 2 * 1 * 2 * 2
    assert floors.kv_bytes(dataclasses.replace(CONFIG, windows=(4,)), [3, 7]) == 7 * 2 * 1 * 2 * 2


def test_experts():
    bits = np.array([[[3, 4], [5, 6]]])
    lut_rows = {"gate_up": 1, "down": 1}
    both = np.ones((1, 2))
    block = floors.linear_block_bytes
    expected = block(6, 4, 1, 3) + block(4, 3, 1, 4) + block(6, 4, 1, 5) + block(4, 3, 1, 6)
    assert floors.expert_bytes(CONFIG, both, bits, lut_rows) == expected
    first = np.array([[1, 0]])
    assert floors.expert_bytes(CONFIG, first, None, lut_rows) == 2 * (24 + 12)
    assert floors.traffic_bits(CONFIG, first, bits) == pytest.approx((24 * 3 + 12 * 4) / 36)


def test_prefill():
    # 120 dense weights and 36 routed ones a token, 1 + 2 + 3 keys of 4 numbers twice, and one row of 40 logits
    assert floors.prefill_flops(CONFIG, 3) == 2 * (3 * (120 + 36) + 2 * 6 * 4 + 40)
    windowed = dataclasses.replace(CONFIG, windows=(2,))
    assert floors.prefill_flops(windowed, 3) == 2 * (3 * (120 + 36) + 2 * 5 * 4 + 40)


def test_shares():
    work = Work(bytes=2e6, flops=1e6, decoded_weights=1e6)
    ceilings = Ceilings(copy_bytes_per_second=1e12, matmul_flops_per_second=1e12, instructions_per_weight=4)
    row = figures(Result(seconds=8e-6, error=0.0, calls=3), work, ceilings)
    assert row["microseconds"] == pytest.approx(8)
    assert row["gigabytes_per_second"] == pytest.approx(250)
    assert (row["bytes_floor_us"], row["flop_floor_us"]) == pytest.approx((2, 1))
    assert row["floor_share"] == pytest.approx(0.25)
    assert row["distinct_bytes"] == 6e6
    if row["instruction_floor_us"] is not None:
        assert row["instruction_floor_us"] == pytest.approx(4e12 / INTEGER_INSTRUCTIONS_PER_SECOND)


def test_a_wrong_result_has_no_time():
    row = figures(Result(seconds=None, error=0.5, calls=3), Work(1.0, 1.0), Ceilings(1.0, 1.0))
    assert row["microseconds"] is row["gigabytes_per_second"] is row["floor_share"] is None
    assert "0.5" in row["failure"]
