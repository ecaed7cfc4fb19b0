"""Equation 7 by hand, and the hysteresis between offload and reload."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_cases import make_case

from pwjax.errors import UserError
from pwjax.planner import Observation
from pwjax.planner.pressure import free_blocks, prepare_slots, pressure_triggered, reload_slots, target_slots


def observe(free: int, growth: int = 0, block: int = 10, low: int = 4, high: int = 8) -> Observation:
    return (
        make_case(0)
        .observe(
            free_slots=free,
            growth_slots=growth,
            block_slots=block,
            low_watermark_blocks=low,
            high_watermark_blocks=high,
        )
        .observation
    )


@pytest.mark.parametrize(
    ("free", "blocks", "target"),
    [(1000, 100, 0), (50, 5, 0), (49, 4, 10), (40, 4, 10), (39, 3, 20), (0, 0, 50), (-1, -1, 60), (-20, -2, 70)],
)
def test_equation_7(free: int, blocks: int, target: int) -> None:
    observation = observe(free)
    assert free_blocks(observation) == blocks
    assert target_slots(observation) == target
    assert pressure_triggered(observation) == (target > 0)


def test_watermark_zero_keeps_one_block() -> None:
    assert target_slots(observe(9, low=0, high=0)) == 10
    assert target_slots(observe(10, low=0, high=0)) == 0


def test_plans_are_prepared_for_the_growth_too() -> None:
    assert prepare_slots(observe(1000, growth=70)) == 70
    assert prepare_slots(observe(39, growth=70)) == 90


@pytest.mark.parametrize(
    ("free", "growth", "room"),
    [(80, 0, 0), (89, 0, 0), (90, 0, 10), (90, 10, 0), (90, 25, 0), (200, 30, 90)],
)
def test_reload_leaves_the_high_watermark_and_the_growth(free: int, growth: int, room: int) -> None:
    assert reload_slots(observe(free, growth)) == room


@given(st.integers(-50, 500), st.integers(0, 100), st.integers(1, 30), st.integers(0, 9), st.integers(0, 9))
def test_a_reload_never_causes_the_next_offload(free: int, growth: int, block: int, low: int, more: int) -> None:
    observation = observe(free, growth, block, low, low + more)
    room = reload_slots(observation)
    if room:
        assert not pressure_triggered(observation)
        assert target_slots(observe(free - room - growth, 0, block, low, low + more)) == 0
        assert free_blocks(observe(free - room - growth, 0, block, low, low + more)) >= low + more


def test_refuses_watermarks_out_of_order() -> None:
    with pytest.raises(UserError, match="watermarks"):
        observe(0, low=5, high=4)
