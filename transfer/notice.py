"""What rides on a write: which room, which write of it, how many pages so far, and at the end some bytes.

    bytes  0..1   magic "KV"
           2      version
           3      1 on the last notice of a room, else 0
           4..11  room          unsigned, big-endian, like all that follow
           12..15 epoch
           16..19 sequence number of this notice in its room, from 0
           20..23 pages of the room written by this and all earlier notices
           24..   the sender's bytes; only on the last notice

It says nothing of where the pages lie: the receiver chose that itself and told the sender.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from engine.core.types import RoomKey

__all__ = ["GREETING", "MAX_LAST_BYTES", "MalformedNotice", "Notice"]

GREETING = b"KVRelay says hello"  # opens the connection; agents keep it to themselves
MAX_LAST_BYTES = 64 * 1024
_MAGIC = b"KV"
_VERSION = 1
_HEADER = struct.Struct(">2sBBQIII")


class MalformedNotice(ValueError):
    """These bytes are not a notice of this version."""


@dataclass(frozen=True, slots=True)
class Notice:
    room: RoomKey
    sequence: int
    pages: int  # of the room, with this notice and all before it
    last: bytes | None = None  # None: more follow

    def encode(self) -> bytes:
        is_last = self.last is not None
        key = self.room
        header = _HEADER.pack(_MAGIC, _VERSION, is_last, key.room, key.epoch, self.sequence, self.pages)
        return header + (self.last or b"")

    @classmethod
    def decode(cls, data: bytes) -> Notice:
        """Raises MalformedNotice."""
        if len(data) < _HEADER.size:
            raise MalformedNotice(f"{len(data)} bytes, {_HEADER.size} is the least")
        magic, version, is_last, room, epoch, sequence, pages = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise MalformedNotice(f"magic {magic!r} and version {version}, expected {_MAGIC!r} and {_VERSION}")
        last = data[_HEADER.size :]
        if is_last > 1 or len(last) > MAX_LAST_BYTES or (last and not is_last):
            raise MalformedNotice(f"last flag {is_last} with {len(last)} bytes")
        return cls(RoomKey(room, epoch), sequence, pages, last if is_last else None)
