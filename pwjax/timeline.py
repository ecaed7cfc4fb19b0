"""What a run did, boundary by boundary: memory against the budget, mean committed bits, page moves.

`BoundaryRecord` is one safe boundary. `Timeline` collects them and writes data (`.jsonl`, one record a line) or a
picture (`.png`, Figures 1 and 4 of the paper from a real run). `TextPanel` shows the newest record on a terminal.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from pwjax.cli_common import check_output_file, format_bytes, json_value
from pwjax.errors import UserError

SUFFIXES = (".png", ".jsonl")
_MOVE_KEYS = ("index", "layer", "expert", "unit", "from", "to", "bytes", "reason")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryRecord:
    """The state at one safe boundary, after its moves.

    Attributes:
        step: number of the step dispatched next.
        tokens_generated: tokens generated since the engine started, all requests together.
        time_s: seconds since the engine started.
        dense_bytes: weights outside the arena (with method bf16, the experts too).
        weight_bytes: slots of weight pages, those in flight included.
        kv_bytes: slots of KV blocks.
        workspace_bytes: largest temporary memory of a compiled step.
        tables_bytes: page and block tables, routing mass and the like.
        staging_bytes: buffers that host-to-device copies land in.
        free_bytes: free slots of the arena.
        budget_bytes: the memory budget.
        mean_bits: committed bits, averaged over the weights: sum of q N K over sum of N K; None for dense experts.
        offloads: weight pages dropped at this boundary.
        reloads: weight pages whose precision was committed at this boundary, after their copy.
        moves: this boundary's moves, a dict each: index (linear-block), layer, expert, unit, from, to (bits), bytes
            (given up or taken), reason.
        num_running, num_waiting: requests.
        preemptions: requests preempted at this boundary.
        boundary: number of the boundary, which `--replay` goes by; idle ones count too.
    """

    step: int
    tokens_generated: int
    time_s: float
    dense_bytes: int
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    tables_bytes: int
    staging_bytes: int
    free_bytes: int
    budget_bytes: int
    mean_bits: float | None
    offloads: int = 0
    reloads: int = 0
    moves: tuple[Mapping[str, Any], ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    preemptions: int = 0
    boundary: int = 0

    @property
    def other_bytes(self) -> int:
        """Workspace, tables and staging."""
        return self.workspace_bytes + self.tables_bytes + self.staging_bytes

    @property
    def used_bytes(self) -> int:
        """Everything but free slots: what `memory_bytes_peak` is the maximum of."""
        return self.dense_bytes + self.weight_bytes + self.kv_bytes + self.other_bytes

    @property
    def reserved_bytes(self) -> int:
        """With the free slots: what the process holds."""
        return self.used_bytes + self.free_bytes

    def to_json(self) -> dict[str, Any]:
        return json_value(self)

    @classmethod
    def from_json(cls, fields: Any) -> BoundaryRecord:
        """Inverse of `to_json`.

        Raises:
            UserError: not an object, a missing or unknown field, or a value of another type.
        """
        if not isinstance(fields, dict):
            raise UserError("a boundary record must be a JSON object")
        known = {field.name: field for field in dataclasses.fields(cls)}
        required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
        missing, unknown = set(required) - set(fields), set(fields) - set(known)
        if missing or unknown:
            what, names = ("lacks", missing) if missing else ("has the unknown", unknown)
            raise UserError(f"a boundary record {what} field {', '.join(sorted(names))}")
        for name in set(fields) - {"moves"}:
            value = fields[name]
            allowed = (int, float) if name in ("time_s", "mean_bits") else int
            if isinstance(value, bool) or not (isinstance(value, allowed) or (name == "mean_bits" and value is None)):
                raise UserError(f"field {name} of a boundary record is {value!r}, not a number of the right kind")
        moves = fields.get("moves", [])
        if not isinstance(moves, list) or not all(isinstance(m, dict) and set(_MOVE_KEYS) <= set(m) for m in moves):
            raise UserError(f"field moves of a boundary record must list objects with {', '.join(_MOVE_KEYS)}")
        return cls(**{**fields, "moves": tuple(moves)})


class Timeline:
    """The boundaries of a run, in order."""

    def __init__(self, records: list[BoundaryRecord] | None = None) -> None:
        self.records: list[BoundaryRecord] = list(records or ())

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[BoundaryRecord]:
        return iter(self.records)

    def append(self, record: BoundaryRecord) -> None:
        self.records.append(record)

    def write(self, path: str | Path) -> None:
        """Writes what the suffix says, `.png` or `.jsonl`; an existing file is replaced whole or not at all."""
        path = check_output_file(path, SUFFIXES, "--timeline")
        if path.suffix.lower() == ".png":
            self.draw_png(path)
        else:
            self.to_jsonl(path)

    def to_jsonl(self, path: str | Path) -> None:
        """One record a line, numbers that are not finite as null."""
        text = "".join(json.dumps(record.to_json(), allow_nan=False) + "\n" for record in self.records)
        _replace_file(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Timeline:
        """Inverse of `to_jsonl`.

        Raises:
            UserError: no such file, or a bad line, by number.
        """
        timeline = cls()
        try:
            lines = Path(path).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: can't be read ({error})") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                timeline.append(BoundaryRecord.from_json(json.loads(line)))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}: line {number} is not JSON ({error.msg})") from None
            except UserError as error:
                raise UserError(f"{path}: line {number}: {error}") from None
        return timeline

    def draw_png(self, path: str | Path, title: str = "") -> None:
        """Memory, bits and moves over generated tokens; see `pwjax.timeline_plot`."""
        from pwjax.timeline_plot import draw

        _replace_file(Path(path), lambda temporary: draw(self.records, temporary, title))


def check_writable(path: str | Path, name: str = "--timeline") -> Path:
    """Checks before a run that its timeline can be written after it; creates nothing.

    Raises:
        UserError: a suffix other than .png and .jsonl, a folder that is missing or closed, or no matplotlib for .png.
    """
    checked = check_output_file(path, SUFFIXES, name)
    if checked.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise UserError(f"{name}: drawing {path} needs matplotlib; install pwjax[plot], or write a .jsonl file")
    return checked


class TextPanel:
    """A few lines about the newest boundary, redrawn in place on a terminal; silent where there is none.

    memory ████████▓▓▓▓▓▓▓▓▓▓▓▓▓▓▒▒▒▒▒▒▒▒▒▒░░······ 17.9 MiB of 19.0 MiB
           █ dense 6.50 MiB  ▓ weights 7.30 MiB  ▒ KV 2.10 MiB  ░ other 2.00 MiB  · free 1.10 MiB
    bits   4.52 mean; pages offloaded 120, reloaded 80
    run    step 812, 2000 tokens, 3 running, 1 waiting, 0 preempted
    """

    _LINES = 4

    def __init__(self, stream: TextIO | None = None, interval_s: float = 0.1) -> None:
        """Args: stream: stderr by default. interval_s: shortest time between two redraws."""
        self._stream: TextIO = stream if stream is not None else sys.stderr
        self.enabled = bool(getattr(self._stream, "isatty", lambda: False)())
        self._interval_s = interval_s
        self._glyphs = "█▓▒░·" if _can_encode(self._stream, "█▓▒░·") else "#=+o."
        self._drawn = False
        self._last_draw_s = float("-inf")
        self._newest: BoundaryRecord | None = None
        self._offloads = self._reloads = self._preemptions = 0

    def update(self, record: BoundaryRecord) -> None:
        """Counts the record's moves, and redraws unless the last redraw was a moment ago."""
        if not self.enabled:
            return
        self._offloads += record.offloads
        self._reloads += record.reloads
        self._preemptions += record.preemptions
        self._newest = record
        if time.monotonic() - self._last_draw_s >= self._interval_s:
            self._draw()

    def clear(self) -> None:
        """Removes the panel, for other text to be printed; the next `update` draws it again."""
        if self.enabled and self._drawn:
            self._stream.write(f"\x1b[{self._LINES}A\x1b[J")
            self._stream.flush()
            self._drawn, self._last_draw_s = False, float("-inf")

    def close(self) -> None:
        """Draws the newest record once more and leaves it standing."""
        if self.enabled and self._newest is not None:
            self._draw()
            self._drawn, self._newest = False, None

    def _draw(self) -> None:
        assert self._newest is not None
        width = max(shutil.get_terminal_size().columns - 1, 20)
        lines = self._render(self._newest, width)
        up = f"\x1b[{self._LINES}A" if self._drawn else ""
        self._stream.write(up + "".join(f"\x1b[2K{line[:width]}\n" for line in lines))
        self._stream.flush()
        self._drawn, self._last_draw_s = True, time.monotonic()

    def _render(self, record: BoundaryRecord, width: int) -> list[str]:
        parts = [
            ("dense", record.dense_bytes),
            ("weights", record.weight_bytes),
            ("KV", record.kv_bytes),
            ("other", record.other_bytes),
            ("free", record.free_bytes),
        ]
        total = f" {format_bytes(record.used_bytes)} of {format_bytes(record.budget_bytes)}"
        counts = _shares([size for _, size in parts], record.budget_bytes, max(width - len(total) - 7, 8))
        bar = "".join(glyph * count for glyph, count in zip(self._glyphs, counts, strict=True))
        legend = "  ".join(
            f"{glyph} {name} {format_bytes(size)}" for glyph, (name, size) in zip(self._glyphs, parts, strict=True)
        )
        bits = "dense experts" if record.mean_bits is None else f"{record.mean_bits:.2f} mean"
        run = f"step {record.step}, {record.tokens_generated} tokens, {record.num_running} running"
        return [
            f"memory {bar}{total}",
            f"       {legend}",
            f"bits   {bits}; pages offloaded {self._offloads}, reloaded {self._reloads}",
            f"run    {run}, {record.num_waiting} waiting, {self._preemptions} preempted",
        ]


def _shares(sizes: list[int], whole: int, width: int) -> list[int]:
    """Characters of each part in a bar of `width` for `whole`; rounded at the edges, so that errors don't add up."""
    scale = width / max(whole, sum(sizes), 1)
    edges, position = [0], 0
    for size in sizes:
        position += size
        edges.append(round(position * scale))
    return [right - left for left, right in itertools.pairwise(edges)]


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes beside `path` and renames, so that a reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
