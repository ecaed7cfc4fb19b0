"""How `bitplane_moe` cuts its work."""

import dataclasses
import json
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels import tuned
from pallas_kernels.bitplane_moe.configs import Config, default_config
from pallas_kernels.bitplane_moe.layout import BlockLayout
from pallas_kernels.paged_attention import configs as attention

QWEN_GATE_UP = BlockLayout(rows=2816, cols=2048, lut_rows=32, slot_words=8192)
TABLES = sorted(Path(pallas_kernels.__file__).parent.glob("*/tuned/*.json"))


def test_there_is_a_table_for_each_kernel_that_has_choices() -> None:
    assert {path.parts[-3] for path in TABLES} == {"bitplane_moe", "paged_attention"}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: "-".join(path.parts[-3::2]))
def test_tables_hold_valid_configurations(path: Path) -> None:
    make = {"bitplane_moe": Config, "paged_attention": attention.Config}[path.parts[-3]]
    for entry in json.loads(path.read_text()):
        assert make(**entry["config"]).splits == 1
        assert entry["programs_an_sm"] > 0


@pytest.mark.parametrize("device", ["NVIDIA H200", "a device without a table"])
@pytest.mark.parametrize("pairs, block_m", [(4, 8), (256, 8), (600, 16), (1500, 32), (32768, 64)])
def test_tiles_grow_with_the_pairs_of_an_expert(monkeypatch, device: str, pairs: int, block_m: int) -> None:
    monkeypatch.setattr(tuned, "device_kind", lambda: device)
    assert default_config(pairs, 60, QWEN_GATE_UP, exact=False).block_m == block_m


def test_few_programs_share_columns_and_many_do_not() -> None:
    splits = [default_config(pairs, 60, QWEN_GATE_UP, exact=False).splits for pairs in (4, 8, 16, 256)]
    assert splits == [4, 2, 1, 1]


@pytest.mark.parametrize("cols, words", [(32, 4), (64, 4), (256, 8), (1408, 16)])
def test_narrow_matrices_take_small_blocks(cols: int, words: int) -> None:
    layout = dataclasses.replace(QWEN_GATE_UP, cols=cols)
    assert default_config(8, 60, layout, exact=False).block_words == words


def test_more_tables_leave_room_for_fewer_words() -> None:
    assert [Config(block_words=16).words_at(bits) for bits in range(3, 9)] == [16, 16, 8, 4, 4, 4]
    assert [Config(block_words=4).words_at(bits) for bits in range(3, 9)] == [4] * 6


@pytest.mark.parametrize("sizes", [{"block_m": 4}, {"block_n": 8}, {"block_words": 2}, {"splits": 3}, {"splits": 0}])
def test_sizes_that_no_kernel_can_have(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Config"):
        Config(**sizes)
