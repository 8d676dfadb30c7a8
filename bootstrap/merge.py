"""Tokens of one answer, from two nodes and over two streams, back into order."""

from __future__ import annotations

from engine.core.types import TokenOutput

__all__ = ["TokenMerge"]


class TokenMerge:
    """Takes tokens in any order, gives every index once and in order."""

    def __init__(self, next_index: int = 0) -> None:
        self.next_index = next_index  # of the first token not yet given
        self._early: dict[int, TokenOutput] = {}

    def add(self, token: TokenOutput) -> list[TokenOutput]:
        """The tokens that are next in order now: none when `token` came early, or was here before."""
        if token.index < self.next_index:
            return []
        self._early.setdefault(token.index, token)
        ready = []
        while (following := self._early.pop(self.next_index, None)) is not None:
            ready.append(following)
            self.next_index += 1
        return ready

    def restart(self) -> None:
        """Forget what came early: the next attempt makes it again, from next_index on."""
        self._early.clear()
