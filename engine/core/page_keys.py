"""Names for the content of pages: a chain of 128-bit keys, one per whole page of a token sequence.

Key i is a keyed hash (BLAKE2b, RFC 7693) of page i's token ids and key i-1, so equal keys mean equal tokens from
the very start, and one look-up tells whether a whole prefix is known. The chain is seeded with the page size and
the request's extra key (salt, adapter): different salts share nothing. The front door computes it once per request;
routing and the prefill node's cache both use it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["KEY_BYTES", "page_keys"]

KEY_BYTES = 16
_TOKEN_BYTES = 4


def page_keys(token_ids: Sequence[int], page_size: int, extra_key: str = "") -> tuple[bytes, ...]:
    """Keys of the len(token_ids) // page_size whole pages of a sequence of ids below 2**32."""
    data = array("I", token_ids).tobytes()
    key = hashlib.blake2b(f"{page_size}:{extra_key}".encode(), digest_size=KEY_BYTES).digest()
    step = page_size * _TOKEN_BYTES
    keys = []
    for start in range(0, len(data) - step + 1, step):
        key = hashlib.blake2b(data[start : start + step], digest_size=KEY_BYTES, key=key).digest()
        keys.append(key)
    return tuple(keys)
