"""How much one client may ask: a token bucket for calls begun, a count for Generate calls that live.

A bucket is one number, the time at which it will be full again: each call taken puts that off by 1/rate seconds, and a
call is taken while it lies no further ahead than a bucket's worth. (The virtual scheduling form of the generic cell
rate algorithm, ITU-T I.371.) A client with a full bucket and no live call is forgotten, so memory is that of the
clients which called within the last `burst / rate` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.clock import Clock
from engine.core.errors import Overloaded

__all__ = ["ClientLimits"]

_ROUNDING_S = 1e-6  # of times as floats: who waits as long as told is not refused again


@dataclass(slots=True)
class _Client:
    full_at: float  # seconds of the clock
    live: int = 0


class ClientLimits:
    """Limits of all clients, by name; None is no limit. Use it from one thread."""

    def __init__(self, rate: float | None, burst: int, concurrency: int | None, clock: Clock):
        self._rate = rate
        self._burst = burst
        self._concurrency = concurrency
        self._clock = clock
        self._clients: dict[str, _Client] = {}  # the one that has been quiet longest first

    @property
    def clients(self) -> int:
        """How many are remembered."""
        return len(self._clients)

    def take(self, name: str) -> None:
        """One call. Raises Overloaded, with the time after which it would be taken."""
        self._take(name)
        self._forget()

    def begin(self, name: str) -> Callable[[], None]:
        """One call that lives until what is returned is called; calling that again does nothing.

        Raises Overloaded; what is refused is not counted.
        """
        client = self._clients.get(name)
        if self._concurrency is not None and client is not None and client.live >= self._concurrency:
            raise Overloaded(
                f"this client has {client.live} live Generate calls; allowed: {self._concurrency}",
                reason="CLIENT_CONCURRENCY",
                limit="client_concurrency",
                value=str(self._concurrency),
            )
        client = self._take(name)
        client.live += 1
        ended = False

        def end() -> None:
            nonlocal ended
            if not ended:
                ended = True
                client.live -= 1
                self._forget()

        return end

    def _take(self, name: str) -> _Client:
        now = self._clock()
        client = self._clients.pop(name, None) or _Client(now)
        self._clients[name] = client  # the last one
        if self._rate is not None:
            full_at = max(client.full_at, now) + 1 / self._rate
            wait = full_at - self._burst / self._rate - now
            if wait > _ROUNDING_S:
                raise Overloaded(
                    f"this client calls more often than {self._rate:g} times a second",
                    reason="CLIENT_RATE",
                    retry_after=wait,
                    limit="client_rate",
                    value=f"{self._rate:g}",
                )
            client.full_at = full_at
        return client

    def _forget(self) -> None:
        """Drop idle clients, from the one that has been quiet longest to the first that is not idle.

        That one may be long at it: it goes to the end, so that it does not stand before the others.
        """
        now = self._clock()
        for _ in range(len(self._clients)):
            name = next(iter(self._clients))
            client = self._clients.pop(name)
            if client.live or client.full_at > now:
                self._clients[name] = client
                return
