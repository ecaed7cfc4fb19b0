"""Repeats the page moves of an earlier run (`--replay`): the same ones, at the same boundaries, in the same order.

When a copy is done depends on the machine, and with it the precision that a step sees. A replayed run waits for every
copy at the boundary at which the recorded run had it, so equal requests give equal text.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from pwjax.errors import UserError
from pwjax.paging.mover import Commit, Mover
from pwjax.paging.page_table import WeightPageTable
from pwjax.timeline import Timeline

_Move = tuple[int, int, int, str]  # index, from_bits, to_bits, reason


class Replay:
    """The moves of a timeline file.

    Args:
        path: as `--timeline FILE.jsonl` wrote it.

    Raises:
        UserError: the file can't be read; later, that the run differs from the recorded one.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._moves: dict[int, list[_Move]] = {}
        for record in Timeline.from_jsonl(path):
            moves = [(m["index"], m["from"], m["to"], m["reason"]) for m in record.moves]
            self._moves.setdefault(record.boundary, []).extend(moves)
        self._planned: list[_Move] = []
        self._last = max(self._moves, default=0)

    def recorded(self, boundary: int) -> bool:
        """Whether the earlier run had this boundary; it does not record an idle one at which nothing happened."""
        return boundary in self._moves

    def commit_ready(self, boundary: int, table: WeightPageTable, mover: Mover) -> list[Commit]:
        """What had taken effect before the planner was asked: all up to the first offload."""
        moves = self._moves.get(boundary, [])
        first = next((n for n, move in enumerate(moves) if move[3] == "offload"), len(moves))
        self._planned = moves[first:]
        return self._carry_out(moves[:first], boundary, table, mover)

    def plan(self, boundary: int, table: WeightPageTable, mover: Mover, *, idle: bool = False) -> list[Commit]:
        """The rest of the boundary's moves, when first called."""
        if boundary > self._last and not idle:
            self._refuse(boundary, "the recorded run was over")
        moves, self._planned = self._planned, []
        return self._carry_out(moves, boundary, table, mover)

    def check_finished(self, boundary: int) -> None:
        """After a run of `boundary` boundaries.

        Raises:
            UserError: the recorded run went on, and moved pages.
        """
        if any(moves for later, moves in self._moves.items() if later > boundary):
            self._refuse(boundary, "this run is over and the recorded one was not")

    def _carry_out(self, moves: list[_Move], boundary: int, table: WeightPageTable, mover: Mover) -> list[Commit]:
        commits: list[Commit] = []
        for falls, group in itertools.groupby(moves, key=lambda move: move[2] < move[1]):
            reached: dict[int, _Move] = {}  # pages that rose one after another are one raise
            for index, was, to, reason in group:
                known = 0 <= index < table.num_linear_blocks
                now = reached[index][2] if index in reached else int(table.committed[index]) if known else None
                if now != was:
                    self._refuse(boundary, f"linear-block {index} has {now} bits, not {was}")
                reached[index] = (index, was, to, reason)
            steps = [(index, to, reason) for index, _, to, reason in reached.values()]
            if falls:
                commits += mover.lower(steps)
                continue
            mover.exchanged_bits += sum(to - was for _, was, to, why in reached.values() if why == "exchange")
            try:
                mover.request_raise(steps)
            except MemoryError as error:
                self._refuse(boundary, str(error))
            commits += mover.commit_ready(wait=True)
        return commits

    def _refuse(self, boundary: int, why: str) -> None:
        raise UserError(
            f"--replay {self._path}: at boundary {boundary} {why}; the file comes from another model, budget, or set "
            "of requests"
        )
