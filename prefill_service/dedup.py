"""Which requests had better wait a forward longer, for another one that computes what they share.

Two requests that share more than a given number of tokens beyond what is cached have the same key so many pages further
on, since keys are chained: one look-up a request, however long the shared part is. Among those with that key one leads;
the others lose a forward by waiting for it, and no longer have to compute what they share. Who shares less
than a forward costs does not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prefill_service.request import PrefillRequest

__all__ = ["leaders"]


def leaders(
    queue: Iterable[PrefillRequest],
    page_size: int,
    cost_tokens: float,
    *,
    continuation: PrefillRequest | None = None,
    must_go: Callable[[PrefillRequest], bool] = lambda request: False,
) -> dict[PrefillRequest, PrefillRequest]:
    """Requests of `queue` that should wait, and whom for. Matches must be fresh.

    A request waits when it would save more than `cost_tokens`. Its leader is the continuation, which computes anyway,
    or else one that `must_go`, or else the one with the least to compute; of equals the first in `queue`. Nobody who
    must go waits.
    """
    pages = int(cost_tokens // page_size)  # so pages[: pages + 1] of what is shared are worth more than the cost
    ahead = None
    if continuation is not None and (at := continuation.computed // page_size + pages) < len(continuation.keys):
        ahead = continuation.keys[at]
    marks = {r: r.keys[at] for r in queue if (at := r.node.depth + pages) < len(r.keys)}
    counts = Counter(marks.values())
    groups: dict[bytes, list[PrefillRequest]] = {m: [] for m, count in counts.items() if count > 1 or m == ahead}
    for request, mark in marks.items():
        if mark in groups:
            groups[mark].append(request)
    waits = {}
    for key, group in groups.items():
        if continuation is not None and key == ahead:
            leader = continuation
        else:
            leader = min(group, key=lambda request: (not must_go(request), request.uncached))
        for request in group:
            # The last token is computed in any case, so of a prompt that ends there its last page is not saved.
            saves = request.node.depth + pages < (request.length - 1) // page_size
            if saves and request is not leader and not must_go(request):
                waits[request] = leader
    return waits
