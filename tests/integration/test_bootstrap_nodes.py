"""Nodes and operators at a real bootstrap service: who is let in, who is gone, and what operators see and do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bootstrap.server import SERVICES
from bootstrap.servicers import nodes as nodes_module
from engine.core.journal import RoomRecord
from engine.core.messages import (
    Abort,
    CacheDelta,
    Drain,
    Drained,
    Explain,
    Explanation,
    Inspect,
    Inspection,
    NodeStats,
    PeerJoined,
    PeerLeft,
    Registration,
    RoomFailed,
    Submit,
)
from engine.core.page_keys import page_keys
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey
from kvrelay.v1 import bootstrap_pb2 as pb
from kvrelay.v1 import bootstrap_pb2_grpc, types_pb2
from kvrelay.v1.admin_pb2 import DrainRequest, ExplainRequest, ListNodesRequest, ListRequestsRequest, WatchRequest
from kvrelay.v1.generation_pb2 import GetClusterRequest
from rpc.errors import from_rpc_error
from rpc.session import NODE_METADATA
from rpc.wire import registration_to_wire
from tests.helpers.front_cluster import FrontCluster, assert_soon, front_cluster, text_tokens
from tests.helpers.front_door import FINGERPRINT, SERVING, registration
from tests.helpers.stub_node import StubNode
from tests.helpers.without_torch import run_without_torch


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FrontCluster]:
    async with front_cluster(tmp_path) as running:
        yield running


async def refusal(cluster: FrontCluster, **fields: Any) -> dict[str, str]:
    node = StubNode(cluster.channel, registration(Role.DECODE, "newcomer", **fields), SERVING, 1.0)
    with pytest.raises((grpc.RpcError, AssertionError)):
        await node.attach()
    error = from_rpc_error(await node.ended())
    assert error.code == "FAILED_PRECONDITION"
    with pytest.raises(grpc.RpcError) as asked:
        await may_attach(cluster, node.registration)
    assert from_rpc_error(asked.value).metadata == error.metadata, "who asks beforehand is told the same"
    return error.metadata


def may_attach(cluster: FrontCluster, wanted: Registration) -> Any:
    return bootstrap_pb2_grpc.BootstrapStub(cluster.channel).MayAttach(registration_to_wire(wanted))


# ---- joining and leaving ----


async def test_a_node_that_does_not_fit_is_told_which_field(cluster: FrontCluster) -> None:
    await cluster.join(Role.PREFILL)
    assert await refusal(cluster, page_size=8) == {"field": "layout.page_size", "value": "8", "expected": "4"}
    assert (await refusal(cluster, dtype="float16"))["field"] == "layout.dtype"
    assert await refusal(cluster, fingerprint="other") == {
        "field": "layout.fingerprint",
        "value": "other",
        "expected": FINGERPRINT,
    }
    assert (await refusal(cluster, model="gpt-none"))["field"] == "model"
    assert (await refusal(cluster, protocol_version=99))["field"] == "protocol_version"
    assert [node.node_id for node in cluster.front.registry.nodes()] == ["prefill"]


async def test_nothing_comes_of_asking_beforehand(cluster: FrontCluster) -> None:
    prefill, _ = await cluster.pair()
    for node_id in ("another", "prefill"):
        await may_attach(cluster, registration(Role.PREFILL, node_id, incarnation="2"))
    assert {node.node_id for node in cluster.front.registry.nodes()} == {"prefill", "decode"}
    await prefill.beat()


async def test_a_node_that_does_not_fit_ends_before_it_loads_anything(cluster: FrontCluster, tmp_path: Path) -> None:
    address = f"127.0.0.1:{cluster.server.port}"
    done = await asyncio.to_thread(run_without_torch, tmp_path, "decode", "--bootstrap", f"127.0.0.1:1,{address}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("error=\"model is 'weightless'; in this cluster: tiny\"")
    assert "CRITICAL kvrelay.node: refused by the bootstrap" in done.stderr


async def test_a_process_asks_for_each_of_its_ranks(cluster: FrontCluster, tmp_path: Path) -> None:
    await cluster.join(Role.DECODE, "x")
    flags = ("--bootstrap", f"127.0.0.1:{cluster.server.port}", "--dp-size", "2", "--node-id")
    for name, wrong in (("x" * 128, "identity.node_id is 'xx"), ("x", "model is 'weightless'")):
        directory = tmp_path / str(len(name))
        directory.mkdir()
        done = await asyncio.to_thread(run_without_torch, directory, "prefill", *flags, name)
        assert wrong in done.stderr.splitlines()[-1]


async def test_what_no_other_try_would_change_is_refused(cluster: FrontCluster) -> None:
    """As another status would have the node try again for ever."""
    assert (await refusal(cluster, page_size=0))["field"] == "layout.page_size"
    assert (await refusal(cluster, incarnation="2:1"))["field"] == "identity.incarnation"
    session: Any = bootstrap_pb2_grpc.BootstrapStub(cluster.channel).Attach()
    await session.write(pb.NodeReport(register=pb.Register(role=types_pb2.ROLE_DECODE)))
    assert await session.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_session_begins_with_register(cluster: FrontCluster) -> None:
    stub: Any = bootstrap_pb2_grpc.BootstrapStub(cluster.channel)
    for first in (pb.NodeReport(drained=True), None):
        call = stub.Attach()
        if first is not None:
            await call.write(first)
        await call.done_writing()
        with pytest.raises(grpc.RpcError) as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_of_a_node_that_does_not_read_nothing_is_read_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it is to be sent would grow without an end, as long as it says that it lives."""
    monkeypatch.setattr(nodes_module, "MAX_UNREAD", 3)
    link = nodes_module._StreamLink()
    for _ in range(4):
        link.acknowledge()
    waiting = asyncio.create_task(link.caught_up())
    await asyncio.sleep(0)
    assert not waiting.done()
    messages = link.messages()
    await anext(messages)  # a stream takes the next one when it has written this one
    await anext(messages)
    async with asyncio.timeout(5):
        await waiting
    assert link._messages.qsize() == 2


async def test_output_needs_a_session(cluster: FrontCluster) -> None:
    stub: Any = bootstrap_pb2_grpc.BootstrapStub(cluster.channel)
    call = stub.Publish(metadata=((NODE_METADATA, "nobody:1"),))
    await call.done_writing()
    with pytest.raises(grpc.RpcError) as refused:
        await call
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_peers_hear_of_each_other(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    assert (await prefill.expect(PeerJoined)).peer.identity == decode.registration.identity
    assert (await decode.expect(PeerJoined)).peer.identity == prefill.registration.identity
    await decode.leave()
    assert (await prefill.expect(PeerLeft)).identity == decode.registration.identity


async def test_a_restarted_node_replaces_its_former_self(cluster: FrontCluster) -> None:
    old, decode = await cluster.pair()
    await decode.expect(PeerJoined)
    new = await cluster.join(Role.PREFILL, incarnation="2")
    error = from_rpc_error(await old.ended())
    assert (error.code, error.reason) == ("FAILED_PRECONDITION", "NODE_REPLACED")
    assert (await decode.expect(PeerLeft)).identity == old.registration.identity
    assert (await decode.expect(PeerJoined)).peer.identity == new.registration.identity
    await old.leave()
    await new.beat()
    reply = cluster.generate()
    key = await cluster.bound(new, decode)
    await new.publish(text_tokens(cluster.text, key, "hello", FinishReason.LENGTH))
    assert (await reply.to_end()).text == "hello"


async def test_a_node_does_not_take_the_place_of_one_of_the_other_role(cluster: FrontCluster) -> None:
    prefill = await cluster.join(Role.PREFILL, "newcomer")
    assert (await refusal(cluster))["field"] == "identity.node_id"
    await prefill.beat()


async def test_a_silent_node_loses_its_lease(tmp_path: Path) -> None:
    async with front_cluster(tmp_path, lease_seconds=0.5) as cluster:
        node = StubNode(cluster.channel, registration(Role.PREFILL), SERVING, beat_s=3600)
        await node.attach()
        error = from_rpc_error(await node.ended())
        assert (error.code, error.reason) == ("UNAVAILABLE", "LEASE_EXPIRED")
        assert not len(cluster.front.registry)
        await node.leave()


async def test_no_node_of_a_role_is_unavailable_within_a_heartbeat(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    await cluster.bound(prefill, decode)
    await decode.leave()
    error = await reply.error()
    assert (error.code, error.reason, error.metadata["phase"]) == ("UNAVAILABLE", "NO_DECODE_NODE", "reserved")
    assert await prefill.expect(Abort)
    error = await cluster.generate().error()
    assert (error.code, error.metadata["phase"]) == ("UNAVAILABLE", "queued")
    assert error.retry_after is not None


async def test_a_report_nobody_can_read_does_not_end_the_session(cluster: FrontCluster) -> None:
    prefill, _ = await cluster.pair()
    await prefill.write(pb.NodeReport())
    await prefill.write(pb.NodeReport(grant=pb.Grant(room=pb.Room(room=7, epoch=3), pages=[1])))
    await prefill.beat()


async def test_a_message_that_is_none_ends_the_session(cluster: FrontCluster) -> None:
    channel: Any = cluster.channel
    session = channel.stream_stream("/kvrelay.v1.Bootstrap/Attach")()
    register = pb.NodeReport(register=registration_to_wire(registration(Role.PREFILL)))
    await session.write(register.SerializeToString())
    assert await session.read()
    await session.write(b"\xff\xff\xff")
    async with asyncio.timeout(10):
        assert await session.code() == grpc.StatusCode.INVALID_ARGUMENT
    await assert_soon(lambda: not len(cluster.front.registry), "the node has left")


async def test_a_node_that_names_more_cached_pages_than_it_has_is_gone(cluster: FrontCluster) -> None:
    node, decode = await cluster.pair()
    request = cluster.generate()
    await node.expect(Submit)
    await node.report(CacheDelta(page_keys(range(404), 4), ()))  # its pool has 100
    error = from_rpc_error(await node.ended())
    assert error.code == "INVALID_ARGUMENT"
    assert (error.metadata["field"], error.metadata["value"]) == ("cache_delta.added", "101")
    assert error.metadata["limit"] == "at most 100 with those added before, one a page"
    left = [decode.registration.identity.node_id]
    await assert_soon(lambda: [one.node_id for one in cluster.front.registry.nodes()] == left, "it has left")
    again = await cluster.join(Role.PREFILL)
    await again.report(CacheDelta(page_keys(range(400), 4), (), reset=True))
    await again.expect(Submit)
    await again.beat()
    assert len(cluster.front.registry.nodes()) == 2
    request.call.cancel()


async def test_prompts_go_where_their_prefix_is_cached(cluster: FrontCluster) -> None:
    await cluster.join(Role.DECODE)
    await cluster.join(Role.PREFILL, "cold")
    warm = await cluster.join(Role.PREFILL, "warm")
    prompt = list(range(40))
    await warm.report(CacheDelta(page_keys(prompt, 4), (), reset=True))
    await warm.beat()
    for _ in range(3):
        reply = cluster.generate(None, token_ids={"ids": prompt})
        task = (await warm.expect(Submit)).task
        assert task.token_ids == tuple(prompt)
        reply.call.cancel()
        await cluster.idle()


# ---- operators ----


async def answer_inspections(node: StubNode, problems: tuple[str, ...]) -> None:
    asked = await node.expect(Inspect)
    await node.report(Inspection(asked.inspection_id, NodeStats(pages_total=7, pages_free=7, serving=True), problems))


async def test_inspection_asks_the_nodes_themselves(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    listing, _, _ = await asyncio.gather(
        cluster.admin.ListNodes(ListNodesRequest(inspect=True)),
        answer_inspections(prefill, ()),
        answer_inspections(decode, ("a page has two owners",)),
    )
    found = {node.node_id: node for node in listing.nodes}
    assert list(found["decode"].problems) == ["a page has two owners"]
    assert not found["prefill"].problems
    assert found["prefill"].stats.pages_total == 7
    assert found["prefill"].role == types_pb2.ROLE_PREFILL
    assert found["prefill"].layout.page_size == 4


async def test_a_node_that_does_not_answer_an_inspection_is_a_problem(
    cluster: FrontCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.servicers.admin.ANSWER_TIMEOUT_S", 0.2)
    await cluster.pair()
    listing = await cluster.admin.ListNodes(ListNodesRequest(inspect=True))
    assert all("did not answer" in node.problems[0] for node in listing.nodes)


async def answer_explain(node: StubNode, *rooms: RoomRecord) -> None:
    asked = await node.expect(Explain)
    assert asked.request_id == "mine"
    await node.report(Explanation(asked.inspection_id, rooms))


def record(outcome: str) -> RoomRecord:
    return RoomRecord(RoomKey(7, 0), 12, 1e9, 2.0, outcome, (), (), (), 3, 0)


async def test_a_request_is_explained_by_the_nodes_that_know_it(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    other = await cluster.join(Role.PREFILL, "prefill-2")
    explained, _, _, _ = await asyncio.gather(
        cluster.admin.Explain(ExplainRequest(request_id="mine")),
        answer_explain(prefill, record("no luck"), record("finished")),
        answer_explain(decode, record("finished")),
        answer_explain(other),
    )
    assert {node.node_id: [room.outcome for room in node.rooms] for node in explained.nodes} == {
        "prefill": ["no luck", "finished"],
        "decode": ["finished"],
    }
    assert explained.nodes[0].role == types_pb2.ROLE_PREFILL
    assert explained.nodes[0].rooms[0].not_reached == 3
    assert not explained.silent


async def test_an_attempt_is_explained_by_the_front_door_whatever_the_nodes_know(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate(request_id="mine")
    key = await cluster.bound(prefill, decode)
    await decode.report(RoomFailed(key, "reserved", "no luck", retriable=False))
    await reply.error()
    explained, _, _ = await asyncio.gather(
        cluster.admin.Explain(ExplainRequest(request_id="mine")), answer_explain(prefill), answer_explain(decode)
    )
    assert not explained.nodes
    (attempt,) = explained.attempts
    assert (attempt.room, attempt.epoch) == (key.room, key.epoch)
    assert (attempt.prefill_node, attempt.decode_node) == ("prefill", "decode")
    assert (attempt.phase, attempt.outcome) == ("reserved", "decode node decode failed while reserved: no luck")
    assert abs(time.time() - attempt.started - attempt.seconds) < 60


async def test_a_request_that_no_node_knows(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    asked = cluster.admin.Explain(ExplainRequest(request_id="mine"))
    await asyncio.gather(answer_explain(prefill), answer_explain(decode))
    with pytest.raises(grpc.RpcError) as refused:
        await asked
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert str(from_rpc_error(refused.value)) == "nobody here knows of a request 'mine'"


async def test_nodes_that_explain_nothing_in_time_are_named(
    cluster: FrontCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.servicers.admin.ANSWER_TIMEOUT_S", 0.2)
    prefill, _ = await cluster.pair()
    with pytest.raises(grpc.RpcError) as refused:
        await cluster.admin.Explain(ExplainRequest(request_id="mine"))
    assert "prefill, decode did not answer within 0.2 s" in str(from_rpc_error(refused.value))
    await prefill.expect(Explain)
    explained, _ = await asyncio.gather(
        cluster.admin.Explain(ExplainRequest(request_id="mine")), answer_explain(prefill, record("finished"))
    )
    assert [node.node_id for node in explained.nodes] == ["prefill"]
    assert list(explained.silent) == ["decode"]


async def test_live_requests_are_listed_with_their_state(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate(request_id="mine", priority=3)
    key = await cluster.bound(prefill, decode)
    await prefill.publish(text_tokens(cluster.text, key, "hello"))
    while reply.started is None:
        await reply.read()
    (one,) = (await cluster.admin.ListRequests(ListRequestsRequest())).requests
    assert (one.request_id, one.state, one.output_tokens) == ("mine", "transferring", 1)
    assert (one.prefill_node, one.decode_node, one.attempts) == ("prefill", "decode", 1)
    cluster_state = await cluster.generation.GetCluster(GetClusterRequest())
    assert (cluster_state.live_requests, cluster_state.queued_requests) == (1, 0)
    assert cluster_state.serving
    reply.call.cancel()


async def test_draining_a_node(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    other = await cluster.join(Role.PREFILL, "prefill-2")
    await cluster.admin.Drain(DrainRequest(node_id="prefill"))
    assert (await prefill.expect(Drain)).deadline_s == math.inf
    second = cluster.generate("hello again")
    assert (await other.expect(Submit)).task.key != key
    assert await prefill.has_no(Abort)
    await prefill.publish(text_tokens(cluster.text, key, "hello", FinishReason.LENGTH))
    assert (await reply.to_end()).text == "hello", "what it had, it finished"
    await prefill.report(Drained())
    await prefill.leave()
    second.call.cancel()
    await assert_soon(lambda: cluster.front.registry.get("prefill") is None, "the node has left")


async def test_draining_nobody(cluster: FrontCluster) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await cluster.admin.Drain(DrainRequest(node_id="nobody"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    await cluster.join(Role.PREFILL)
    with pytest.raises(grpc.RpcError) as refused:
        await cluster.admin.Drain(DrainRequest(node_id="prefill", deadline_seconds=-1))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_watch_tells_of_changes_at_once(cluster: FrontCluster) -> None:
    watch = cluster.admin.Watch(WatchRequest(interval_seconds=60))
    assert not (await watch.read()).nodes
    await cluster.join(Role.PREFILL)
    while not any(node.stats.serving for node in (await watch.read()).nodes):
        pass
    await cluster.admin.Drain(DrainRequest(node_id="prefill"))
    await watch.read()
    watch.cancel()


async def test_watch_refuses_an_interval_out_of_range(cluster: FrontCluster) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await cluster.admin.Watch(WatchRequest(interval_seconds=0)).read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_health_is_liveness_and_readiness(cluster: FrontCluster) -> None:
    stub: Any = health_pb2_grpc.HealthStub(cluster.channel)

    async def serving(name: str) -> bool:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def until(wanted: bool) -> None:
        async with asyncio.timeout(10):
            while await serving(SERVICES[0]) is not wanted:
                await asyncio.sleep(0.01)

    assert [await serving(name) for name in ("", *SERVICES)] == [True, False, True, True]
    _, decode = await cluster.pair()
    await until(True)
    await decode.leave()
    await until(False)
    assert await serving("")
