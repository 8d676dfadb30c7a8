"""Tells any number of tasks that something has changed."""

from __future__ import annotations

import asyncio
import contextlib

__all__ = ["Broadcast"]


class Broadcast:
    """A waiter takes `news` before it reads the state that may change, and so misses no change."""

    def __init__(self) -> None:
        self.news = asyncio.Event()

    def notify(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


async def wait_for(news: asyncio.Event, seconds: float) -> None:
    """Until there is news, or for so long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()
