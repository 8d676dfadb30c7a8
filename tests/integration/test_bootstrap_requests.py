"""What clients may get wrong at a real bootstrap service, and how it stops."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from bootstrap.config import BootstrapConfig
from bootstrap.server import serve
from bootstrap.text import TextModel
from engine.core.messages import Grant, Granted, NodeStats, Submit
from engine.core.sampling import FinishReason
from engine.core.types import Role
from kvrelay.v1.generation_pb2 import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    GetModelRequest,
    TokenizeRequest,
)
from kvrelay.v1.generation_pb2_grpc import GenerationStub
from rpc.errors import from_rpc_error
from tests.helpers.cluster import free_port
from tests.helpers.front_cluster import FrontCluster, Reply, assert_soon, front_cluster, text_tokens
from tests.helpers.front_door import SERVING, registration
from tests.helpers.stub_node import StubNode
from tests.helpers.tiny_tokenizer import EOS, prepared_model, write_model

FULL = NodeStats(pages_total=100, pages_held=100, running=1, serving=True)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FrontCluster]:
    """With one node of each role: 100 pages of 4 tokens, 8 tokens reserved; a context of 512 tokens."""
    async with front_cluster(tmp_path, max_queue=2) as running:
        await running.pair()
        yield running


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("prompt", {}),
        ("text", {"text": ""}),
        ("token_ids", {"token_ids": {}}),
        ("token_ids", {"token_ids": {"ids": [5, 264]}}),
        ("chat.messages", {"chat": {}}),
        ("prompt tokens", {"token_ids": {"ids": [1] * 393}}),
        ("prompt tokens", {"token_ids": {"ids": [1] * 512}}),
        ("request_id", {"text": "x", "request_id": "x" * 129}),
        ("model", {"text": "x", "model": "x" * 257}),
        ("routing_key", {"text": "x", "routing_key": "x" * 257}),
        ("cache_salt", {"text": "x", "cache_salt": "x" * 257}),
        ("ttft_target_seconds", {"text": "x", "ttft_target_seconds": 0}),
        ("ttft_target_seconds", {"text": "x", "ttft_target_seconds": -1}),
        ("ttft_target_seconds", {"text": "x", "ttft_target_seconds": float("inf")}),
        ("ttft_target_seconds", {"text": "x", "ttft_target_seconds": float("nan")}),
        ("sampling.temperature", {"text": "x", "sampling": {"temperature": -0.1}}),
        ("sampling.temperature", {"text": "x", "sampling": {"temperature": float("nan")}}),
        ("sampling.top_p", {"text": "x", "sampling": {"top_p": 0}}),
        ("sampling.top_k", {"text": "x", "sampling": {"top_k": 2**20 + 1}}),
        ("sampling.min_p", {"text": "x", "sampling": {"min_p": 1.1}}),
        ("sampling.repetition_penalty", {"text": "x", "sampling": {"repetition_penalty": 0}}),
        ("sampling.presence_penalty", {"text": "x", "sampling": {"presence_penalty": 2.1}}),
        ("sampling.frequency_penalty", {"text": "x", "sampling": {"frequency_penalty": -2.1}}),
        ("stopping.max_new_tokens", {"text": "x", "stopping": {"max_new_tokens": 0}}),
        ("stopping.max_new_tokens", {"text": "x", "stopping": {"max_new_tokens": 512}}),
        ("stopping.max_new_tokens", {"token_ids": {"ids": [1] * 100}, "stopping": {"max_new_tokens": 301}}),
        ("stopping.min_new_tokens", {"text": "x", "stopping": {"max_new_tokens": 3, "min_new_tokens": 4}}),
        ("stopping.stop", {"text": "x", "stopping": {"stop": ["a", ""]}}),
        ("stopping.stop", {"text": "x", "stopping": {"stop": ["a" * 257]}}),
        ("stopping.stop", {"text": "x", "stopping": {"stop": ["a"] * 17}}),
        ("stopping.stop_token_ids", {"text": "x", "stopping": {"stop_token_ids": [264]}}),
        ("stopping.stop_token_ids", {"text": "x", "stopping": {"stop_token_ids": [1] * 65}}),
    ],
)
async def test_what_is_wrong_is_named(cluster: FrontCluster, field: str, request_fields: dict[str, Any]) -> None:
    error = await cluster.generate(None, **{"sampling": {}} | request_fields).error()
    assert (error.code, error.metadata["field"]) == ("INVALID_ARGUMENT", field)
    assert error.metadata["limit"]
    assert not cluster.front.requests


async def test_limits_are_inclusive(cluster: FrontCluster) -> None:
    fields: dict[str, Any] = {
        "request_id": "x" * 128,
        "routing_key": "x" * 256,
        "cache_salt": "x" * 256,
        "ttft_target_seconds": 1e-9,
        "sampling": {"temperature": 100, "top_p": 1, "top_k": 2**20, "min_p": 1, "repetition_penalty": 2},
        "stopping": {"max_new_tokens": 8, "min_new_tokens": 8, "stop": ["y" * 256] * 16, "stop_token_ids": [263] * 64},
        "token_ids": {"ids": [263] * 392},
    }
    reply = cluster.generate(None, **fields)
    prefill = cluster.nodes[0]
    task = (await prefill.expect(Submit)).task
    assert (task.routing_key, task.extra_key) == ("x" * 256, "x" * 256)
    assert task.stopping.min_new_tokens == 8
    assert task.ttft_target == 1e-9
    reply.call.cancel()


async def test_defaults_are_filled_in(cluster: FrontCluster) -> None:
    prefill = cluster.nodes[0]
    replies = [cluster.generate("hello", sampling={}) for _ in range(2)]
    tasks = [(await prefill.expect(Submit)).task for _ in replies]
    assert tasks[0].sampling.temperature == 1.0
    assert tasks[0].ttft_target is None, "the node's own"
    assert tasks[0].sampling.seed != tasks[1].sampling.seed
    assert tasks[0].stopping.max_new_tokens == 399, "512 by default, cut to what the decode pool holds after the prompt"
    assert tasks[0].stopping.eos_token_ids == (261,)
    assert tasks[0].priority is None
    assert tasks[0].request_id != tasks[1].request_id
    for reply in replies:
        reply.call.cancel()


async def test_an_unknown_model(cluster: FrontCluster) -> None:
    error = await cluster.generate("hello", model="gpt-none").error()
    assert (error.code, error.metadata) == ("NOT_FOUND", {"model": "gpt-none", "served": "tiny"})


async def test_a_live_id_cannot_be_used_twice(cluster: FrontCluster) -> None:
    reply = cluster.generate("hello", request_id="mine")
    await cluster.nodes[0].expect(Submit)
    error = await cluster.generate("hello", request_id="mine").error()
    assert (error.code, error.metadata) == ("ALREADY_EXISTS", {"request_id": "mine"})
    reply.call.cancel()


async def test_aborting_what_is_not_live(cluster: FrontCluster) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await cluster.generation.Abort(AbortRequest(request_id="x" * 1_000_000))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_full_queue_says_when_to_come_back(cluster: FrontCluster) -> None:
    prefill, decode = cluster.nodes
    decode.stats = FULL
    await decode.beat()
    replies = [cluster.generate() for _ in range(2)]
    for _ in replies:
        await prefill.expect(Submit)
    error = await cluster.generate().error()
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert error.retry_after is not None
    assert 'kvrelay_requests_refused_total{reason="QUEUE_FULL"} 1.0' in cluster.server.metrics.expose()
    for reply in replies:
        reply.call.cancel()


async def test_an_oversized_message(cluster: FrontCluster) -> None:
    error = await cluster.generate("x" * 10_000_000).error()
    assert error.code == "RESOURCE_EXHAUSTED"


async def test_a_deadline_already_past(cluster: FrontCluster) -> None:
    assert (await cluster.generate(timeout=0).error()).code == "DEADLINE_EXCEEDED"


async def test_a_deadline_that_passes_is_counted_as_one(cluster: FrontCluster) -> None:
    assert (await cluster.generate(timeout=0.2).error()).code == "DEADLINE_EXCEEDED"
    ended = 'kvrelay_requests_finished_total{outcome="deadline_exceeded"} 1.0'
    await assert_soon(lambda: ended in cluster.server.metrics.expose(), "it is counted")


async def test_text_that_is_no_utf8(cluster: FrontCluster) -> None:
    channel: Any = cluster.channel
    raw = channel.unary_stream("/kvrelay.v1.Generation/Generate")
    with pytest.raises(grpc.RpcError) as refused:
        await raw(b"\x1a\x02\xff\xfe").read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


CHAT_TOO_LONG: dict[str, Any] = {"messages": [{}] * 1025}


@pytest.mark.parametrize(
    ("field", "prompt"),
    [
        ("text", {"text": "hello " * 5000}),
        ("chat.messages", {"chat": CHAT_TOO_LONG}),
        ("chat.messages", {"chat": {"messages": [{"content": "hello " * 5000}]}}),
    ],
)
async def test_what_cannot_fit_is_refused_wherever_it_is_sent(
    cluster: FrontCluster, field: str, prompt: dict[str, Any]
) -> None:
    error = await cluster.generate(None, **prompt).error()
    assert (error.code, error.metadata["field"]) == ("INVALID_ARGUMENT", field)
    with pytest.raises(grpc.RpcError) as refused:
        await cluster.generation.Tokenize(TokenizeRequest(**prompt))
    assert from_rpc_error(refused.value).metadata["field"] == field


async def test_more_ids_than_the_context_holds_are_not_read(cluster: FrontCluster) -> None:
    """None of them is a token, which would be said first if they were looked at."""
    ids = [999] * 513
    error = await cluster.generate(None, token_ids={"ids": ids}).error()
    assert error.metadata["field"] == "prompt tokens"
    with pytest.raises(grpc.RpcError, match="token_ids is 513"):
        await cluster.generation.Detokenize(DetokenizeRequest(token_ids=ids))


async def test_text_both_ways(cluster: FrontCluster) -> None:
    reply = await cluster.generation.Tokenize(TokenizeRequest(text="hello wörld"))
    assert reply.text == "hello wörld"
    back = await cluster.generation.Detokenize(DetokenizeRequest(token_ids=reply.token_ids))
    assert back.text == "hello wörld"
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    reply = await cluster.generation.Tokenize(TokenizeRequest(chat=chat))
    assert reply.text == f"<|user|>hello{EOS}<|assistant|>"
    plain = await cluster.generation.Detokenize(DetokenizeRequest(token_ids=reply.token_ids, skip_special_tokens=True))
    assert plain.text == "hello"
    for request in (TokenizeRequest(), TokenizeRequest(chat={})):
        with pytest.raises(grpc.RpcError) as refused:
            await cluster.generation.Tokenize(request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as refused:
        await cluster.generation.Detokenize(DetokenizeRequest(token_ids=[264]))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_chat_prompt(cluster: FrontCluster) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    reply = cluster.generate(None, chat=chat)
    task = (await cluster.nodes[0].expect(Submit)).task
    assert cluster.text.decode(task.token_ids) == f"<|user|>hello{EOS}<|assistant|>"
    reply.call.cancel()


async def test_what_is_served(cluster: FrontCluster) -> None:
    model = await cluster.generation.GetModel(GetModelRequest())
    assert (model.name, model.vocab_size, model.max_context, model.page_size) == ("tiny", 264, 512, 4)
    assert model.chat_template
    assert list(model.eos_token_ids) == [261]


async def test_what_prometheus_reads(cluster: FrontCluster) -> None:
    prefill, decode = cluster.nodes
    reply = cluster.generate()
    key = await cluster.bound(prefill, decode)
    answer = text_tokens(cluster.text, key, "hello world", FinishReason.LENGTH)
    await prefill.publish(answer[:1])
    await decode.publish(answer[1:])
    await reply.to_end()
    await prefill.publish(answer[:1])
    await prefill.beat()
    text = cluster.server.metrics.expose()
    for line in (
        'kvrelay_requests_finished_total{outcome="length"} 1.0',
        "kvrelay_time_to_first_token_seconds_count 1.0",
        "kvrelay_time_per_output_token_seconds_count 1.0",
        'kvrelay_phase_seconds_count{phase="queue"} 1.0',
        'kvrelay_late_messages_total{kind="token"} 1.0',
        'kvrelay_node_serving{node="decode",role="decode"} 1.0',
    ):
        assert line in text


# ---- the process ----


async def test_a_signal_drains(tmp_path: Path) -> None:
    """SIGTERM: nothing new is taken in, what is live ends in its own time, then the process is done."""
    port = free_port()
    config = BootstrapConfig(listen=f"127.0.0.1:{port}", heartbeat_seconds=0.2)
    running = asyncio.create_task(serve(config, prepared_model(tmp_path), TextModel.load(write_model(tmp_path))))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)])
    async with asyncio.timeout(10):
        await channel.channel_ready()
    nodes = [StubNode(channel, registration(role), SERVING, 0.2) for role in Role.PREFILL.pools]
    for node in nodes:
        await node.attach()
    stub: Any = GenerationStub(channel)
    live = Reply(stub.Generate(GenerateRequest(text="hello")))
    task = (await nodes[0].expect(Submit)).task
    await nodes[1].report(Grant(task.key, (1,), 300))
    await nodes[0].expect(Granted)
    signal.raise_signal(signal.SIGTERM)
    while True:
        error = await Reply(stub.Generate(GenerateRequest(text="hello"), timeout=0.5)).error()
        if error.code == "UNAVAILABLE":
            break
    assert error.reason == "DRAINING"
    await nodes[0].publish(text_tokens(TextModel.load(tmp_path), task.key, "hello", FinishReason.LENGTH))
    assert (await live.to_end()).text == "hello"
    async with asyncio.timeout(10):
        await running
    for node in nodes:
        await node.leave()
    await channel.close(None)
