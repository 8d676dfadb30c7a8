"""The host buffer of a decode node: what was parked comes back bit for bit, and no more is taken than there is."""

from __future__ import annotations

import pytest
import torch

from decode_service.parking import Parking
from engine.core.types import PageLayout, RoomKey
from engine.device.kv_pool import KVPool

LAYOUT = PageLayout(4, 2, 1, 8, "float32", "f" * 32)
A, B, C = (RoomKey(room, 0) for room in (1, 2, 3))


@pytest.fixture
def device() -> KVPool:
    pool = KVPool(LAYOUT, 12)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def test_pages_come_back_as_they_were_to_whichever_are_free(device: KVPool) -> None:
    before = device.data.clone()
    parking = Parking(device, KVPool(LAYOUT, 5, untouched=True))
    assert parking.park(A, [7, 0, 3])
    assert parking.park(B, [5, 1])
    parking.check_integrity([A, B])
    device.data[[7, 0, 3, 5, 1]] = 0  # others use them
    parking.bring_back(B, [0, 7])
    parking.bring_back(A, [1, 9, 3, 8])  # one more than it had
    assert torch.equal(device.data[[0, 7]], before[[5, 1]])
    assert torch.equal(device.data[[1, 9, 3]], before[[7, 0, 3]])
    assert torch.equal(device.data[8], before[8])
    parking.check_integrity([])
    assert parking.available == parking.num_pages == 5


def test_what_does_not_fit_is_refused_and_takes_nothing(device: KVPool) -> None:
    parking = Parking(device, KVPool(LAYOUT, 3))
    assert not parking.park(A, [0, 1, 2, 3])
    assert parking.park(B, [4, 5])
    assert not parking.park(C, [6, 7])
    parking.check_integrity([B])
    assert parking.available == 1
    parking.drop(B)
    assert parking.park(C, [6, 7])
    parking.drop(B)  # which has none
    parking.check_integrity([C])


def test_without_a_pool_nothing_ever_fits(device: KVPool) -> None:
    parking = Parking(device, None)
    assert not parking.park(A, [0])
    parking.drop(A)
    parking.check_integrity([])
    assert (parking.num_pages, parking.available) == (0, 0)


def test_a_room_that_is_missing_or_too_many_is_seen(device: KVPool) -> None:
    parking = Parking(device, KVPool(LAYOUT, 3))
    parking.park(A, [0])
    for rooms in ([], [B], [A, B]):
        with pytest.raises(AssertionError, match="other rooms are parked"):
            parking.check_integrity(rooms)
