"""What an attempt takes on a node, by the formulas of the nodes' own admission (`engine.core.room_budget`)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import InvalidField
from engine.core.messages import Registration
from engine.core.room_budget import decode_room, longest_prompt, never_fits, never_fits_unified, required_room
from engine.core.types import Role

__all__ = ["Size", "answer_room"]


@dataclass(frozen=True, slots=True)
class Size:
    """Of one attempt, in tokens."""

    prompt: int  # with what earlier attempts generated
    new: int  # still to generate, at most
    resumed: bool = False  # earlier attempts generated some

    def refusal(self, node: Registration) -> InvalidField | None:
        """Why it can never run on this node, however idle that is; None when it can."""
        pages, page_size = node.memory.num_pages, node.layout.page_size
        if self.prompt + self.new > node.max_context:
            limit = f"at most {node.max_context}, the context of a {node.role} node"
            return InvalidField("prompt and answer tokens", self.prompt + self.new, limit)
        if node.role is Role.DECODE:
            reserved = node.reserved_decode_tokens
            return never_fits(self.prompt, self.new, pages * page_size, reserved, page_size, resumed=self.resumed)
        if node.role is Role.UNIFIED:
            return never_fits_unified(self.prompt, self.new, pages, page_size, resumed=self.resumed)
        most = longest_prompt(pages, page_size)
        if self.prompt <= most:
            return None
        return InvalidField("prompt tokens", self.prompt, f"at most {most}, the room on a prefill node")

    def required(self, node: Registration, retractable: int) -> int:
        """Head-room that a decode node wants to see before it grants. `retractable`: tokens, as the node said."""
        page_size = node.layout.page_size
        return required_room(
            self.prompt,
            self.new,
            node.reserved_decode_tokens,
            page_size,
            retractable=retractable,
            resumed_below=node.memory.num_pages * page_size if self.resumed else None,
        )

    def taken(self, node: Registration) -> int:
        """By which a decode node's head-room shrinks when it grants."""
        return decode_room(self.prompt, 0, node.layout.page_size) + node.reserved_decode_tokens


def answer_room(node: Registration) -> int:
    """Most tokens of prompt and answer together that a node which answers has room for."""
    pages, page_size = node.memory.num_pages, node.layout.page_size
    room = longest_prompt(pages, page_size) + 1 if node.role is Role.UNIFIED else pages * page_size
    return min(room, node.max_context)
