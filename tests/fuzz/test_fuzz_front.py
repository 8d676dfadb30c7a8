"""Hostile messages at every gRPC entry of a real bootstrap service, while it serves others (see house.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import strategies as st

from engine.core.messages import NodeStats
from engine.core.types import Role
from kvrelay.v1 import admin_pb2, bootstrap_pb2, generation_pb2
from rpc.wire import registration_to_wire, stats_to_wire
from tests.fuzz.hostile import Call, calls, each, near, payloads
from tests.fuzz.house import INCARNATION, MAX_MESSAGE, OWN_ROOM, House, Play
from tests.helpers.front_door import registration

pytestmark = pytest.mark.timeout(600)  # 20 s of work each, on a machine that others may use
AT_ONCE, ROUND = 24, 30  # calls, examples
RSS_GROWTH = 64 << 20
SMALL = 4  # pages of a hostile node: too few for what the good clients ask
OURS = (generation_pb2, bootstrap_pb2, admin_pb2, health_pb2, reflection_pb2)
NODES = [
    registration(role, f"hostile-{role}-{n}", incarnation=INCARNATION, num_pages=SMALL, reserved=0)
    for role in Role.PREFILL.pools
    for n in range(3)
]
ROOM = {"room": OWN_ROOM.room, "epoch": OWN_ROOM.epoch}
STATS = stats_to_wire(NodeStats(pages_total=SMALL, pages_free=SMALL, head_room=SMALL * 4, serving=True))
TOKENS: list[dict[str, Any]] = [{"room": ROOM, "index": i, "token_id": 65 + i, "finish": i // 2 * 2} for i in range(3)]


def node_report(**fields: Any) -> bootstrap_pb2.NodeReport:
    return bootstrap_pb2.NodeReport(**fields)


REPORTS = [
    node_report(heartbeat=STATS),
    node_report(grant={"room": ROOM, "pages": [0, 1], "head_room": 8}),
    node_report(room_failed={"room": ROOM, "phase": "prefilling", "reason": "x", "retriable": True}),
    node_report(room_failed={"room": ROOM, "phase": "decoding", "reason": "retracted: x", "retriable": True}),
    node_report(room_failed={"room": ROOM, "phase": "queued", "reason": "x", "code": "INVALID_ARGUMENT"}),
    node_report(room_quiesced=ROOM),
    node_report(room_fenced={"room": ROOM, "writer": {"node_id": "good-prefill-1", "incarnation": "1"}}),
    node_report(cache_delta={"reset": True, "added": [b"k" * 16]}),
    node_report(inspection={"inspection_id": 1, "stats": STATS}),
    node_report(explanation={"inspection_id": 1, "rooms": [{"room": 1, "passes": [{}], "events": [{}]}]}),
    node_report(register=registration_to_wire(NODES[0])),
    node_report(drained=True),
]
STEPS = [
    bootstrap_pb2.StepOutput(tokens=TOKENS),
    bootstrap_pb2.StepOutput(tokens=TOKENS[:1], prefilled=[{"room": ROOM, "chunks": 1}], admitted=[{"room": ROOM}]),
    bootstrap_pb2.StepOutput(tokens=TOKENS[1:], relayed=[{"room": ROOM}], decoded=[{"room": ROOM}]),
]
CHAT = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="hi")])
VALID: dict[str, Sequence[Message]] = {
    "GenerateRequest": [
        generation_pb2.GenerateRequest(text="hello", sampling={"temperature": 0.0}, stopping={"max_new_tokens": 3}),
        generation_pb2.GenerateRequest(token_ids={"ids": [1, 2, 3]}, stopping={"stop": ["x"]}, request_id="hostile"),
        generation_pb2.GenerateRequest(
            chat={"messages": [{"role": "user", "content": "hi"}]}, response={"logprobs": True}
        ),
    ],
    "AbortRequest": [generation_pb2.AbortRequest(request_id="hostile")],
    "TokenizeRequest": [
        generation_pb2.TokenizeRequest(text="hello"),
        generation_pb2.TokenizeRequest(chat=CHAT),
    ],
    "DetokenizeRequest": [generation_pb2.DetokenizeRequest(token_ids=[1, 2, 3])],
    "DrainRequest": [admin_pb2.DrainRequest(node_id="nobody", deadline_seconds=1)],
    "ExplainRequest": [admin_pb2.ExplainRequest(request_id="hostile")],
    "WatchRequest": [admin_pb2.WatchRequest(interval_seconds=0.1)],
    "ListNodesRequest": [admin_pb2.ListNodesRequest(inspect=True)],
    "NodeReport": [node_report(register=registration_to_wire(one)) for one in NODES] + REPORTS,
    "StepOutput": list(STEPS),
    "HealthCheckRequest": [health_pb2.HealthCheckRequest(service="kvrelay.v1.Generation")],
    "ServerReflectionRequest": [
        reflection_pb2.ServerReflectionRequest(list_services="*"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvrelay.v1.Generation"),
    ],
}
METHODS: list[MethodDescriptor] = [
    method for module in OURS for service in module.DESCRIPTOR.services_by_name.values() for method in service.methods
]
NOWHERE = ("/kvrelay.v1.Generation/Nothing", "/kvrelay.v1.Nothing/Generate", "/x", "//", "/" + "x" * 3000)


def calls_of(method: MethodDescriptor) -> st.SearchStrategy[Call]:
    kind = message_factory.GetMessageClass(method.input_type)
    payload = payloads(kind, VALID.get(method.input_type.name, ()), oversized=MAX_MESSAGE)
    path = f"/{method.containing_service.full_name}/{method.name}"
    return calls(path, payload, streams=method.client_streaming, endless=method.name in ("Watch", "Attach"))


CALLS = [calls_of(method) for method in METHODS] + [
    calls(path, payloads(health_pb2.HealthCheckRequest), streams=True) for path in NOWHERE
]


@st.composite
def any_calls(draw: st.DrawFn) -> list[Call]:
    return [draw(CALLS[draw(st.integers(0, len(CALLS) - 1))]) for _ in range(AT_ONCE)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootstrap.servicers.admin.ANSWER_TIMEOUT_S", 0.3)
    monkeypatch.setattr("bootstrap.servicers.nodes.REGISTER_TIMEOUT_S", 0.3)


@st.composite
def plays(draw: st.DrawFn) -> Play:
    node = draw(st.sampled_from(NODES))
    register = node_report(register=registration_to_wire(node))
    if draw(st.integers(0, 3)) == 0:
        register = draw(near(register))
        memory = register.register.memory
        memory.num_pages = min(memory.num_pages, SMALL)  # it is to get its own requests only
    report = payloads(bootstrap_pb2.NodeReport, REPORTS)
    step = payloads(bootstrap_pb2.StepOutput, STEPS)
    useful = [("attach", one.SerializeToString()) for one in REPORTS[1:2]] + [("publish", STEPS[1].SerializeToString())]
    answer = st.one_of(
        st.tuples(st.just("attach"), report), st.tuples(st.just("publish"), step), st.sampled_from(useful)
    )
    others = (str(node.identity),) * 6 + ("good-prefill-1:1", "good-decode-1:1", "")
    return Play(
        register.SerializeToString(),
        (REPORTS[0].SerializeToString(), *draw(st.lists(report, max_size=3))),
        tuple(draw(st.lists(answer, min_size=1, max_size=6))),
        draw(st.integers(1, 4)),
        draw(st.sampled_from(others)),
        draw(st.sampled_from((0.02, 0.1, 0.3))),
        draw(st.booleans()),
    )


@st.composite
def companies(draw: st.DrawFn) -> list[Play | Call]:
    """Some nodes, and clients whose requests they may get."""
    generate = draw(st.lists(CALLS[0], min_size=6, max_size=6))
    return [*(draw(plays()) for _ in range(12)), *generate]


def fuzz(house: House, start: int, rounds: int, batches: st.SearchStrategy[list[Any]], one: Any) -> None:
    """Rounds of ROUND examples, each a list of what goes on at once. What the process takes must not grow."""

    def batch(made: list[Any]) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*map(one, made))

        house.run(all_at_once())

    before = house.run(house.rest())
    for number in range(rounds):
        each(batches, ROUND, start + number, batch)
        if number < 2:  # warm
            before = house.run(house.rest())
    after = house.run(house.rest(before))
    assert after.rss < before.rss + RSS_GROWTH, f"{(after.rss - before.rss) >> 20} MiB more"


def test_whatever_is_called_ends_with_a_status_and_leaves_nothing(tmp_path: Path) -> None:
    with House(tmp_path) as house:
        fuzz(house, 100, 7, any_calls(), house.call)
        assert house.messages > 5000
        assert house.traffic.answered > 100


def test_a_hostile_node_hurts_its_own_rooms_only(tmp_path: Path) -> None:
    with House(tmp_path, modest=4) as house:

        async def one(made: Play | Call) -> None:
            await (house.play(made) if isinstance(made, Play) else house.call(made))

        fuzz(house, 200, 4, companies(), one)
        assert house.messages > 4000
        assert house.traffic.answered > 100
        assert house.traffic.modest["OK"] > 100
        assert house.given > 100, "hostile nodes were given little to do"
