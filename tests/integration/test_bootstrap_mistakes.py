"""Something raises in a real bootstrap service: one client gets INTERNAL with an incident id, nobody else notices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bootstrap.answer import Answer
from bootstrap.servicers import nodes
from engine.core.messages import Abort, Grant, Reserve, RoomQuiesced, Submit
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey
from tests.helpers.front_cluster import FrontCluster, Reply, front_cluster, text_tokens
from tests.helpers.stub_node import StubNode


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FrontCluster]:
    async with front_cluster(tmp_path) as running:
        yield running


async def two(cluster: FrontCluster) -> tuple[StubNode, StubNode, dict[str, tuple[Reply, RoomKey]]]:
    """Two requests, bound and granted."""
    prefill, decode = await cluster.pair()
    replies = {name: cluster.generate(request_id=name) for name in ("bad", "good")}
    keys = {}
    for _ in replies:
        task = (await prefill.expect(Submit)).task
        await decode.expect(Reserve)
        await decode.report(Grant(task.key, (1,), 300))
        keys[task.request_id] = task.key
    await decode.beat()
    return prefill, decode, {name: (replies[name], keys[name]) for name in replies}


async def ends_with_an_incident(reply: Reply, caplog: pytest.LogCaptureFixture, message: str) -> None:
    error = await reply.error()
    assert error.code == "INTERNAL"
    logged = [getattr(record, "incident", None) for record in caplog.records if record.message == message]
    assert logged == [error.metadata["incident"]]
    assert error.metadata["incident"] in str(error)


async def finishes(cluster: FrontCluster, prefill: StubNode, decode: StubNode, reply: Reply, key: RoomKey) -> None:
    answer = text_tokens(cluster.text, key, "hello world", FinishReason.LENGTH)
    await prefill.publish(answer[:1])
    await decode.publish(answer[1:])
    assert (await reply.to_end()).text == "hello world"
    assert cluster.front.registry.get("decode") is not None, "its session goes on"


async def test_an_output_step_that_raises_for_one_of_its_tokens(
    cluster: FrontCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, requests = await two(cluster)
    (bad, bad_key), (good, good_key) = requests["bad"], requests["good"]
    real = cluster.front._token

    def token(attempt: Any, *rest: Any) -> None:
        if attempt.request.ask.request_id == "bad":
            raise RuntimeError("no such luck")
        real(attempt, *rest)

    monkeypatch.setattr(cluster.front, "_token", token)
    first = [text_tokens(cluster.text, key, "hello world")[0] for key in (bad_key, good_key)]
    await prefill.publish(first)
    await ends_with_an_incident(bad, caplog, "request broke")
    assert (await decode.expect(Abort)).key == bad_key
    await finishes(cluster, prefill, decode, good, good_key)


@pytest.mark.parametrize("read", ["step_output_from_wire", "report_from_wire"])
async def test_a_message_that_cannot_be_read(
    cluster: FrontCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, read: str
) -> None:
    """It ends the requests whose rooms it names."""
    prefill, decode, requests = await two(cluster)
    (bad, bad_key), (good, good_key) = requests["bad"], requests["good"]
    real = getattr(nodes, read)

    def broken(message: Any) -> Any:
        if str(bad_key.room) in str(message):
            raise ValueError("no such luck")
        return real(message)

    monkeypatch.setattr(nodes, read, broken)
    if read == "report_from_wire":
        await prefill.report(RoomQuiesced(bad_key))
    else:
        await prefill.publish(text_tokens(cluster.text, bad_key, "hello world")[:1])
    await ends_with_an_incident(bad, caplog, "request broke")
    await finishes(cluster, prefill, decode, good, good_key)


async def test_the_stream_raises(
    cluster: FrontCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, requests = await two(cluster)
    (bad, bad_key), (good, good_key) = requests["bad"], requests["good"]
    real = Answer.extend

    def extend(self: Answer, tokens: Any) -> Any:
        if tokens[0].key == bad_key:
            raise RuntimeError("no such luck")
        return real(self, tokens)

    monkeypatch.setattr(Answer, "extend", extend)
    await prefill.publish(text_tokens(cluster.text, bad_key, "hello world")[:1])
    await ends_with_an_incident(bad, caplog, "handler failed")
    assert (await decode.expect(Abort)).key == bad_key
    await finishes(cluster, prefill, decode, good, good_key)


async def test_the_clock_raises(
    cluster: FrontCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode, requests = await two(cluster)
    (bad, _), (good, good_key) = requests["bad"], requests["good"]
    real = cluster.front._outcomes._tick

    def tick(request: Any, *rest: Any) -> None:
        if request.ask.request_id == "bad":
            raise RuntimeError("no such luck")
        real(request, *rest)

    monkeypatch.setattr(cluster.front._outcomes, "_tick", tick)
    await ends_with_an_incident(bad, caplog, "request broke")
    await finishes(cluster, prefill, decode, good, good_key)


async def test_an_arrival_that_raises(
    cluster: FrontCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = await cluster.pair()

    def page_keys(*_: Any) -> None:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as broken:
        broken.setattr("bootstrap.attempts.page_keys", page_keys)
        await ends_with_an_incident(cluster.generate(), caplog, "request broke")
    reply = cluster.generate()
    await finishes(cluster, prefill, decode, reply, await cluster.bound(prefill, decode))
    assert cluster.front.registry.serving(Role.PREFILL)
