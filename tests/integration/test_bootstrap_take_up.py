"""A request that another stream has answered in part, taken up by a real bootstrap service. Nodes are played."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import AlreadyExists, InvalidField
from engine.core.messages import AdmitReport, Grant, Reserve, Submit
from engine.core.metrics import FrontDoorMetric
from engine.core.sampling import FinishReason
from engine.core.types import Role, RoomKey, TokenOutput
from kvrelay.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.helpers.front_cluster import FrontCluster, front_cluster, text_tokens
from tests.helpers.tiny_tokenizer import EOS, byte_level_tokenizer

KEY = RoomKey(1, 0)
EOS_ID = byte_level_tokenizer().token_to_id(EOS)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[FrontCluster]:
    async with front_cluster(tmp_path) as running:
        yield running


def of(key: RoomKey, tokens: list[TokenOutput]) -> list[TokenOutput]:
    return [TokenOutput(key, t.index, t.token_id, t.logprob, t.finish) for t in tokens]


async def test_the_answer_goes_on_behind_what_was_delivered(cluster: FrontCluster) -> None:
    """Cut within a character and within a stop string's beginning: what was held back comes with the next tokens."""
    prefill, decode = await cluster.pair()
    answer = text_tokens(cluster.text, KEY, "hello, wörld", FinishReason.LENGTH)
    cut = next(i for i, token in enumerate(answer) if token.token_id == cluster.text.encode("ö")[0]) + 1
    delivered = [token.token_id for token in answer[:cut]]
    reply = cluster.generate(
        "hello", resumed_token_ids=delivered, stopping={"max_new_tokens": len(answer), "stop": [" wörmer"]}
    )
    task = (await prefill.expect(Submit)).task
    prompt = cluster.text.encode("hello")
    assert (task.token_ids, task.first_index) == ((*prompt, *delivered), cut)
    reservation = (await decode.expect(Reserve)).reservation
    assert (reservation.prompt_tokens, reservation.first_index) == (len(prompt) + cut, cut)
    await decode.report(Grant(task.key, (1, 2), 300))
    await prefill.publish(admitted=(AdmitReport(task.key, cached_tokens=len(prompt) + 2),))
    await prefill.publish(of(task.key, answer[cut : cut + 1]))
    await decode.publish(of(task.key, answer[cut + 1 :]))
    while await reply.read():
        pass
    assert reply.indices == list(range(cut, len(answer)))
    assert reply.token_ids == [token.token_id for token in answer[cut:]]
    assert reply.text == " wörld", "all of it was held back for the stop string"
    assert reply.finished is not None
    assert reply.finished.usage.output_tokens == len(answer)
    assert reply.finished.usage.cached_tokens == len(prompt), "of the prompt, not of the answer"
    made = cluster.server.metrics.registry.get_sample_value(FrontDoorMetric.OUTPUT_TOKENS.metric)
    assert made == len(answer) - cut


async def test_a_node_lost_after_that_costs_nothing_either(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    answer = text_tokens(cluster.text, KEY, "hello world", FinishReason.LENGTH)
    reply = cluster.generate(resumed_token_ids=[answer[0].token_id], stopping={"max_new_tokens": len(answer)})
    key = await cluster.bound(prefill, decode)
    await prefill.publish(of(key, answer[1:2]))
    await decode.publish(of(key, answer[2:3]))
    await reply.read()
    await decode.leave()
    again = (await prefill.expect(Submit)).task
    assert again.first_index in (2, 3), "with what had come by then"
    second = await cluster.join(decode.registration.role, "second")
    await second.expect(Reserve)
    await second.report(Grant(again.key, (1,), 300))
    await prefill.publish(of(again.key, answer[again.first_index : again.first_index + 1]))
    await second.publish(of(again.key, answer[again.first_index + 1 :]))
    while await reply.read():
        pass
    assert reply.indices == list(range(1, len(answer)))
    assert reply.text == "hello world"[len(cluster.text.decode([answer[0].token_id])) :]


@pytest.mark.parametrize(
    ("ids", "stopping", "reason", "text"),
    [
        ([66, EOS_ID], {}, FINISH_REASON_STOP, ""),
        ([66, 66], {"max_new_tokens": 2, "stop": ["ccc"]}, FINISH_REASON_LENGTH, "cc"),
        ([66, 66], {"max_new_tokens": 9, "stop": ["cc"]}, FINISH_REASON_STOP, ""),
    ],
)
async def test_an_answer_that_was_whole_needs_no_node(
    cluster: FrontCluster, ids: list[int], stopping: dict[str, object], reason: int, text: str
) -> None:
    """Only its last message was lost."""
    reply = cluster.generate(resumed_token_ids=ids, stopping=stopping)
    await reply.to_end()
    assert reply.started is not None
    assert reply.finished is not None
    assert (reply.finished.reason, reply.text, reply.token_ids) == (reason, text, [])
    assert reply.finished.usage.output_tokens == 2
    assert reply.finished.stop_token == (EOS_ID if EOS_ID in ids else 0)
    assert reply.finished.stop == ("cc" if stopping.get("stop") == ["cc"] else "")


@pytest.mark.parametrize(
    ("ids", "stopping", "limit"),
    [
        ([5, 264], {"max_new_tokens": 9}, "below 264"),
        ([5, 6, 7], {"max_new_tokens": 2}, "at most 2 ids, max_new_tokens"),
        ([EOS_ID, 7], {"max_new_tokens": 9}, "1 tokens, which end the answer"),
        ([5] * 512, {}, "at most"),
    ],
)
async def test_what_no_stream_can_have_delivered_is_refused(
    cluster: FrontCluster, ids: list[int], stopping: dict[str, int], limit: str
) -> None:
    await cluster.pair()
    error = await cluster.generate(resumed_token_ids=ids, stopping=stopping).error()
    assert error.code == InvalidField.code
    assert error.metadata["field"] == "resumed_token_ids"
    assert limit in error.metadata["limit"]


async def test_an_answer_without_a_length_may_be_longer_than_this_front_door_would_make_it(tmp_path: Path) -> None:
    async with front_cluster(tmp_path, default_max_new_tokens=3) as cluster:
        await cluster.pair()
        reply = await cluster.generate(resumed_token_ids=[66] * 5).to_end()
        assert reply.finished is not None
        assert reply.finished.reason == FINISH_REASON_LENGTH


async def test_the_old_stream_is_not_taken_over_while_it_lives(cluster: FrontCluster) -> None:
    prefill, decode = await cluster.pair()
    first = cluster.generate(request_id="same")
    key = await cluster.bound(prefill, decode)
    answer = text_tokens(cluster.text, key, "hello world", FinishReason.LENGTH)
    await prefill.publish(answer[:1])
    while not first.token_ids:
        await first.read()
    error = await cluster.generate(request_id="same", resumed_token_ids=first.token_ids).error()
    assert error.code == AlreadyExists.code
    first.call.cancel()
    await cluster.idle()
    second = cluster.generate(request_id="same", resumed_token_ids=first.token_ids)
    assert (await prefill.expect(Submit)).task.first_index == 1
    second.call.cancel()


async def test_prompt_and_delivered_tokens_must_fit_a_node(cluster: FrontCluster) -> None:
    prefill = await cluster.join(Role.PREFILL, num_pages=5)  # takes 14 tokens
    await cluster.join(Role.DECODE)
    fields: dict[str, Any] = {"token_ids": {"ids": [66] * 10}, "stopping": {"max_new_tokens": 20}}
    error = await cluster.generate(None, resumed_token_ids=[66] * 8, **fields).error()
    assert error.code == InvalidField.code
    assert (error.metadata["field"], error.metadata["value"]) == ("prompt tokens", "18")
    reply = cluster.generate(None, resumed_token_ids=[66] * 2, **fields)
    assert len((await prefill.expect(Submit)).task.token_ids) == 12
    reply.call.cancel()
