"""A link that breaks between two of three nodes, seen by clients and operators of a real bootstrap service."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bootstrap.pairs import FAILURES
from engine.core.messages import Abort, Grant, Reserve, RoomFailed, RoomQuiesced, Submit
from engine.core.metrics import FrontDoorMetric
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey
from kvrelay.v1.admin_pb2 import ListNodesRequest
from tests.helpers.front_cluster import FrontCluster, assert_soon, front_cluster, text_tokens
from tests.helpers.front_door import SERVING
from tests.helpers.stub_node import StubNode


async def bind(cluster: FrontCluster, prefill: StubNode, decode: StubNode) -> RoomKey:
    key = (await prefill.expect(Submit)).task.key
    assert (await decode.expect(Reserve)).reservation.key == key
    await decode.report(Grant(key, (1,), 300))
    return key


async def set_aside(cluster: FrontCluster) -> dict[str, list[str]]:
    listing = await cluster.admin.ListNodes(ListNodesRequest())
    return {node.node_id: list(node.set_aside) for node in listing.nodes if node.set_aside}


async def test_a_broken_link_is_not_used_and_both_its_ends_are(tmp_path: Path) -> None:
    async with front_cluster(tmp_path) as cluster:
        prefill = await cluster.join(Role.PREFILL)
        near = await cluster.join(Role.DECODE, "near", replace(SERVING, head_room=400))  # most head-room: it is asked
        far = await cluster.join(Role.DECODE, "far", replace(SERVING, head_room=200))
        for _ in range(FAILURES):
            await near.beat()  # with its head-room again
            reply = cluster.generate()
            key = await bind(cluster, prefill, near)
            assert not await set_aside(cluster)
            await prefill.report(RoomFailed(key, "transferring", "write failed"))
            assert (await near.expect(Abort)).key == key
            await prefill.report(RoomQuiesced(key))
            key = await bind(cluster, prefill, far)
            answer = text_tokens(cluster.text, key, "hello world", FinishReason.LENGTH)
            await prefill.publish(answer[:1])
            await far.publish(answer[1:])
            assert (await reply.to_end()).text == "hello world"
        assert await set_aside(cluster) == {"prefill": ["near"], "near": ["prefill"]}
        metrics = cluster.server.metrics.registry
        await assert_soon(
            lambda: metrics.get_sample_value(FrontDoorMetric.SET_ASIDE.metric) == 1, "the gauge shows the pair"
        )
        await near.beat()
        last = cluster.generate()
        await bind(cluster, prefill, far)
        last.call.cancel()

        other = await cluster.join(Role.PREFILL, "other")  # has a link of its own to `near`
        await prefill.leave()
        await assert_soon(lambda: cluster.front.registry.get("prefill") is None, "it has left")
        await near.beat()
        reply = cluster.generate()
        await bind(cluster, other, near)
        reply.call.cancel()
        assert not await set_aside(cluster), "it left"
