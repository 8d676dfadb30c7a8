"""What a page's checksum tells apart, and that it is the same number wherever and in whatever slices it is computed."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
import torch
from torch import Tensor

from engine.core.types import PageLayout
from engine.device import page_checksum
from engine.device.kv_pool import KVPool
from engine.device.page_checksum import page_checksums

BITS_64 = 2**64 - 1


def by_definition(page: bytes) -> int:
    """The formula, in whole numbers."""
    words = struct.unpack(f"<{len(page) // 4}i", page) if len(page) % 4 == 0 else tuple(page)
    total = 0
    for place, word in enumerate(words, start=1):
        weight = place * 0x9E3779B97F4A7C15 & BITS_64
        weight = (weight ^ weight >> 30) * 0xBF58476D1CE4E5B9 & BITS_64
        weight = (weight ^ weight >> 27) * 0x94D049BB133111EB & BITS_64
        total += word * ((weight ^ weight >> 31) | 1)
    return total & BITS_64


def pool_of(*pages: bytes) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(pages)), dtype=torch.uint8).view(len(pages), -1)


def checksums(*pages: bytes) -> list[int]:
    return list(page_checksums(pool_of(*pages), range(len(pages))))


def test_a_number_that_both_ends_of_a_write_agree_on() -> None:
    assert checksums(bytes(range(16))) == [by_definition(bytes(range(16)))] == [6352064695888912744]


@pytest.mark.parametrize("size", [1, 2, 3, 13, 96])
@pytest.mark.parametrize("content", ["random", "zeros", "ones"])
def test_every_flipped_bit_is_seen(size: int, content: str) -> None:
    page = {"random": random.Random(size).randbytes(size), "zeros": bytes(size), "ones": b"\xff" * size}[content]
    number = int.from_bytes(page, "big")
    flipped = [(number ^ 1 << bit).to_bytes(size, "big") for bit in range(8 * size)]
    assert len(set(checksums(page, *flipped))) == 8 * size + 1


def test_words_that_changed_places_are_seen() -> None:
    words = [struct.pack("<i", word) for word in (0, 1, -1, 2, 1 << 30, -(1 << 31), 0x7FFFFFFF, 0x3C003C00, 5, 6)]
    swapped = []
    for i, j in itertools.combinations(range(len(words)), 2):
        other = words.copy()
        other[i], other[j] = words[j], words[i]
        swapped.append(b"".join(other))
    assert checksums(b"".join(words))[0] not in checksums(*swapped)


def test_another_page_in_its_place_is_seen() -> None:
    numbers = random.Random(3)
    pages = [bytes(256), b"\xff" * 256, *(numbers.randbytes(256) for _ in range(2000))]
    found = checksums(*pages)
    assert len(set(found)) == len(pages)
    pool = pool_of(*pages)
    assert page_checksums(pool, [7, 0, 1999, 7]) == (found[7], found[0], found[1999], found[7])
    assert page_checksums(pool, []) == ()
    with pytest.raises(IndexError):
        page_checksums(pool, [len(pages)])


@pytest.mark.parametrize("size", [13, 52])
@pytest.mark.parametrize("words", [1, 4, 7, 13, 30, 1000])
def test_slices_do_not_show(monkeypatch: pytest.MonkeyPatch, size: int, words: int) -> None:
    monkeypatch.setitem(page_checksum.SLICE_WORDS, "cpu", words)
    pages = [random.Random(words).randbytes(size) for _ in range(9)]
    assert checksums(*pages) == [by_definition(page) for page in pages]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_it_is_the_bytes_of_a_pool_that_count(dtype: str) -> None:
    pool = KVPool(PageLayout(2, 2, 1, 4, dtype, "model"), 6)
    pool.data[0] = -0.0
    pool.data[2] = torch.nan
    pool.data[3] = torch.inf
    pool.data[4, 1, 0, 0, 1, 2] = 1.5
    raw = pool.data.view(torch.uint8).view(6, -1)
    assert page_checksums(pool.data, range(6)) == tuple(by_definition(page.numpy().tobytes()) for page in raw)
    zero, minus_zero, nan = page_checksums(pool.data, [1, 0, 2])
    assert zero != minus_zero
    assert page_checksums(pool.data.clone(), [2]) == (nan,)
