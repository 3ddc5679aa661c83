"""Places for rollouts in flight, under a cap that changes while they are taken."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`async with slots:` holds a place; the longest waiting gets the next one. Lowering the cap cancels nothing."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def free(self) -> bool:
        """Whether a newcomer would get a place at once."""
        return self.in_flight < self.cap and not self._waiting

    def set_cap(self, cap: int) -> None:
        self.cap = cap
        self._wake()

    async def __aenter__(self) -> None:
        if self.free:
            self.in_flight += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given the place in the same moment
                self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        self.in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.in_flight < self.cap:
            place = self._waiting.popleft()
            if not place.done():
                self.in_flight += 1
                place.set_result(None)
