"""Kernels counted in optimized HLO."""

import jax
import jax.numpy as jnp

from pwjax.bench.launches import count_command_buffers, count_launches

HLO = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused_add (param_0: f32[4], param_1: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  %param_1 = f32[4]{0} parameter(1)
  %exponential.1 = f32[4]{0} exponential(%param_0)
  ROOT %add.0 = f32[4]{0} add(%exponential.1, %param_1)
}

%command_buffer (p0: f32[4], p1: f32[4]) -> (f32[4], f32[4,4]) {
  %p0 = f32[4]{0} parameter(0)
  %p1 = f32[4]{0} parameter(1)
  %fusion.1 = f32[4]{0} fusion(%p0, %p1), kind=kLoop, calls=%fused_add, metadata={op_name="a(b)"}
  %triton.2 = (f32[4]{0}, /*index=1*/f32[4,4]{1,0}) custom-call(%fusion.1), custom_call_target="triton_kernel_call"
  %get-tuple-element.3 = f32[4]{0} get-tuple-element(%triton.2), index=0
  ROOT %tuple.4 = (f32[4]{0}, f32[4,4]{1,0}) tuple(%get-tuple-element.3, %p1)
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %gte = f32[4]{0} get-tuple-element(%arg), index=1
  %copy.9 = f32[4]{0} copy(%gte)
  ROOT %tuple.9 = (s32[], f32[4]{0}) tuple(%gte, %copy.9)
}

%condition (arg.1: (s32[], f32[4])) -> pred[] {
  %arg.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT %fusion.9 = pred[] fusion(%arg.1), kind=kLoop, calls=%fused_add
}

ENTRY %main.5 (Arg_0: f32[4], Arg_1: f32[4]) -> f32[4] {
  %Arg_0 = f32[4]{0} parameter(0)
  %Arg_1 = f32[4]{0} parameter(1)
  %call = (f32[4]{0}, f32[4,4]{1,0}) call(%Arg_0, %Arg_1), to_apply=%command_buffer
  %while.1 = (s32[], f32[4]{0}) while(%call), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %copy.1 = f32[4]{0} copy(%Arg_0)
}
"""


def test_calls_and_loops_are_followed_and_fusions_are_one():
    # fusion and Triton call in the buffer; copy and condition three times each; the last copy
    assert count_launches(HLO) == {"copy": 4, "fusion": 4, "custom-call": 1, "total": 9}
    assert count_command_buffers(HLO) == 1


def test_a_compiled_program():
    step = jax.jit(lambda x: jnp.sort(jnp.sin(x)) @ x).lower(jnp.ones((64, 64))).compile()
    counts = count_launches(step.as_text() or "")
    assert 1 <= counts["total"] < 20
