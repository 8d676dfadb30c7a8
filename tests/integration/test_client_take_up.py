"""A client whose front door is lost: real bootstrap services, nodes played by the test, `cli.client` in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cli import client as client_module
from cli.client import Answer, Client, Retry
from engine.core.clock import ManualClock
from engine.core.errors import AlreadyExists, KVRelayError, NotFound, Overloaded, Unavailable
from engine.core.messages import Grant, Reserve, RoomFailed, Submit
from engine.core.sampling import FinishReason
from engine.core.types import RoomKey, TokenOutput
from kvrelay.v1.generation_pb2 import GenerateRequest
from kvrelay.v1.types_pb2 import FINISH_REASON_ABORT
from tests.helpers.cluster import free_port
from tests.helpers.front_cluster import PATIENCE_S, FrontCluster, assert_soon, front_cluster, text_tokens
from tests.helpers.stub_node import StubNode

TEXT = "hello, wörld: world"


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[tuple[FrontCluster, FrontCluster]]:
    async with front_cluster(tmp_path) as a, front_cluster(tmp_path) as b:
        yield a, b


async def cut(door: FrontCluster) -> None:
    """Its connections break, with no word about why."""
    await door.server._rpc.stop(0)


def address(door: FrontCluster) -> str:
    return f"127.0.0.1:{door.server.port}"


class Asking:
    """One answer that a client reads in a thread."""

    def __init__(self, *addresses: str, request_id: str = ""):
        self.shown: list[str] = []
        request = GenerateRequest(text="hello", request_id=request_id)
        request.stopping.max_new_tokens = 100

        def ask() -> Answer:
            with Client(addresses[0], others=addresses[1:]) as client:
                return client.answer(request, self.shown.append)

        self._task = asyncio.create_task(asyncio.to_thread(ask))

    async def shows(self, text: str) -> None:
        await assert_soon(lambda: self._task.done() or "".join(self.shown) == text, f"{text!r} is shown")
        assert "".join(self.shown) == text

    async def answer(self) -> Answer:
        async with asyncio.timeout(2 * PATIENCE_S):
            answer = await self._task
        assert answer.text == "".join(self.shown)
        return answer

    async def error(self) -> KVRelayError:
        with pytest.raises(KVRelayError) as caught:
            await self.answer()
        return caught.value


async def write(door: FrontCluster, nodes: tuple[StubNode, StubNode], first: int, end: int) -> Submit:
    """Play the next request and write its tokens from `first` up to `end`, the last of all with a reason to finish."""
    prefill, decode = nodes
    submit = await prefill.expect(Submit)
    await decode.expect(Reserve)
    await decode.report(Grant(submit.task.key, (1, 2), 300))
    assert submit.task.first_index == first
    tokens = [
        TokenOutput(submit.task.key, t.index, t.token_id, t.logprob, t.finish)
        for t in text_tokens(door.text, RoomKey(1, 0), TEXT, FinishReason.LENGTH)
    ]
    await prefill.publish(tokens[first : first + 1])
    await decode.publish(tokens[first + 1 : end])
    return submit


def text_of(door: FrontCluster, tokens: int) -> str:
    ids = door.text.encode(TEXT)[:tokens]
    return door.text.decode(ids).rstrip("\ufffd")


HALF = 4  # tokens: the last of them is the first of a character's two bytes


async def test_the_answer_goes_on_at_the_next_front_door(doors: tuple[FrontCluster, FrontCluster]) -> None:
    a, b = doors
    nodes_a, nodes_b = await a.pair(), await b.pair()
    asking = Asking(address(a), address(b))
    first = (await write(a, nodes_a, 0, HALF)).task
    assert a.text.decode(a.text.encode(TEXT)[:HALF]).endswith("\ufffd"), "cut within a character"
    await asking.shows(text_of(a, HALF))
    await cut(a)
    second = (await write(b, nodes_b, HALF, 100)).task
    answer = await asking.answer()
    assert answer.text == TEXT
    assert list(answer.token_ids) == list(a.text.encode(TEXT))
    assert first.request_id == second.request_id == answer.started.request_id
    assert first.sampling == second.sampling, "the seed is the client's"
    assert second.token_ids == (*first.token_ids, *a.text.encode(TEXT)[:HALF])
    assert answer.finished.usage.output_tokens == len(answer.token_ids)
    assert answer.finished.timing.attempts > 1


async def test_also_from_one_that_shuts_down(doors: tuple[FrontCluster, FrontCluster]) -> None:
    a, b = doors
    nodes_a, nodes_b = await a.pair(), await b.pair()
    asking = Asking(address(a), address(b))
    await write(a, nodes_a, 0, HALF)
    await asking.shows(text_of(a, HALF))
    hurry = asyncio.Event()
    hurry.set()
    await a.server.drain(hurry)
    await write(b, nodes_b, HALF, 100)
    assert (await asking.answer()).text == TEXT


async def test_a_front_door_that_cannot_be_reached_is_passed_over(doors: tuple[FrontCluster, FrontCluster]) -> None:
    _, b = doors
    nodes = await b.pair()
    nobody = f"127.0.0.1:{free_port()}"
    asking = Asking(nobody, address(b))
    await write(b, nodes, 0, 100)
    assert (await asking.answer()).text == TEXT
    with Client(nobody, others=[address(b)]) as client:
        assert (await asyncio.to_thread(client.model)).name == "tiny"
    both = await Asking(nobody, f"127.0.0.1:{free_port()}").error()
    assert both.code == "UNAVAILABLE"
    assert "cannot reach" in str(both)


async def test_the_same_front_door_come_back(tmp_path: Path) -> None:
    async with front_cluster(tmp_path) as before:
        nodes = await before.pair()
        port = before.server.port
        asking = Asking(address(before))
        await write(before, nodes, 0, HALF)
        await asking.shows(text_of(before, HALF))
        await cut(before)
    async with front_cluster(tmp_path, listen=f"127.0.0.1:{port}") as after:
        await write(after, await after.pair(), HALF, 100)
        assert (await asking.answer()).text == TEXT


async def test_a_stream_that_has_not_ended_yet_is_ended(doors: tuple[FrontCluster, FrontCluster]) -> None:
    a, b = doors
    nodes_a, nodes_b = await a.pair(), await b.pair()
    stale = b.generate(request_id="same")
    await nodes_b[0].expect(Submit)
    await nodes_b[1].expect(Reserve)
    asking = Asking(address(a), address(b), request_id="same")
    await write(a, nodes_a, 0, HALF)
    await asking.shows(text_of(a, HALF))
    assert len(b.front.requests) == 1
    await cut(a)
    await stale.to_end()
    assert stale.finished is not None
    assert stale.finished.reason == FINISH_REASON_ABORT
    await write(b, nodes_b, HALF, 100)
    assert (await asking.answer()).text == TEXT


async def test_another_model_of_the_same_name_does_not_go_on(doors: tuple[FrontCluster, FrontCluster]) -> None:
    a, b = doors
    nodes_a, nodes_b = await a.pair(), await b.pair()
    generation = b.server._generation
    generation._model = replace(generation._model, fingerprint="e" * 32)
    asking = Asking(address(a), address(b))
    await write(a, nodes_a, 0, HALF)
    await asking.shows(text_of(a, HALF))
    await cut(a)
    error = await asking.error()
    assert (error.code, error.reason) == ("NOT_FOUND", "OTHER_FINGERPRINT")
    assert await nodes_b[0].has_no(Submit)


async def test_what_was_answered_with_an_error_is_not_asked_elsewhere(doors: tuple[FrontCluster, FrontCluster]) -> None:
    a, b = doors
    (prefill, decode), nodes_b = await a.pair(), await b.pair()
    asking = Asking(address(a), address(b))
    for _ in range(3):
        key = (await prefill.expect(Submit)).task.key
        await decode.expect(Reserve)
        await decode.report(Grant(key, (1,), 300))
        await prefill.report(RoomFailed(key, "prefilling", "no memory"))
    error = await asking.error()
    assert (error.code, error.reason) == ("UNAVAILABLE", "ROOM_FAILED")
    assert await nodes_b[0].has_no(Submit)


async def test_no_front_door_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "PATIENCE_S", 0.5)
    async with front_cluster(tmp_path) as door:
        nodes = await door.pair()
        asking = Asking(address(door))
        await write(door, nodes, 0, HALF)
        await asking.shows(text_of(door, HALF))
        await cut(door)
        assert (await asking.error()).code == "UNAVAILABLE"


# ---- when to try again ----

UNREACHABLE = Unavailable("cannot reach it", reason=client_module.UNREACHABLE)
BROKE = Unavailable("Socket closed")
BUSY = Overloaded("full", reason="QUEUE_FULL")
NO_NODE = Unavailable("no node", reason="NO_DECODE_NODE", retry_after=1.0)


def test_unreachable_front_doors_are_tried_once_each() -> None:
    retry = Retry(3, ManualClock())
    assert [retry.after(UNREACHABLE) for _ in range(3)] == [0.0, 0.0, None]


def test_a_lost_one_may_come_back_until_patience_ends() -> None:
    clock = ManualClock()
    retry = Retry(2, clock)
    delays = [retry.after(BROKE) or 0.0]
    while (delay := retry.after(UNREACHABLE)) is not None:
        delays.append(delay)
        clock.advance(delay)
    assert delays[:8] == [0.0, 0.1, 0.0, 0.2, 0.0, 0.4, 0.0, 0.8]
    assert max(delays) == client_module.MAX_BACKOFF_S
    assert client_module.PATIENCE_S <= clock() < client_module.PATIENCE_S + client_module.MAX_BACKOFF_S


def test_every_word_of_a_front_door_renews_patience() -> None:
    clock = ManualClock()
    retry = Retry(1, clock)
    for _ in range(5):
        assert retry.after(BROKE) == client_module.FIRST_BACKOFF_S
        clock.advance(client_module.PATIENCE_S - 0.1)
        retry.progress()
        clock.advance(1000)


@pytest.mark.parametrize("error", [AlreadyExists("live"), BUSY, NO_NODE])
def test_what_may_soon_be_otherwise_is_final_until_a_front_door_was_lost(error: KVRelayError) -> None:
    assert Retry(2, ManualClock()).after(error) is None
    retry = Retry(2, ManualClock())
    assert retry.after(BROKE) is not None
    assert retry.after(error) is not None


@pytest.mark.parametrize(
    "error",
    [NotFound("no such model"), Unavailable("lost", reason="NODE_LOST"), KVRelayError("incident")],
)
def test_an_error_that_another_try_would_bring_again_is_final(error: KVRelayError) -> None:
    retry = Retry(2, ManualClock())
    assert retry.after(BROKE) is not None
    assert retry.after(error) is None
