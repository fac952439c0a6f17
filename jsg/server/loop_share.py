"""Shares the event loop among tenants. Work on many answers is done in slices, and all other work runs between them."""

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import final

from jsg import waits

UNITS = 8
"""The work that begins in one turn of the loop. A unit is what one answer needs to begin: about 0.3 ms."""
PER_UNIT = 8
"""Things that take a unit together where many are made of a list: prompts, answers that have not begun, results."""
IDS_PER_UNIT = 2**13
"""Ids of prompts that are checked in the time of a unit."""


@final
class LoopShare:
    """Lets work begin that many answers need, at most `UNITS` and one piece of work more in a turn of the event loop.

    Tenants take turns, so that a tenant with much work does not keep others waiting. Everything happens on one loop.

    Invariants: nobody waits unless `_renew` is due; no line is empty.

    Attributes:
        most_units: The most units that have begun in one turn so far.
    """

    def __init__(self) -> None:
        self.most_units = 0.0
        self._left = float(UNITS)
        self._begun = 0.0  # in this turn
        self._lines: OrderedDict[str, deque[tuple[asyncio.Future[None], float]]] = OrderedDict()
        self._is_due = False

    async def turn(self, tenant: str, units: float = 1) -> None:
        """Waits until the tenant may begin so much work."""
        self._renew_later()
        if not self._lines and self._left > 0:
            self._begin(units)
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append((waiting, units))
        with waits.waiting(waits.WaitReason.TURN):
            await waiting

    async def each[Item, Made](self, tenant: str, make: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
        """What `make` makes of each item, in slices."""
        made: list[Made] = []
        for some in itertools.batched(items, PER_UNIT):
            await self.turn(tenant)
            made += map(make, some)
        return made

    def _begin(self, units: float) -> None:
        self._left -= units
        self._begun += units
        self.most_units = max(self.most_units, self._begun)

    def _renew_later(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        """Begins the next turn. Work that was larger than its turn is paid for by the turns after it."""
        self._is_due, self._begun = False, 0.0
        self._left = min(self._left + UNITS, UNITS)
        while self._lines and self._left > 0:
            tenant, line = self._lines.popitem(last=False)
            waiting, units = line.popleft()
            if line:
                self._lines[tenant] = line  # after all others
            if not waiting.done():  # else nobody waits for it any more
                self._begin(units)
                waiting.set_result(None)
        if self._lines or self._left < UNITS:
            self._renew_later()
