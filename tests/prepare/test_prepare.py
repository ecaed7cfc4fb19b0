"""`prepare` and `inspect` end to end on tiny checkpoints: same result from any layout, after any stop, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.hf_reader import HFCheckpoint
from checkpoints.store import PreparedModel
from checkpoints.writer import PreparedWriter
from pallas_kernels.bitplane_moe.layout import BITS, dequantize_pages
from pwjax.cli import main
from pwjax.errors import UserError
from pwjax.inspect import describe, inspect_store
from pwjax.prepare import PrepareOptions, prepare
from tests.hf_models import save_tiny_checkpoint

QWEN: dict[str, Any] = {"num_hidden_layers": 3, "mlp_only_layers": [1]}  # two MoE layers and a dense one between


def options(source: Path, out: Path, **changes: Any) -> PrepareOptions:
    few: dict[str, Any] = {"calibration_sequences": 6, "calibration_tokens": 48, "loss_sequences": 4, "lut_rows": 32}
    return PrepareOptions(source=source, out=out, **(few | changes))


def quietly(line: str) -> None:
    """Takes the lines for people."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub") / "model"
    save_tiny_checkpoint(path, "qwen2_moe", 0, shards=2, **QWEN)
    return path


@pytest.fixture(scope="module")
def prepared(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("prepared") / "out"
    return out, prepare(options(hub, out), quietly)


def assert_same_store(first: Path, second: Path, *, with_source: bool = True) -> None:
    one, two = PreparedModel(first), PreparedModel(second)
    assert one.manifest.slot_words == two.manifest.slot_words and one.manifest.lut_rows == two.manifest.lut_rows
    assert one.manifest.max_bits == two.manifest.max_bits
    tables = two.tables()
    assert all(np.array_equal(value, tables[name]) for name, value in one.tables().items())
    dense = two.load_dense()
    assert all(np.array_equal(value, dense.pop(name)) for name, value in one.load_dense().items()) and not dense
    for layer in range(one.config.num_moe_layers):
        for unit in ("gate_up", "down"):
            for bits in BITS:
                assert np.array_equal(one.load_pages(layer, unit, bits), two.load_pages(layer, unit, bits))
        if with_source:
            for a, b in zip(one.load_source(layer), two.load_source(layer), strict=True):
                assert np.array_equal(a, b)


def test_figures_are_those_of_the_store(hub: Path, prepared: tuple[Path, dict[str, Any]]) -> None:
    """Errors and sensitivities recomputed from pages and source; kappa turns raw ones into nats."""
    out, figures = prepared
    model, checkpoint = PreparedModel(out), HFCheckpoint(hub)
    geometry = model.geometry()
    error, power, weights = np.zeros(len(BITS)), 0.0, 0
    for layer in range(2):
        source = checkpoint.experts(layer)
        for unit, layout in enumerate((geometry.gate_up, geometry.down)):
            pages = {bits: model.load_pages(layer, unit, bits) for bits in BITS}
            for expert, exact in enumerate(source[unit].astype(np.float64)):
                one = {bits: page[expert] for bits, page in pages.items()}
                error += [((dequantize_pages(layout, one, bits) - exact) ** 2).sum() for bits in BITS]
                power += (exact**2).sum()
                weights += exact.size
    assert figures["weights"] == weights
    assert [figures["relative_error_by_bits"][str(b)] for b in BITS] == pytest.approx(error / power, rel=1e-4)
    assert figures["relative_error_by_bits"]["3"] < 0.05 and figures["weights_per_second"] > 0
    assert figures["slot_bytes"] == 4 * model.manifest.slot_words and figures["slot_waste"] <= 0.03
    assert figures["host_peak_bytes"] > 0 and figures["experts_without_data"] == 0
    tables = model.tables()
    assert tables["sensitivity"].shape == (2, 8, 2, 6) and tables["sensitivity"].dtype == np.float32
    assert (tables["sensitivity"] > 0).all() and (np.diff(tables["sensitivity"], axis=-1) <= 0).all()
    scaled = tables["raw_sensitivity"] * tables["kappa"][:, None, :, None]
    assert tables["sensitivity"] == pytest.approx(np.minimum.accumulate(scaled, axis=-1), rel=1e-5)
    assert json.loads(json.dumps(figures)) == figures


def test_dense_weights_and_experts_are_the_sources(hub: Path, prepared: tuple[Path, dict[str, Any]]) -> None:
    model, checkpoint = PreparedModel(prepared[0]), HFCheckpoint(hub)
    dense = model.load_dense()
    assert all(np.array_equal(value, dense.pop(name)) for name, value in checkpoint.dense()) and not dense
    for layer in range(2):
        for mine, theirs in zip(model.load_source(layer), checkpoint.experts(layer), strict=True):
            assert np.array_equal(mine, theirs)
    assert (model.tokenizer_path / "tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()


def test_fused_layout_gives_the_same_store(tmp_path: Path, prepared: tuple[Path, dict[str, Any]]) -> None:
    save_tiny_checkpoint(tmp_path / "fused", "qwen2_moe", 0, layout="fused", **QWEN)
    prepare(options(tmp_path / "fused", tmp_path / "out"), quietly)
    assert_same_store(prepared[0], tmp_path / "out")


def test_mixtral_without_source(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "model", "mixtral", 1, num_hidden_layers=1)
    figures = prepare(
        options(tmp_path / "model", tmp_path / "out", keep_source=False, lut_rows="auto", max_bits=5), quietly
    )
    model = PreparedModel(tmp_path / "out")
    assert figures["max_bits"] == model.manifest.max_bits == 5
    assert set(figures["lut_rows"].values()) <= {1, 32}
    with pytest.raises(UserError, match="--no-source"):
        model.load_source(0)


def _interrupt(name: str, when: str, call: int) -> Callable[[pytest.MonkeyPatch], None]:
    """A stop (as by Ctrl-C) before or after the given call of a writer's method."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original, calls = getattr(PreparedWriter, name), [0]

        def wrapped(self: PreparedWriter, *args: Any) -> Any:
            calls[0] += 1
            if calls[0] == call and when == "before":
                raise KeyboardInterrupt
            result = original(self, *args)
            if calls[0] == call:
                raise KeyboardInterrupt
            return result

        monkeypatch.setattr(PreparedWriter, name, wrapped)

    return patch


@pytest.mark.parametrize(
    ("name", "when", "call", "finished_layers"),
    [
        ("write_dense", "before", 1, 0),
        ("write_source", "after", 1, 0),
        ("write_layer", "before", 2, 1),
        ("write_layer", "after", 1, 1),
        ("write_tables", "before", 1, 2),
        ("finish", "before", 1, 2),
    ],
)
def test_resumes_to_the_same_store(
    hub: Path,
    prepared: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    when: str,
    call: int,
    finished_layers: int,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        _interrupt(name, when, call)(patched)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(hub, out), quietly)
    with pytest.raises(UserError, match="unfinished"):
        PreparedModel(out)
    figures = prepare(options(hub, out), quietly)
    assert figures["resumed"] and figures["layers_quantized"] == 2 - finished_layers
    assert figures["relative_error_by_bits"] == prepared[1]["relative_error_by_bits"]
    assert_same_store(prepared[0], out)


def test_another_run_does_not_continue_this_one(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        _interrupt("write_dense", "before", 1)(patched)
        with pytest.raises(KeyboardInterrupt):
            prepare(options(hub, tmp_path / "out"), quietly)
    with pytest.raises(UserError, match="unfinished prepare with other lut_rows"):
        prepare(options(hub, tmp_path / "out", lut_rows=1), quietly)


def test_experts_without_data_are_reported_and_not_free(hub: Path, tmp_path: Path) -> None:
    """Four tokens reach at most twelve of the experts of a layer with top 3, and none of them eight times."""
    figures = prepare(options(hub, tmp_path / "out", calibration_sequences=1, calibration_tokens=4), quietly)
    tables = PreparedModel(tmp_path / "out").tables()
    unseen = tables["tokens_per_expert"] == 0
    assert figures["experts_without_data"] == unseen.sum() > 0
    assert len(figures["calibration"]["experts_averaged"]) == 16
    assert (tables["sensitivity"][unseen] > 0).all()


def _set_nan(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-2:] = b"\xc0\x7f"  # bfloat16 NaN
    file.write_bytes(content)


def _cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_set_nan, r"\.safetensors: tensor .* is nan at index"),
        (_cut, r"\.safetensors: "),
        (_without_tokenizer, "no tokenizer files"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
    ],
)
def test_bad_checkpoints_are_refused_before_anything_is_written(
    hub: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in hub.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        prepare(options(folder, tmp_path / "out"), quietly)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lut_rows": 16}, "--lut-rows 16"),
        ({"max_bits": 9}, "--max-bits 9"),
        ({"calibration": "missing.txt"}, "missing.txt does not exist"),
        ({"calibration": "notes.md"}, "must be .txt"),
        ({"calibration": "short.txt"}, "the calibration text has"),
        ({"calibration_tokens": 1}, "at least 1 sequence of 2 tokens"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    hub: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    if "calibration" in changes:
        changes = {"calibration": tmp_path / changes["calibration"]}
    with pytest.raises(UserError, match=message):
        prepare(options(hub, tmp_path / "out", **changes), quietly)
    assert not (tmp_path / "out").exists()


def test_out_that_is_taken_is_left_alone(hub: Path, tmp_path: Path, prepared: tuple[Path, dict[str, Any]]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    with pytest.raises(UserError, match="not empty"):
        prepare(options(hub, tmp_path / "mine"), quietly)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["file"]
    with pytest.raises(UserError, match="already holds a finished model"):
        prepare(options(hub, prepared[0]), quietly)


def test_command_line(tmp_path: Path, prepared: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture) -> None:
    assert main(["inspect", str(prepared[0])]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["command"] == "inspect" and figures["slot_bytes"] == prepared[1]["slot_bytes"]
    assert main(["prepare", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "nowhere: no such folder" in printed.err


def test_inspect(prepared: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    figures = inspect_store(prepared[0])
    assert json.loads(json.dumps(figures)) == figures
    model = PreparedModel(prepared[0])
    held = {
        bits: sum(model.load_pages(layer, unit, bits).nbytes for layer in range(2) for unit in (0, 1)) for bits in BITS
    }
    assert figures["bytes_by_bits"] == {str(b): sum(held[a] for a in BITS if a <= b) for b in BITS}
    assert figures["expert_weights"] == prepared[1]["weights"]
    text = describe(figures)
    assert "qwen2_moe, 3 layers, 8 experts (top 3)" in text and "planner policy: default" in text
    with pytest.raises(UserError, match="no such folder"):
        inspect_store(tmp_path / "nothing")
