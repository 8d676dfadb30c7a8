"""What the prefill node tells the decode node with the last page: all that decoding needs besides KV.

It rides on the last write's notification, beside room, epoch and sequence numbers, which the transfer layer owns.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import orjson

__all__ = ["HandoffNote"]


@dataclass(frozen=True, slots=True)
class HandoffNote:
    token_id: int  # the token the prefill node sampled
    index: int  # its index in the answer
    logprob: float
    cached_tokens: int
    forward_end_ns: int  # wall clock of the prefill node when the last chunk's forward returned

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> HandoffNote:
        """Raises ValueError when `data` is not an encoded note."""
        try:
            return cls(**orjson.loads(data))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a hand-off note: {error}") from error
