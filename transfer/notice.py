"""What rides on a write: which room, which write of it, how many pages so far, checksums, and at the end some bytes.

    bytes  0..1   magic "KV"
           2      version
           3      1 on the last notice of a room, plus 2 when checksums follow
           4..11  room          unsigned, big-endian, like all that follow
           12..15 epoch
           16..19 sequence number of this notice in its room, from 0
           20..23 pages of the room written by this and all earlier notices
           24..   if they follow: the number of checksums in 4 bytes, then one in 8 bytes for each page of this write
           ..     the sender's bytes; only on the last notice

It says nothing of where the pages lie: the receiver chose that itself and told the sender.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from engine.core.types import RoomKey

__all__ = ["GREETING", "MAX_CHECKSUMS", "MAX_LAST_BYTES", "MalformedNotice", "Notice"]

GREETING = b"KVRelay says hello"  # opens the connection; agents keep it to themselves
MAX_LAST_BYTES = 64 * 1024
MAX_CHECKSUMS = MAX_LAST_BYTES // 2 // 8
_MAGIC = b"KV"
_VERSION = 1
_LAST, _CHECKSUMS = 1, 2
_HEADER = struct.Struct(">2sBBQIII")


class MalformedNotice(ValueError):
    """These bytes are not a notice of this version."""


@dataclass(frozen=True, slots=True)
class Notice:
    room: RoomKey
    sequence: int
    pages: int  # of the room, with this notice and all before it
    last: bytes | None = None  # None: more follow
    checksums: tuple[int, ...] = ()  # of the pages that came with this notice; none: they are not checked

    def encode(self) -> bytes:
        flags = _LAST * (self.last is not None) + _CHECKSUMS * bool(self.checksums)
        key, count = self.room, len(self.checksums)
        header = _HEADER.pack(_MAGIC, _VERSION, flags, key.room, key.epoch, self.sequence, self.pages)
        checksums = struct.pack(f">I{count}Q", count, *self.checksums) if count else b""
        return header + checksums + (self.last or b"")

    @classmethod
    def decode(cls, data: bytes) -> Notice:
        """Raises MalformedNotice."""
        if len(data) < _HEADER.size:
            raise MalformedNotice(f"{len(data)} bytes, {_HEADER.size} is the least")
        magic, version, flags, room, epoch, sequence, pages = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != _VERSION:
            raise MalformedNotice(f"magic {magic!r} and version {version}, expected {_MAGIC!r} and {_VERSION}")
        last, checksums = data[_HEADER.size :], ()
        if flags & _CHECKSUMS:
            count = int.from_bytes(last[:4], "big")
            if not 0 < count <= min(MAX_CHECKSUMS, (len(last) - 4) // 8):
                raise MalformedNotice(f"{count} checksums in {len(last)} bytes")
            checksums = struct.unpack_from(f">{count}Q", last, 4)
            last = last[4 + 8 * count :]
        if flags > _LAST + _CHECKSUMS or len(last) > MAX_LAST_BYTES or (last and not flags & _LAST):
            raise MalformedNotice(f"flags {flags} with {len(last)} bytes")
        return cls(RoomKey(room, epoch), sequence, pages, last if flags & _LAST else None, checksums)
