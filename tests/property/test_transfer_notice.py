"""Whatever bytes come: they are a notice that encodes to just these bytes, or malformed."""

from __future__ import annotations

import contextlib

from hypothesis import example, given
from hypothesis import strategies as st

from engine.core.types import RoomKey
from transfer.notice import MAX_CHECKSUMS, MalformedNotice, Notice

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
CHECKSUMS = st.lists(U64, max_size=20).map(tuple) | U64.map(lambda one: (one,) * MAX_CHECKSUMS)
NOTICES = st.builds(Notice, st.builds(RoomKey, U64, U32), U32, U32, st.none() | st.binary(max_size=40), CHECKSUMS)


@given(NOTICES)
def test_decode_undoes_encode(notice: Notice) -> None:
    assert Notice.decode(notice.encode()) == notice


@given(NOTICES, st.integers(0, 7), st.integers(0, 255), st.integers(0, 60), st.binary(max_size=9))
@example(Notice(RoomKey(1, 0), 0, 1, None, (5,)), 3, 2, 8, b"")
def test_anything_else_is_malformed(notice: Notice, at: int, byte: int, cut: int, more: bytes) -> None:
    """A byte of the header, or of what follows it, is another; the end is cut off; something follows."""
    encoded = bytearray(notice.encode())
    for place in (at, 24 + at):
        if place < len(encoded):
            encoded[place] = byte
    data = bytes(encoded[: len(encoded) - cut]) + more
    with contextlib.suppress(MalformedNotice):
        assert Notice.decode(data).encode() == data
