"""Which of a planner's trades fit one exchange: pages that rise are staged first, and cold ones fall only then.

An exchange in two halves would serve with less than the budget allows while its copies are under way. So the pages
that are to rise wait on the device, in staging buffers, and at one boundary the cold pages give up their slots and the
hot ones take them. What fits is bounded by the staging buffers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from pwjax.paging.host_store import Kind

ExchangeMove = tuple[int, int, int, int]  # index, from_bits, to_bits, slots (+ released, - taken)


@dataclasses.dataclass(frozen=True)
class Trades:
    """Trades of one exchange.

    Attributes:
        downs: `(index, to_bits)`.
        ups: `(index, to_bits)` by page kind; each rises by one bit.
    """

    downs: tuple[tuple[int, int], ...]
    ups: Mapping[Kind, tuple[tuple[int, int], ...]]

    @property
    def indices(self) -> set[int]:
        """Linear-blocks that no other move may touch until the exchange is over."""
        return {index for index, _ in self.downs} | {index for pages in self.ups.values() for index, _ in pages}

    @property
    def num_ups(self) -> int:
        return sum(map(len, self.ups.values()))


def choose_trades(moves: Iterable[ExchangeMove], pages_per_batch: Mapping[Kind, int], max_batches: int) -> Trades:
    """The first trades whose pages fit `max_batches` staging buffers of one page kind each.

    Args:
        moves: trades one after another: falls, then the one-bit rise that they pay for. Slots that a trade leaves over
            may pay for later ones.
        pages_per_batch: pages of a kind that fit a staging buffer.
    """
    downs: list[tuple[int, int]] = []
    ups: dict[Kind, list[tuple[int, int]]] = {}
    falling: list[ExchangeMove] = []
    balance_slots = 0
    for move in moves:
        index, from_bits, to_bits, slots = move
        if to_bits < from_bits:
            falling.append(move)
            continue
        kind = (index % 2, to_bits)
        released = sum(fall[3] for fall in falling)
        fits = len(ups.get(kind, ())) < pages_per_batch[kind] and (kind in ups or len(ups) < max_batches)
        if fits and balance_slots + released + slots >= 0:
            downs += [(fall[0], fall[2]) for fall in falling]
            ups.setdefault(kind, []).append((index, to_bits))
            balance_slots += released + slots
        falling = []
    return Trades(tuple(downs), {kind: tuple(pages) for kind, pages in ups.items()})
