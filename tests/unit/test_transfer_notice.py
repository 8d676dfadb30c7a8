"""What rides on a write survives the way, and nothing else passes for it."""

from __future__ import annotations

import itertools

import pytest

from engine.core.types import RoomKey
from transfer.notice import GREETING, MAX_CHECKSUMS, MAX_LAST_BYTES, MalformedNotice, Notice
from transfer.receiver import RoomTally

ROOM = RoomKey(2**64 - 1, 2**32 - 1)


@pytest.mark.parametrize("last", [None, b"", b"x", bytes(range(256)) * (MAX_LAST_BYTES // 256)])
@pytest.mark.parametrize("checksums", [(), (2**64 - 1, 0), (3,) * MAX_CHECKSUMS], ids=["none", "two", "most"])
def test_decode_undoes_encode(last: bytes | None, checksums: tuple[int, ...]) -> None:
    notice = Notice(ROOM, sequence=7, pages=12345, last=last, checksums=checksums)
    assert Notice.decode(notice.encode()) == notice


def test_layout_on_the_wire() -> None:
    encoded = Notice(RoomKey(0x0102030405060708, 9), sequence=10, pages=11, last=b"end").encode()
    assert encoded == b"KV\x01\x01\x01\x02\x03\x04\x05\x06\x07\x08\0\0\0\x09\0\0\0\x0a\0\0\0\x0bend"
    checked = Notice(RoomKey(0x0102030405060708, 9), 10, 11, b"end", (0xFF00000000000001, 2)).encode()
    assert checked[:4] == b"KV\x01\x03"
    assert checked[4:24] == encoded[4:24]
    assert checked[24:] == b"\0\0\0\x02\xff\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02end"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GREETING,
        b"garbage" * 10,
        Notice(ROOM, 0, 1).encode()[:-1],
        Notice(ROOM, 0, 1).encode() + b"bytes on a notice that is not the last",
        b"KV\x02" + Notice(ROOM, 0, 1).encode()[3:],
        Notice(ROOM, 0, 1, b"").encode() + bytes(MAX_LAST_BYTES + 1),
        Notice(ROOM, 0, 2, None, (3, 4)).encode()[:-1],
        Notice(ROOM, 0, 2, None, (3, 4)).encode() + b"bytes on a notice that is not the last",
        Notice(ROOM, 0, 2, None, (3,) * (MAX_CHECKSUMS + 1)).encode(),
        b"KV\x01\x02" + Notice(ROOM, 0, 1).encode()[4:] + b"\0\0\0\0",
        b"KV\x01\x04" + Notice(ROOM, 0, 1).encode()[4:],
    ],
)
def test_anything_else_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedNotice):
        Notice.decode(data)


NOTICES = (Notice(ROOM, 0, 3), Notice(ROOM, 1, 3), Notice(ROOM, 2, 8), Notice(ROOM, 3, 9, b"end"))


@pytest.mark.parametrize("order", list(itertools.permutations(NOTICES)))
def test_a_room_is_complete_with_its_last_notice_in_whatever_order(order: tuple[Notice, ...]) -> None:
    tally = RoomTally(expected_pages=9)
    for count, notice in enumerate(order, start=1):
        assert tally.take(notice, now=float(count)) is None
        assert tally.complete == (count == len(order))
        prefix = list(itertools.takewhile(set(order[:count]).__contains__, NOTICES))
        assert tally.pages == (prefix[-1].pages if prefix else 0)
    assert tally.first_at == 1.0


@pytest.mark.parametrize(
    ("notices", "complaint"),
    [
        ([Notice(ROOM, 0, 3), Notice(ROOM, 0, 3)], "notice 0 came twice"),
        ([Notice(ROOM, 2, 3), Notice(ROOM, 2, 3)], "notice 2 came twice"),
        ([Notice(ROOM, 0, 3), Notice(ROOM, 1, 2)], "notice 1 counts 2 pages after 3"),
        ([Notice(ROOM, 0, 8, b"")], "8 pages came, 9 were expected"),
        ([Notice(ROOM, 0, 8), Notice(ROOM, 1, 10)], "10 pages came, 9 were expected"),
        ([Notice(ROOM, 0, 3), Notice(ROOM, 1, 5, None, (7,))], "notice 1 has 1 checksums of 2 pages"),
        ([Notice(ROOM, 1, 9, b"", (7, 7)), Notice(ROOM, 0, 8)], "notice 1 has 2 checksums of 1 pages"),
        ([Notice(ROOM, 1, 9, b""), Notice(ROOM, 2, 9)], "notice 2 came after the last one, 1"),
        ([Notice(ROOM, 2, 9), Notice(ROOM, 1, 9, b"")], "notice 1 calls itself the last"),
        ([Notice(ROOM, 1, 9, b""), Notice(ROOM, 2, 9, b"")], "notice 2 calls itself the last"),
    ],
)
def test_a_contradiction_is_named(notices: list[Notice], complaint: str) -> None:
    tally = RoomTally(expected_pages=9)
    assert [tally.take(notice, now=0.0) for notice in notices] == [None] * (len(notices) - 1) + [complaint]
