"""The one array that a step gets from the host."""

import jax
import numpy as np
import pytest

from pwjax.engine.step_inputs import ROW, StepInputs, StepShape


@pytest.mark.parametrize("shape", [StepShape(2, 1), StepShape(3, 40), StepShape(1, 16, score=True)])
def test_fields_arrive_as_they_were_filled_in(shape):
    layout = shape.inputs(block_size=16, block_slots=5)
    packed, fields = layout.padding(rows=8)
    rng = np.random.default_rng(0)
    for field in fields:
        is_float = field.dtype == np.float32
        field[...] = rng.standard_normal(field.shape) if is_float else rng.integers(-9, 9, field.shape)
    expected = [field.copy() for field in fields]

    arrived = jax.jit(layout.unpack)(packed)

    for name, got, want in zip(StepInputs._fields, arrived, expected, strict=True):
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(np.asarray(got), want, err_msg=name)


def test_an_untouched_array_is_padding():
    layout = StepShape(4, 2).inputs(block_size=16, block_slots=3)
    packed, _ = layout.padding(rows=8)
    fields = layout.unpack(packed)
    assert packed.size == layout.words and packed.dtype == np.int32
    assert np.all(fields.sequences[:, ROW] == 8), "row max_num_seqs is nobody's"
    assert np.all(fields.kv_delta[:, 0] == 8)
    assert np.all(np.asarray(fields.sampling)[:, 1] == 1.0), "top_p 1 leaves every token"


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (2, 2), (16, 2), (17, 3), (32, 3)])
def test_rows_for_all_blocks_that_a_chunk_can_touch(tokens, blocks):
    assert StepShape(2, tokens).kv_delta_rows(16) == 2 * blocks
