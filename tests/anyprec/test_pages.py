"""Pages hold exactly what the quantizer made, and the errors reported with them are those of the pages."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bitplane_moe.layout import BITS, BlockLayout, dequantize_pages
from pwjax.anyprec import dequantize, quantize
from pwjax.anyprec.choices import MAX_SLOT_WASTE, choose_lut_rows, choose_slot_words, slot_waste
from pwjax.anyprec.pages import UnpackedUnit, quantize_unit
from pwjax.config import ModelConfig


@pytest.mark.parametrize("lut_rows", [1, 32])
def test_pages_stand_for_the_quantized_weights(lut_rows: int) -> None:
    rng = np.random.default_rng(lut_rows)
    weights = rng.standard_normal((2, 40, 80)).astype(np.float32)
    importance = np.exp(rng.standard_normal((2, 80))).astype(np.float32)
    layout = BlockLayout(rows=40, cols=80, lut_rows=lut_rows, slot_words=64)
    unit = quantize_unit(weights, importance, layout)
    unpacked = UnpackedUnit(layout, unit.pages)
    q = quantize(weights, importance, lut_rows)
    for column, bits in enumerate(BITS):
        expected = dequantize(q, bits)
        for expert in range(2):
            one = {b: page[expert] for b, page in unit.pages.items()}
            assert np.array_equal(dequantize_pages(layout, one, bits), expected[expert])
        assert np.array_equal(np.asarray(unpacked.weights(bits)), expected.astype(jnp.bfloat16))
        delta = (expected.astype(np.float64) - weights) ** 2
        assert unit.squared_error[column] == pytest.approx(delta.sum(), rel=1e-5)
        assert unit.raw_sensitivity[:, column] == pytest.approx((delta * importance[:, None]).sum((1, 2)), rel=1e-5)
    assert unit.power == pytest.approx(float((weights.astype(np.float64) ** 2).sum()), rel=1e-6)


def test_alike_rows_share_a_table_and_unlike_ones_do_not() -> None:
    rng = np.random.default_rng(0)
    assert choose_lut_rows(rng.standard_normal((1, 32, 256))).chosen == 32
    few_values = rng.standard_normal((1, 32, 8))  # each row its own eight values, and a little noise
    unlike = np.take_along_axis(few_values, rng.integers(0, 8, (1, 32, 256)), axis=2)
    comparison = choose_lut_rows(unlike + 0.01 * rng.standard_normal(unlike.shape))
    assert comparison.chosen == 1
    assert (comparison.bytes_per_weight[1] > comparison.bytes_per_weight[32]).all()
    assert (comparison.errors[1] < comparison.errors[32]).all()


def _demo_config() -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": "qwen2_moe",
            "vocab_size": 4096,
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 256,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
        }
    )


def test_slot_is_the_largest_that_wastes_little() -> None:
    config = _demo_config()
    words, waste = choose_slot_words(config, (32, 32))
    assert words == 128 and waste <= MAX_SLOT_WASTE < slot_waste(config, (32, 32), 256)
    # By hand at 4 bits: gate_up 6432 + 2112 words in 51 + 17 slots, down 3360 + 1088 in 27 + 9.
    assert waste == pytest.approx(1 - (6432 + 2112 + 3360 + 1088) / (128 * (51 + 17 + 27 + 9)))
