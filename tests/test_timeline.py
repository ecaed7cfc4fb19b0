"""The timeline as data, as a picture and as a text panel."""

import dataclasses
import io
import json

import numpy as np
import pytest

from pwjax.errors import UserError
from pwjax.timeline import BoundaryRecord, TextPanel, Timeline, check_writable

MIB = 2**20


def record(step, **fields):
    """A boundary of a 20 MiB budget where KV grows and weights give way."""
    kv = step * MIB // 8
    values = dict(
        step=step,
        tokens_generated=3 * step,
        time_s=0.01 * step,
        dense_bytes=6 * MIB,
        weight_bytes=9 * MIB - kv // 2,
        kv_bytes=kv,
        workspace_bytes=MIB,
        tables_bytes=MIB // 4,
        staging_bytes=MIB // 4,
        free_bytes=3 * MIB + MIB // 2 - kv + kv // 2,
        budget_bytes=20 * MIB,
        mean_bits=6 - step / 16,
        offloads=4,
        moves=({"index": 7, "layer": 0, "expert": 3, "unit": 1, "from": 6, "to": 5, "bytes": 512, "reason": "x"},),
        num_running=2,
    )
    return BoundaryRecord(**{**values, **fields})


def test_sums():
    one = record(8)
    assert one.other_bytes == 3 * MIB // 2
    assert one.used_bytes + one.free_bytes == one.reserved_bytes == one.budget_bytes


def test_jsonl_round_trip_keeps_everything(tmp_path):
    timeline = Timeline([record(0, mean_bits=None), record(1, preemptions=1, moves=())])
    timeline.append(record(2))
    path = tmp_path / "run.jsonl"
    timeline.write(path)
    lines = path.read_text().splitlines()
    assert len(lines) == len(timeline) == 3
    assert json.loads(lines[2])["moves"][0]["to"] == 5
    assert set(json.loads(lines[0])) == {field.name for field in dataclasses.fields(BoundaryRecord)}
    assert Timeline.from_jsonl(path).records == timeline.records
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    path = tmp_path / "run.jsonl"
    Timeline([record(0, kv_bytes=np.int64(5), mean_bits=np.float32(3.5))]).to_jsonl(path)
    assert json.loads(path.read_text())["kv_bytes"] == 5
    assert Timeline.from_jsonl(path).records[0].mean_bits == 3.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields.pop("kv_bytes"), "lacks field kv_bytes"),
        (lambda fields: fields.update(kv=1), "unknown field kv"),
        (lambda fields: fields.update(step="1"), "field step"),
        (lambda fields: fields.update(step=True), "field step"),
        (lambda fields: fields.update(moves=[{"index": 1}]), "field moves"),
    ],
)
def test_a_bad_record_is_named_by_line_and_field(tmp_path, change, message):
    fields = record(1).to_json()
    change(fields)
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(record(0).to_json()) + "\n" + json.dumps(fields) + "\n")
    with pytest.raises(UserError, match=f"line 2: .*{message}"):
        Timeline.from_jsonl(path)


def test_files_that_are_no_timelines(tmp_path):
    with pytest.raises(UserError, match="can't be read"):
        Timeline.from_jsonl(tmp_path / "none.jsonl")
    path = tmp_path / "run.jsonl"
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(UserError, match="line 1"):
            Timeline.from_jsonl(path)


def drawn_figure(monkeypatch, tmp_path, records):
    """The matplotlib figure that `draw_png` saves."""
    figure_module = pytest.importorskip("matplotlib.figure")
    saved = []
    original = figure_module.Figure.savefig

    def savefig(figure, *args, **kwargs):
        saved.append(figure)
        return original(figure, *args, **kwargs)

    monkeypatch.setattr(figure_module.Figure, "savefig", savefig)
    path = tmp_path / "run.png"
    Timeline(records).write(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert [p.name for p in tmp_path.iterdir()] == ["run.png"]
    return saved[0]


def test_the_picture_stacks_memory_under_the_budget_and_shows_bits_and_moves(monkeypatch, tmp_path):
    records = [record(step) for step in range(40)] + [record(40, reloads=9, offloads=0, preemptions=1)]
    memory, bits, moves = drawn_figure(monkeypatch, tmp_path, records).axes
    labels = [text.get_text() for text in memory.get_legend().get_texts()]
    assert labels[0] == "memory budget"
    assert {"dense weights", "weight pages", "KV cache", "free", "workspace, tables, staging"} <= set(labels)
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in memory.collections]
    assert tops == sorted(tops)
    assert tops[-1] == pytest.approx(20)  # all parts together reach the budget, in MiB
    assert memory.lines[-1].get_ydata()[0] == pytest.approx(20)
    assert bits.lines[0].get_ydata()[:2].tolist() == [6.0, 6 - 1 / 16]
    heights = [bar.get_height() for bar in moves.patches]
    assert sum(h for h in heights if h > 0) == 9
    assert sum(h for h in heights if h < 0) == -160
    assert "request preempted" in [text.get_text() for text in moves.get_legend().get_texts()]


def test_boundaries_after_the_last_token_can_be_seen(monkeypatch, tmp_path):
    """Pages come back while the engine is idle, when the token count stands still."""
    end = [record(40, tokens_generated=117, mean_bits=3 + i / 4) for i in range(9)]
    _, bits, _ = drawn_figure(monkeypatch, tmp_path, [record(step) for step in range(40)] + end).axes
    x, y = bits.lines[0].get_xdata(), bits.lines[0].get_ydata()
    assert y[-1] == 5
    assert x[-1] - x[-2] >= 0.02 * 117


@pytest.mark.parametrize("records", [[], [record(0)], [record(s, tokens_generated=0) for s in range(5)]])
@pytest.mark.parametrize("dense", [False, True])
def test_short_and_odd_runs_can_be_drawn(monkeypatch, tmp_path, records, dense):
    if dense:
        records = [dataclasses.replace(one, mean_bits=None) for one in records]
    drawn_figure(monkeypatch, tmp_path, records)


def test_paths_are_checked_before_the_run(tmp_path):
    assert check_writable(tmp_path / "a.jsonl") == tmp_path / "a.jsonl"
    for name in ("a.pdf", "a", "a.json", "none/a.png"):
        with pytest.raises(UserError, match="--timeline"):
            check_writable(tmp_path / name)
    with pytest.raises(UserError, match="--timeline"):
        Timeline().write(tmp_path / "a.svg")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_without_matplotlib_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("pwjax.timeline.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pwjax\[plot\]"):
        check_writable(tmp_path / "a.png")
    check_writable(tmp_path / "a.jsonl")


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_no_panel_without_a_terminal():
    stream = io.StringIO()
    panel = TextPanel(stream)
    panel.update(record(1))
    panel.clear()
    panel.close()
    assert stream.getvalue() == ""


def test_the_panel_shows_the_split_and_adds_up_moves(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    panel = TextPanel(terminal := Terminal(), interval_s=0)
    panel.update(record(0))
    panel.update(record(8, preemptions=1))
    memory, legend, bits, run = terminal.getvalue().split("\x1b[2K")[-4:]
    assert "18.50 MiB" not in memory
    assert "17.00 MiB of 20.00 MiB" in memory
    bar = memory.split()[1]
    width = len(bar)
    for glyph, size in zip("█▓▒░·", (6, 8.5, 1, 1.5, 3), strict=True):
        assert abs(bar.count(glyph) - width * size / 20) <= 1
    assert "KV 1.00 MiB" in legend
    assert "5.50 mean" in bits
    assert "offloaded 8" in bits
    assert "1 preempted" in run
    assert terminal.getvalue().count("\x1b[4A") == 1  # the second drawing replaces the first


def test_the_panel_fits_the_terminal_and_its_encoding(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    terminal.encoding = "ascii"
    TextPanel(terminal, interval_s=0).update(record(8))
    lines = terminal.getvalue().replace("\x1b[2K", "").splitlines()
    assert all(len(line) < 40 for line in lines)
    assert terminal.getvalue().isascii()


def test_redraws_are_limited_but_the_last_state_is_shown_and_counted():
    panel = TextPanel(terminal := Terminal(), interval_s=1000)
    for step in range(10):
        panel.update(record(step))
    assert "step 9" not in terminal.getvalue()
    panel.close()
    assert "step 9," in terminal.getvalue()
    assert "offloaded 40" in terminal.getvalue()


def test_clear_makes_room_for_other_text():
    panel = TextPanel(terminal := Terminal(), interval_s=1000)
    panel.update(record(0))
    panel.clear()
    assert terminal.getvalue().endswith("\x1b[4A\x1b[J")
    panel.update(record(1))
    assert "step 1," in terminal.getvalue()
