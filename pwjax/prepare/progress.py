"""A progress bar with a known total: on stderr, only on a terminal, and only once two seconds have passed."""

from __future__ import annotations

import sys
from typing import Any

DELAY_SECONDS = 2.0


class Bar:
    """Use as a context manager; without a terminal it does nothing."""

    def __init__(self, description: str, total: int, unit: str) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=description, unit=unit, unit_scale=True, delay=DELAY_SECONDS, leave=False
            )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, amount: int) -> None:
        """Moves on by `amount`."""
        if self._bar is not None:
            self._bar.update(amount)

    def to(self, position: int) -> None:
        """Moves to `position`."""
        if self._bar is not None:
            self._bar.update(position - self._bar.n)
