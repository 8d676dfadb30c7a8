"""Pairs of a prefill and a decode node between which transfers keep failing: set aside, while each goes on with others.

    fine ─► `FAILURES` in a row ─► set aside for `FIRST_REST_S` ─► on trial ─► works: fine
                                         ▲                           └─► fails: set aside for twice as long
                                         └───────────────────────────────┘

That is for a link that is broken while both ends of it are well: a lost node, or one that fails by itself, is not
counted here. What was under way together fails together, and counts once: a node that is held up for a while is no
broken link. What is known of a pair ends with the session of either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.clock import Clock
from engine.core.types import NodeIdentity

__all__ = ["Pairs"]

log = logging.getLogger("kvrelay.bootstrap")

FAILURES = 3  # in a row, before a pair is set aside
FIRST_REST_S, MAX_REST_S = 30.0, 300.0


@dataclass(slots=True)
class _Pair:
    """One that has failed since it last worked."""

    failures: int = 0
    failed: float = 0.0  # clock time of the last one counted
    rest: float = 0.0  # seconds for which it was set aside last; 0: never
    until: float | None = None  # set aside until then; None: not set aside


class Pairs:
    """`prefill` and `decode` below are the two ends of a pair."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._pairs: dict[tuple[NodeIdentity, NodeIdentity], _Pair] = {}

    def __len__(self) -> int:
        """How many are set aside."""
        return sum(pair.until is not None for pair in self._pairs.values())

    def set_aside(self, prefill: NodeIdentity, decode: NodeIdentity) -> bool:
        pair = self._pairs.get((prefill, decode))
        return pair is not None and pair.until is not None

    def peers(self, identity: NodeIdentity) -> list[str]:
        """Ids of the nodes that one is set aside with."""
        ends = [ends for ends, pair in self._pairs.items() if identity in ends and pair.until is not None]
        return sorted(other.node_id for pair in ends for other in pair if other != identity)

    def failed(self, prefill: NodeIdentity, decode: NodeIdentity, began: float) -> None:
        """A transfer between them, under way since `began`, failed, and neither of the two is known to be the cause."""
        pair = self._pairs.setdefault((prefill, decode), _Pair())
        if pair.until is not None:
            return  # of a request that has nowhere else to go
        if pair.failures and began < pair.failed:
            return
        pair.failures += 1
        pair.failed = self._clock()
        if pair.failures < FAILURES and not pair.rest:
            return
        pair.rest = min(2 * pair.rest, MAX_REST_S) or FIRST_REST_S
        pair.until = pair.failed + pair.rest
        log.warning("peer pair set aside", extra={**_named(prefill, decode), "seconds": pair.rest})

    def worked(self, prefill: NodeIdentity, decode: NodeIdentity) -> None:
        """A transfer between them arrived whole."""
        pair = self._pairs.pop((prefill, decode), None)
        if pair is not None and pair.rest:
            log.info("peer pair works again", extra=_named(prefill, decode))

    def tick(self) -> None:
        """Put those on trial that have been set aside for long enough."""
        now = self._clock()
        for ends, pair in self._pairs.items():
            if pair.until is not None and now >= pair.until:
                pair.until = None
                log.info("peer pair is tried again", extra=_named(*ends))

    def left(self, identity: NodeIdentity) -> None:
        """A node's session ended."""
        self._pairs = {ends: pair for ends, pair in self._pairs.items() if identity not in ends}

    def check_integrity(self, attached: Callable[[NodeIdentity], bool]) -> None:
        for ends, pair in self._pairs.items():
            assert all(map(attached, ends))
            assert pair.failures > 0
            assert (pair.until is None) or pair.rest > 0


def _named(prefill: NodeIdentity, decode: NodeIdentity) -> dict[str, str]:
    return {"prefill_node": prefill.node_id, "decode_node": decode.node_id}
