"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """The first stop string to be complete ends the text, wherever the pieces are cut.

    Of several that are complete at the same character the longest counts, since it starts first. An Aho-Corasick
    automaton: its depth is the length of the longest end of the text that starts some stop string, which is exactly
    what must be held back. O(1) amortised a character, however many strings there are.
    """

    def __init__(self, stops: Sequence[str]):
        assert all(stops), "a stop string is empty"
        self._next: list[dict[str, int]] = [{}]  # state -> character -> state; 0 is the start
        self._fail = [0]  # state of the longest proper suffix that starts a stop string
        self._depth = [0]  # characters of a stop string that a state stands for
        self._match: list[str | None] = [None]  # longest stop string that ends at a state
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take in more text; return what may be shown by now. After a match everything is swallowed."""
        if self.matched is not None:
            return ""
        self._held += text
        for position in range(len(self._held) - len(text), len(self._held)):
            self._state = self._step(self._state, self._held[position])
            self.matched = self._match[self._state]
            if self.matched is not None:
                shown = self._held[: position + 1 - len(self.matched)]
                self._held = ""
                return shown
        cut = len(self._held) - self._depth[self._state]
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The text has ended: what was held back started no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        """Breadth first, so that the states a failure link leads to are finished before it is followed."""
        pending = deque(self._next[0].values())
        while pending:
            state = pending.popleft()
            for character, following in self._next[state].items():
                self._fail[following] = self._step(self._fail[state], character)
                self._match[following] = self._match[following] or self._match[self._fail[following]]
                pending.append(following)

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)
