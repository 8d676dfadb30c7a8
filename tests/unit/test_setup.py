from typing import Any

import pytest

from decode_service.config import DecodeOptions, check_pool
from engine.core.config import Bytes
from engine.core.errors import ConfigError
from engine.core.node_config import Device, NodeConfig
from engine.device.setup import NodeDevice, set_up_device, set_up_ranks
from tests.helpers.models import prepared_tiny


def set_up(**options: Any) -> tuple[NodeDevice, list[str]]:
    said: list[str] = []
    path = prepared_tiny().path
    host_kv_memory = options.pop("host_kv_memory", None)
    config = NodeConfig(model=str(path), model_dir=path.parent / "cache", device=Device.CPU, **options)
    return set_up_device(config, said.append, host_kv_memory=host_kv_memory), said


def test_a_node_says_what_its_pool_takes() -> None:
    device, said = set_up(num_pages=100)
    assert device.memory.num_pages == 100
    assert said[-1] == "page pool: 100 pages of 16 tokens, 12288 bytes each, 1 MB on cpu"


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"kv_memory": Bytes("100TB")}, r"page pool of 100,000,000 MB \(8138020833 pages\) does not fit in [\d,]+ MB"),
        ({"num_pages": 10**30}, r"page pool of [\d,]+ MB \(10{30} pages\) does not fit in [\d,]+ MB"),
        ({"kv_memory": Bytes("100TB"), "memory_limit": Bytes("200TB")}, "page pool .* MB, the memory of this device"),
        ({"num_pages": 1000, "memory_limit": Bytes("3MB")}, "page pool of 12 MB .* does not fit in 3 MB, memory_limit"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_before_the_weights_are(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^kv_memory, num_pages: a {refusal}"):
        set_up(**options)


def test_a_host_tier_has_a_pool_of_its_own() -> None:
    device, said = set_up(num_pages=100, host_kv_memory=Bytes("1MB"))
    assert device.host_pool is not None
    assert (device.pool.num_pages, device.host_pool.num_pages) == (100, 1_000_000 // 12288)
    assert said[-1] == "host pool: 81 pages, 1 MB of host memory"
    assert set_up(num_pages=100)[0].host_pool is None


@pytest.mark.parametrize("size", [Bytes(12287), Bytes("100TB")])
def test_a_host_tier_that_does_not_fit_is_refused(size: Bytes) -> None:
    with pytest.raises(ConfigError, match=r"^host_kv_memory is \d+ bytes; allowed: 12288, one page, to \d+, the mem"):
        set_up(num_pages=100, host_kv_memory=size)


def test_ranks_share_the_weights_and_have_pools_of_their_own() -> None:
    path = prepared_tiny().path
    config = NodeConfig(model=str(path), model_dir=path.parent / "cache", device=Device.CPU, num_pages=100)
    said: list[str] = []
    first, second = set_up_ranks(config, 2, said.append, host_kv_memory=12288)
    assert len([line for line in said if line.startswith("loading")]) == 1
    pools = {device.pool.base_address for device in (first, second)}
    pools |= {device.host_pool.base_address for device in (first, second) if device.host_pool}
    assert len(pools) == 4
    assert first.pool.num_pages == second.pool.num_pages == 100


def test_the_pools_of_all_ranks_must_fit() -> None:
    path = prepared_tiny().path
    config = NodeConfig(
        model=str(path), model_dir=path.parent / "cache", device=Device.CPU, num_pages=1000, memory_limit=Bytes("30MB")
    )
    next(set_up_ranks(config, 2, lambda line: None))
    with pytest.raises(ConfigError, match="does not fit in 30 MB, 3 times, memory_limit"):
        next(set_up_ranks(config, 3, lambda line: None))


def test_a_decode_pool_must_hold_the_reserve_and_a_page() -> None:
    check_pool(DecodeOptions(reserved_decode_tokens=128), num_pages=9, page_size=16)
    with pytest.raises(ConfigError, match=r"reserved_decode_tokens is 129; allowed: at most 128, .*num_pages"):
        check_pool(DecodeOptions(reserved_decode_tokens=129), num_pages=9, page_size=16)
    with pytest.raises(ConfigError, match=r"allowed: at most 16, .*\(num_pages, kv_memory: 2 pages of 16 tokens\)"):
        check_pool(DecodeOptions(), num_pages=2, page_size=16)
