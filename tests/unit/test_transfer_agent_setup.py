"""What an agent is told before it says a word to NIXL."""

from __future__ import annotations

import pytest

from engine.core.errors import ConfigError
from engine.core.types import PoolMemory
from transfer.agent import check_ucx_tls
from transfer.layout import memory_type, page_descriptors, pool_region


@pytest.mark.parametrize("value", ["", "all", "tcp", "sm,tcp", "cuda_ipc, tcp ,cuda_copy", "^rc,ud"])
def test_transports_that_can_connect(value: str) -> None:
    check_ucx_tls({"UCX_TLS": value})


@pytest.mark.parametrize("value", ["sm", "rc,cuda_ipc", "^tcp", "^ud,tcp", "tcpx"])
def test_transports_without_tcp_are_a_start_up_error(value: str) -> None:
    with pytest.raises(ConfigError, match="rules out tcp"):
        check_ucx_tls({"UCX_TLS": value})


def test_no_setting_is_fine() -> None:
    check_ucx_tls({})


def test_a_page_is_a_descriptor() -> None:
    memory = PoolMemory(base_address=0x7000, page_bytes=96, num_pages=5, device="cuda", device_index=3)
    assert memory_type(memory) == "VRAM"
    assert pool_region(memory) == [(0x7000, 480, 3, "")]
    assert page_descriptors(memory).tolist() == [[0x7000, 96, 3, 96, 5]]
