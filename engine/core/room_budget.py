"""What can never fit on a node, however idle. Nodes admit by it, and the front door refuses by it.

A request that passes a plain capacity check but not the admission formula would stay at the head of a queue for ever;
so what is refused at arrival is decided by the very formula that admits.
"""

from __future__ import annotations

from engine.core.errors import InvalidField
from engine.core.types import ceil_div

__all__ = [
    "CLIP_NEW_TOKENS",
    "decode_room",
    "longest_prompt",
    "never_fits",
    "never_fits_unified",
    "required_room",
]

CLIP_NEW_TOKENS = 4096  # admission counts no more than this of a request's future tokens


def decode_room(prompt_tokens: int, generated: int, page_size: int) -> int:
    """Tokens of whole pages that a request holds on a decode node. The last token generated has no KV yet."""
    return ceil_div(prompt_tokens + max(generated - 1, 0), page_size) * page_size


def longest_prompt(num_pages: int, page_size: int) -> int:
    """Most tokens that an idle prefill node admits: tokens + 1 + page_size must be less than its pool."""
    return num_pages * page_size - page_size - 2


def required_room(
    prompt_tokens: int,
    max_new_tokens: int,
    reserved: int,
    page_size: int,
    *,
    retractable: int = 0,
    resumed_below: int | None = None,
) -> int:
    """Tokens that must be free on a decode node for it to admit a request.

    prompt_tokens: tokens whose KV arrives. max_new_tokens: tokens still to generate. reserved: decode tokens set aside
    for each request. retractable: tokens that retracting every running request would give back. resumed_below: for a
    request that has generated tokens before, the node's capacity: what fitted when it arrived must not be refused
    because part of its answer has become prompt, so its reserve ends with its answer and its end is cut there.
    """
    end = prompt_tokens + min(max_new_tokens, CLIP_NEW_TOKENS)
    if resumed_below is None:
        return max(decode_room(prompt_tokens, 0, page_size) + reserved, end - retractable)
    held = decode_room(prompt_tokens + min(reserved, max_new_tokens), 0, page_size)
    return max(held, min(end, resumed_below) - retractable)


def never_fits(
    prompt_tokens: int, max_new_tokens: int, capacity: int, reserved: int, page_size: int, *, resumed: bool = False
) -> InvalidField | None:
    """Why a decode node would never admit a request, or None when an idle one would.

    prompt_tokens: tokens whose KV arrives. max_new_tokens: tokens still to generate. capacity: tokens of the node's
    pool. reserved: decode tokens set aside for each request. The formula is that of decode admission with nothing
    running, in transfer, waiting or retracted.
    """
    capacity = capacity // page_size * page_size
    below = capacity if resumed else None
    if required_room(prompt_tokens, max_new_tokens, reserved, page_size, resumed_below=below) <= capacity:
        return None
    most = (capacity - (min(reserved, max_new_tokens) if resumed else reserved)) // page_size * page_size
    if prompt_tokens > most:
        return InvalidField("prompt tokens", prompt_tokens, f"at most {most}, the room on a decode node")
    limit = f"at most {capacity - prompt_tokens} after {prompt_tokens} prompt tokens, the room on a decode node"
    return InvalidField("stopping.max_new_tokens", max_new_tokens, limit)


def never_fits_unified(
    prompt_tokens: int, max_new_tokens: int, num_pages: int, page_size: int, *, resumed: bool = False
) -> InvalidField | None:
    """Why a unified node would never admit a request, or None when an idle one would.

    Its prefill admission counts the answer too: prompt + min(answer, 4096) + page_size must be less than the pool. Of
    a request that has generated tokens before, only the next one counts, as what fitted when it arrived must go on.
    """
    most = longest_prompt(num_pages, page_size)
    if prompt_tokens > most:
        return InvalidField("prompt tokens", prompt_tokens, f"at most {most}, the room on a unified node")
    most = most + 1 - prompt_tokens
    if resumed or min(max_new_tokens, CLIP_NEW_TOKENS) <= most:
        return None
    limit = f"at most {most} after {prompt_tokens} prompt tokens, the room on a unified node"
    return InvalidField("stopping.max_new_tokens", max_new_tokens, limit)
