"""Answers through a real bootstrap service over gRPC, with nodes played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.core.messages import (
    Abort,
    AdmitReport,
    DecodeReport,
    Grant,
    Granted,
    NodeStats,
    PeerJoined,
    PrefillReport,
    RelayReport,
    Reserve,
    RoomFailed,
    RoomFenced,
    RoomQuiesced,
    Submit,
    WriterQuiesced,
)
from engine.core.sampling import FinishReason
from engine.core.types import Role, TokenOutput
from kvrelay.v1.generation_pb2 import AbortRequest, GenerateRequest
from kvrelay.v1.generation_pb2_grpc import GenerationStub
from kvrelay.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.helpers.front_cluster import FrontCluster, assert_soon, front_cluster, text_tokens
from tests.helpers.front_door import SERVING


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FrontCluster]:
    async with front_cluster(tmp_path) as running:
        yield running


async def test_an_answer_from_two_nodes(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate("hello", response={"logprobs": True}, stopping={"max_new_tokens": 8})
    key = await cluster.bound(prefill, decode)
    granted = await prefill.expect(Granted)
    assert (granted.key, granted.peer, granted.pages) == (key, decode.registration.identity, (1, 2))
    answer = text_tokens(cluster.text, key, "hello, wörld", FinishReason.LENGTH)
    await prefill.publish(admitted=(AdmitReport(key, cached_tokens=1),))
    await reply.read()
    assert reply.started is not None, "before there is a token"
    await prefill.publish(answer[:1], prefilled=(PrefillReport(key, chunks=1, prefill_wait=0.25, prefill=0.5),))
    await prefill.publish(relayed=(RelayReport(key, 4096, 0.125),))
    await decode.publish(answer[1:2], decoded=(DecodeReport(key, handoff=0.0625),))
    for token in answer[2:-1]:
        await decode.publish([token])
    await assert_soon(lambda: all(r.timing.relay for r in cluster.front.requests.values()), "the relay is reported")
    await decode.publish(answer[-1:])
    await reply.to_end()
    assert (reply.started.prompt_tokens, reply.started.cached_tokens) == (1, 1)
    assert reply.text == "hello, wörld"
    assert reply.token_ids == [token.token_id for token in answer]
    assert reply.logprobs == [-0.5] * len(answer)
    finished = reply.finished
    assert finished is not None
    assert finished.reason == FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (1, len(answer))
    timing = finished.timing
    assert (timing.prefill_wait, timing.prefill, timing.handoff) == (0.25, 0.5, 0.0625)
    assert 0 < timing.decode < timing.total
    assert (timing.relayed_bytes, timing.relay, timing.attempts) == (4096, 0.125, 1)
    assert (timing.prefill_node, timing.decode_node) == ("prefill", "decode")
    assert 0 < timing.first_token <= timing.total


async def test_the_decode_nodes_tokens_may_come_first(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    answer = text_tokens(cluster.text, key, "hello world", FinishReason.LENGTH)
    await decode.publish(answer[1:])
    await decode.beat()
    await prefill.publish(answer[:1])
    await reply.to_end()
    assert reply.text == "hello world"


async def test_what_is_ready_together_is_sent_together(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    answer = text_tokens(cluster.text, key, "hello world, world", FinishReason.LENGTH)
    await decode.publish(answer[1:])
    await decode.beat()
    await prefill.publish(answer[:1])
    await reply.to_end()
    assert len(answer) > 5
    assert reply.deltas == 1


async def test_duplicates_are_dropped(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    answer = text_tokens(cluster.text, key, "hello world", FinishReason.LENGTH)
    for _ in range(2):
        await prefill.publish(answer[:1])
        await decode.publish([*answer[1:3], *answer[1:3]])
    await decode.publish(answer[3:])
    await reply.to_end()
    assert reply.text == "hello world"


async def test_a_stop_string_across_deltas_stops_both_nodes(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate(stopping={"stop": ["o wor"], "max_new_tokens": 50})
    key = await cluster.bound(prefill, decode)
    answer = text_tokens(cluster.text, key, "hello world")
    await prefill.publish(answer[:1])
    for token in answer[1:]:
        await decode.publish([token])
    await reply.to_end()
    assert reply.text == "hell"
    assert reply.finished is not None
    assert (reply.finished.reason, reply.finished.stop) == (FINISH_REASON_STOP, "o wor")
    assert (await prefill.expect(Abort)).key == (await decode.expect(Abort)).key == key


async def test_an_end_of_sequence_is_named_and_not_shown(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    hello = text_tokens(cluster.text, key, "hello")
    end = TokenOutput(key, 1, 261, -0.1, FinishReason.STOP, matched_token=261)
    await prefill.publish(hello)
    await decode.publish([end])
    await reply.to_end()
    assert reply.text == "hello"
    assert reply.finished is not None
    assert (reply.finished.reason, reply.finished.stop_token) == (FINISH_REASON_STOP, 261)


async def test_cancelling_a_call_aborts_it_on_both_nodes(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    await prefill.publish(text_tokens(cluster.text, key, "hello"))
    await reply.read()
    reply.call.cancel()
    assert (await prefill.expect(Abort)).key == (await decode.expect(Abort)).key == key
    await cluster.idle()


async def test_the_clients_deadline_reaches_both_nodes(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate(timeout=0.3)
    key = await cluster.bound(prefill, decode)
    assert (await reply.error()).code == "DEADLINE_EXCEEDED"
    assert (await prefill.expect(Abort)).key == (await decode.expect(Abort)).key == key
    await cluster.idle()


async def test_abort_ends_the_stream_with_what_there_is(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate(request_id="mine")
    key = await cluster.bound(prefill, decode)
    await prefill.publish(text_tokens(cluster.text, key, "hello"))
    await reply.read()
    await cluster.generation.Abort(AbortRequest(request_id="mine"))
    await reply.to_end()
    assert reply.text == "hello"
    assert reply.finished is not None
    assert reply.finished.reason == FINISH_REASON_ABORT
    assert (await prefill.expect(Abort)).key == (await decode.expect(Abort)).key == key


async def test_abort_while_queued_still_says_what_was_started(cluster: FrontCluster) -> None:
    await cluster.join(Role.PREFILL)
    full = NodeStats(pages_total=100, pages_held=100, running=1, serving=True)
    await cluster.join(Role.DECODE, stats=full)
    reply = cluster.generate(request_id="mine")
    await assert_soon(lambda: (None, "mine") in cluster.front.requests, "the request is live")
    await cluster.generation.Abort(AbortRequest(request_id="mine"))
    await reply.to_end()
    assert reply.started is not None
    assert reply.finished is not None
    assert reply.finished.reason == FINISH_REASON_ABORT


async def test_a_prefill_node_lost_before_token_0(cluster: FrontCluster) -> None:
    first, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(first, decode)
    second = await cluster.join(Role.PREFILL, "prefill-2")
    await first.leave()
    assert (await decode.expect(Abort)).key == key
    new = await cluster.bound(second, decode)
    assert new.epoch == key.epoch + 1
    await second.publish(text_tokens(cluster.text, new, "hello", FinishReason.LENGTH))
    await reply.to_end()
    assert reply.text == "hello"
    assert reply.finished is not None
    assert reply.finished.timing.attempts == 2


async def test_a_decode_node_lost_in_mid_answer(cluster: FrontCluster) -> None:
    prefill, first = await cluster.pair()
    reply = cluster.generate("hello")
    key = await cluster.bound(prefill, first)
    whole = "hello, h\u00f6llo world"
    answer = text_tokens(cluster.text, key, whole, FinishReason.LENGTH)
    await prefill.publish(answer[:1])
    await first.publish(answer[1:4])
    while len(reply.indices) < 4:
        await reply.read()
    second = await cluster.join(Role.DECODE, "decode-2")
    await first.leave()
    assert (await prefill.expect(Abort)).key == key
    task = (await prefill.expect(Submit)).task
    assert task.token_ids == (*cluster.text.encode("hello"), *(token.token_id for token in answer[:4]))
    assert task.first_index == 4
    reservation = (await second.expect(Reserve)).reservation
    assert (reservation.key, reservation.first_index) == (task.key, 4)
    await second.report(Grant(task.key, (5,), 300))
    rest = text_tokens(cluster.text, task.key, whole, FinishReason.LENGTH)[4:]
    await prefill.publish(rest[:1])
    await second.publish(rest[1:])
    await reply.to_end()
    assert reply.text == whole
    assert reply.finished is not None
    assert reply.finished.timing.decode_node == "decode-2"


async def test_a_failed_room_is_tried_on_other_nodes(cluster: FrontCluster) -> None:
    first, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(first, decode)
    second = await cluster.join(Role.PREFILL, "prefill-2")
    await first.report(RoomFailed(key, "transferring", "write failed"))
    new = await cluster.bound(second, decode)
    await second.publish(text_tokens(cluster.text, new, "hello", FinishReason.LENGTH))
    assert (await reply.to_end()).text == "hello"


async def test_the_writers_last_word_reaches_the_decode_node_after_the_end(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    await prefill.expect(Granted)
    reply.call.cancel()
    await decode.expect(Abort)
    await cluster.idle()
    assert await decode.has_no(WriterQuiesced)
    await prefill.report(RoomQuiesced(key))
    assert (await decode.expect(WriterQuiesced)).key == key


async def test_a_writer_whose_session_broke_is_asked_again(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    await prefill.expect(Granted)
    await decode.expect(PeerJoined)
    await prefill.leave()
    await decode.expect(Abort)
    again = await cluster.join(Role.PREFILL)
    identity = (await decode.expect(PeerJoined)).peer.identity
    assert identity == prefill.registration.identity
    await decode.report(RoomFenced(key, identity))
    assert (await again.expect(Abort)).key == key
    await again.report(RoomQuiesced(key))
    assert (await decode.expect(WriterQuiesced)).key == key
    reply.call.cancel()


async def test_a_room_no_other_node_can_save_ends_with_the_nodes_status(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    await decode.report(RoomFailed(key, "decoding", "out of pages", retriable=False, code="RESOURCE_EXHAUSTED"))
    error = await reply.error()
    assert (error.code, error.reason, error.metadata["phase"]) == ("RESOURCE_EXHAUSTED", "ROOM_FAILED", "decoding")


async def test_many_answers_at_once(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    replies = {f"r{i}": cluster.generate(f"hello {i}", request_id=f"r{i}") for i in range(20)}

    async def play() -> None:
        for _ in replies:
            task = (await prefill.expect(Submit)).task
            await decode.report(Grant(task.key, (1,), 300))
            answer = text_tokens(cluster.text, task.key, f"answer to {task.request_id}", FinishReason.LENGTH)
            await decode.publish(answer[1:])
            await prefill.publish(answer[:1])

    await asyncio.gather(play(), *(reply.to_end() for reply in replies.values()))
    assert {name: reply.text for name, reply in replies.items()} == {name: f"answer to {name}" for name in replies}


async def test_a_request_waits_until_a_decode_node_has_room(cluster: FrontCluster) -> None:
    prefill = await cluster.join(Role.PREFILL)
    decode = await cluster.join(Role.DECODE, stats=NodeStats(pages_total=100, pages_held=100, running=1, serving=True))
    reply = cluster.generate()
    await prefill.expect(Submit)
    assert await decode.has_no(Reserve)
    decode.stats = SERVING
    reservation = (await decode.expect(Reserve)).reservation
    await decode.report(Grant(reservation.key, (1,), 300))
    await prefill.publish(text_tokens(cluster.text, reservation.key, "hello", FinishReason.LENGTH))
    assert (await reply.to_end()).text == "hello"


async def test_clients_that_vanish_in_the_middle_leave_no_error_in_the_log(
    cluster: FrontCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """They read nothing more, so that a message is on its way to each of them when the connection goes."""
    prefill, decode = await cluster.pair()
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{cluster.server.port}", options=options)
    stub: Any = GenerationStub(channel)
    calls = []  # kept, as a call that nobody holds is cancelled
    for _ in range(8):
        call = stub.Generate(GenerateRequest(text="x", stopping={"max_new_tokens": 390}, response={"logprobs": True}))
        calls.append(call)
        key = await cluster.bound(prefill, decode)
        answer = text_tokens(cluster.text, key, "<|assistant|>" * 389)
        await prefill.publish(answer[:1])
        assert (await call.read()).HasField("started")
        for start in range(1, len(answer), 4):
            await decode.publish(answer[start : start + 4])
            await decode.beat()
    await channel.close(None)
    await cluster.idle()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("grpc")] == []
