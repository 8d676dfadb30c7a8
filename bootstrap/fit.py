"""What a request takes on a node: the formulas of the nodes' own admission, as the front door uses them.

A request that goes on after it was retracted, or after a node was lost, has a longer prompt and fewer tokens left. What
fitted at arrival must not be refused then for the room that decode nodes set aside for tokens to come, or for rounding
to whole pages: so that room ends where the request ends, or the pool. The clip of `decode_service.admission` counts
from the first token of all, not from where the attempt begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import InvalidField
from engine.core.messages import Registration
from engine.core.room_budget import CLIP_NEW_TOKENS, decode_room, longest_prompt, never_fits
from engine.core.types import Role

__all__ = ["Size"]


@dataclass(frozen=True, slots=True)
class Size:
    """Of one attempt, in tokens."""

    prompt: int  # with what earlier attempts generated
    new: int  # still to generate, at most
    first_index: int = 0  # how many earlier attempts generated

    def refusal(self, node: Registration) -> InvalidField | None:
        """Why it can never run on this node, however idle that is; None when it can."""
        pages, page_size = node.memory.num_pages, node.layout.page_size
        if node.role is Role.DECODE:
            new = self._future if self.first_index else self.new
            return never_fits(self.prompt, new, pages * page_size, self._reserve(node), page_size)
        most = longest_prompt(pages, page_size)
        if self.prompt <= most:
            return None
        return InvalidField("prompt tokens", self.prompt, f"at most {most}, the room on a prefill node")

    def taken(self, node: Registration) -> int:
        """By which a decode node's head-room shrinks when it grants."""
        return decode_room(self.prompt, 0, node.layout.page_size) + self._reserve(node)

    def required(self, node: Registration, retractable: int) -> int:
        """Head-room that a decode node wants to see before it grants. `retractable`: tokens, as the node said."""
        return max(self.taken(node), self.prompt + self._future - retractable)

    @property
    def _future(self) -> int:
        return min(self.new, max(CLIP_NEW_TOKENS - self.first_index, 0))

    def _reserve(self, node: Registration) -> int:
        if not self.first_index:
            return node.reserved_decode_tokens
        page_size = node.layout.page_size
        end = min(self.prompt + self.new, node.memory.num_pages * page_size)
        left = decode_room(end, 0, page_size) - decode_room(self.prompt, 0, page_size)
        return max(0, min(node.reserved_decode_tokens, left))
