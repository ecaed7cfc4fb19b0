"""The picture of a run: memory stacked against the budget, mean committed bits, page moves, over generated tokens.

Figures 1 and 4 of the paper from a real run: weight pages shrink while KV grows, and come back afterwards. Colours are
Okabe and Ito's, which people with colour-blindness can tell apart. Needs matplotlib (extra `plot`), drawn with Agg.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pwjax.timeline import BoundaryRecord

_PARTS = (  # label, attribute of BoundaryRecord, colour; from the bottom up
    ("dense weights", "dense_bytes", "#999999"),
    ("workspace, tables, staging", "other_bytes", "#CC79A7"),
    ("weight pages", "weight_bytes", "#0072B2"),
    ("KV cache", "kv_bytes", "#E69F00"),
    ("free", "free_bytes", "#EFEFEF"),
)
_BITS_COLOR, _OFFLOAD_COLOR, _RELOAD_COLOR = "#000000", "#D55E00", "#009E73"
_MOVE_BINS = 120
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.labelsize": 11,
    "axes.titlesize": 12,
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}


def draw(records: Sequence[BoundaryRecord], path: Path, title: str = "") -> None:
    """Draws `records` into the PNG file `path`, 1800 x 1440 pixels; without records, an empty figure that says so."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 8), dpi=180, layout="constrained")
        FigureCanvasAgg(figure)
        memory, bits, moves = figure.subplots(3, 1, sharex=True, height_ratios=(3.2, 1.3, 1.3))
        if title:
            memory.set_title(title, loc="left")
        if records:
            x, label = _x_axis(records)
            _draw_memory(memory, x, records)
            _draw_bits(bits, x, records)
            _draw_moves(moves, x, records)
            moves.set_xlabel(label)
            moves.set_xlim(x[0], x[-1])
        else:
            memory.text(0.5, 0.5, "no boundaries were recorded", ha="center", transform=memory.transAxes)
        figure.align_ylabels()
        figure.savefig(path, format="png")


def _x_axis(records: Sequence[BoundaryRecord]) -> tuple[np.ndarray, str]:
    """Edges `[len + 1]`: record j holds from edge j to edge j + 1. Steps where no token was generated (evaluation)."""
    tokens = np.array([record.tokens_generated for record in records], np.float64)
    if tokens[-1] > tokens[0]:
        # Boundaries after the last token (pages coming back while the engine is idle) share its place on the axis; the
        # state that they end in gets a visible width.
        last, label = max(tokens[-1] - tokens[-2], 0.02 * (tokens[-1] - tokens[0])), "generated tokens (all requests)"
    else:
        tokens, last, label = np.array([record.step for record in records], np.float64), 1.0, "step"
    return np.append(tokens, tokens[-1] + last), label


def _column(records: Sequence[BoundaryRecord], name: str) -> np.ndarray:
    return np.array([getattr(record, name) for record in records], np.float64)


def _draw_memory(axes: Any, x: np.ndarray, records: Sequence[BoundaryRecord]) -> None:
    budget = _column(records, "budget_bytes")
    unit, scale = next(((u, s) for u, s in _UNITS if budget.max() >= s), ("B", 1))
    bottom = np.zeros(len(records) + 1)
    for label, name, color in _PARTS:
        values = _column(records, name) / scale
        top = bottom + np.append(values, values[-1])  # the last record is repeated to give its step a width
        axes.fill_between(x, bottom, top, step="post", color=color, label=label, linewidth=0)
        if name != "free_bytes":
            axes.step(x, top, where="post", color="white", linewidth=0.5)
        bottom = top
    limit = np.append(budget, budget[-1]) / scale
    axes.step(x, limit, where="post", color="black", linewidth=1.6, linestyle="--", label="memory budget")
    axes.set_ylim(0, max(limit.max(), bottom.max()) * 1.06)
    axes.set_ylabel(f"device memory ({unit})")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_bits(axes: Any, x: np.ndarray, records: Sequence[BoundaryRecord]) -> None:
    bits = np.array([np.nan if r.mean_bits is None else r.mean_bits for r in records], np.float64)
    axes.set_ylabel("mean\ncommitted bits")
    if np.isnan(bits).all():
        axes.text(0.5, 0.5, "experts are dense", ha="center", va="center", transform=axes.transAxes)
        return
    axes.step(x, np.append(bits, bits[-1]), where="post", color=_BITS_COLOR, linewidth=1.6)
    low, high = np.nanmin(bits), np.nanmax(bits)
    margin = max(0.1 * (high - low), 0.1)
    axes.set_ylim(low - margin, high + margin)


def _draw_moves(axes: Any, x: np.ndarray, records: Sequence[BoundaryRecord]) -> None:
    """Pages a bin: reloads upwards, offloads downwards, and marks where requests were preempted."""
    edges = np.linspace(x[0], x[-1], min(_MOVE_BINS, max(len(records), 1)) + 1)
    for name, sign, color, label in (
        ("reloads", 1, _RELOAD_COLOR, "reloaded"),
        ("offloads", -1, _OFFLOAD_COLOR, "offloaded"),
    ):
        counts, _ = np.histogram(x[:-1], bins=edges, weights=_column(records, name))
        axes.bar(edges[:-1], sign * counts, width=np.diff(edges), align="edge", color=color, label=label)
    preempted = x[:-1][_column(records, "preemptions") > 0]
    if len(preempted):
        axes.plot(preempted, np.zeros(len(preempted)), "x", color="black", markersize=7, label="request preempted")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("weight pages\nmoved")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
