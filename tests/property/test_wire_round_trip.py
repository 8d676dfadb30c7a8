"""What one process says, another hears: value -> message -> bytes -> message -> value is the identity."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from engine.core import messages as m
from engine.core.errors import InvalidField, InvalidRequest
from engine.core.journal import Accounts, Considered, EventTime, RoomRecord
from engine.core.lifetime import Chunk
from engine.core.page_keys import KEY_BYTES
from engine.core.sampling import SamplingParams
from engine.core.types import (
    NODE_NAME,
    NodeIdentity,
    PageLayout,
    PeerInfo,
    PoolMemory,
    PrefillTask,
    Reservation,
    Role,
    RoomKey,
    TokenOutput,
)
from kvrelay.v1 import bootstrap_pb2 as pb
from kvrelay.v1 import types_pb2 as tp
from rpc import wire

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT, DOUBLE = (st.floats(width=width, allow_nan=False) for width in (32, 64))
PRIORITY = st.none() | st.integers(-(2**31), 2**31 - 1)
ONE: dict[type, st.SearchStrategy[Any]] = {
    int: UINT32,
    float: DOUBLE,
    bool: st.booleans(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
}
KEYS = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=4).map(tuple)
NAMES = st.from_regex(NODE_NAME, fullmatch=True)
# What the messages promise beyond that, by field.
RANGES: dict[tuple[type, str], st.SearchStrategy[Any]] = {
    (RoomKey, "room"): UINT64,
    (SamplingParams, "seed"): UINT64,
    (PoolMemory, "base_address"): UINT64,
    (PoolMemory, "page_bytes"): UINT64,
    (m.Grant, "head_room"): INT64,
    (m.Inspect, "inspection_id"): UINT64,
    (m.Inspection, "inspection_id"): UINT64,
    (m.Explain, "inspection_id"): UINT64,
    (m.Explanation, "inspection_id"): UINT64,
    (Considered, "need"): INT64,
    **{(Considered, name): UINT64 for name in ("first_number", "number")},
    **{(RoomRecord, name): UINT64 for name in ("not_reached", "left_out")},
    **{(Accounts, name): INT64 for name in ("rem_input", "current")},
    (Accounts, "rem_chunk"): st.none() | INT64,
    (m.RelayReport, "bytes"): UINT64,
    (PrefillTask, "priority"): PRIORITY,
    (Reservation, "priority"): PRIORITY,
    (PrefillTask, "page_keys"): KEYS,
    **{(m.CacheDelta, name): KEYS for name in ("added", "removed")},
    **{(NodeIdentity, name): NAMES for name in ("node_id", "incarnation")},
    (m.NodeStats, "head_room"): INT64,
    (m.RoomFailed, "code"): st.text(min_size=1, max_size=20),
    **{
        (m.NodeStats, f.name): UINT64
        for f in fields(m.NodeStats)
        if (f.name.endswith("_total") and "pages" not in f.name) or f.name in ("queued_tokens", "retractable")
    },
    **{(SamplingParams, f.name): FLOAT for f in fields(SamplingParams) if f.type == "float"},
    (TokenOutput, "logprob"): FLOAT,
}


def value(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that a message may hold."""
    if kind in ONE:
        return ONE[kind]
    if is_dataclass(kind):
        assert isinstance(kind, type)
        hints = get_type_hints(kind)
        parts = {name: value(hint) for name, hint in hints.items() if (kind, name) not in RANGES}
        return st.builds(kind, **parts, **{name: one for (cls, name), one in RANGES.items() if cls is kind})
    if get_origin(kind) is tuple:
        return st.lists(value(get_args(kind)[0]), max_size=4).map(tuple)
    if get_origin(kind) in (Union, types.UnionType):
        return st.one_of(*map(value, get_args(kind)))
    if kind is type(None):
        return st.none()
    return st.sampled_from(kind)  # an enum


@pytest.mark.parametrize("kind", get_args(m.Command))
def test_commands(kind: type) -> None:
    @given(value(kind))
    def round_trip(command: m.Command) -> None:
        data = wire.command_to_wire(command).SerializeToString()
        assert wire.command_from_wire(pb.NodeCommand.FromString(data)) == command

    round_trip()


@pytest.mark.parametrize("kind", get_args(m.Report))
def test_reports(kind: type) -> None:
    @given(value(kind))
    def round_trip(report: m.Report) -> None:
        data = wire.report_to_wire(report).SerializeToString()
        assert wire.report_from_wire(pb.NodeReport.FromString(data)) == report

    round_trip()


@given(value(m.StepOutput))
def test_output(step: m.StepOutput) -> None:
    data = wire.step_output_to_wire(step).SerializeToString()
    assert wire.step_output_from_wire(pb.StepOutput.FromString(data)) == step


@given(value(m.Registration))
def test_registration(registration: m.Registration) -> None:
    message = pb.Register.FromString(wire.registration_to_wire(registration).SerializeToString())
    assert wire.registration_from_wire(message) == registration


# ---- messages of a peer are input ----


@pytest.mark.parametrize("name", ["", "a:b", "a b", "a/b", "nœud", "a\n", "x" * 129])
@pytest.mark.parametrize("field", ["node_id", "incarnation"])
def test_a_name_that_no_node_may_have(field: str, name: str) -> None:
    message = pb.Register(identity=pb.Identity(node_id="p-1.example_0", incarnation="1"), role=tp.ROLE_PREFILL)
    assert wire.registration_from_wire(message).identity.node_id == "p-1.example_0"
    setattr(message.identity, field, name)
    with pytest.raises(InvalidField) as refused:
        wire.registration_from_wire(message)
    limit = "1 to 128 letters, digits, dots, dashes and underscores"
    assert refused.value.metadata["field"] == f"identity.{field}"
    assert refused.value.metadata["limit"] == limit


@pytest.mark.parametrize("field", ["added", "removed"])
def test_what_is_no_page_key(field: str) -> None:
    for key in (b"", b"x" * (KEY_BYTES - 1), b"x" * 5000):
        message = pb.NodeReport()
        getattr(message.cache_delta, field).extend((b"x" * KEY_BYTES, key))
        with pytest.raises(InvalidField, match=f"cache_delta.{field}"):
            wire.report_from_wire(message)


@given(value(m.Command) | value(m.Report) | value(m.StepOutput), st.lists(st.tuples(UINT32, st.binary(max_size=3))))
def test_damaged_messages_convert_or_are_refused_by_name(
    said: m.Command | m.Report | m.StepOutput, damage: list[tuple[int, bytes]]
) -> None:
    kind, to_wire, from_wire = _converters(said)
    data = bytearray(to_wire(said).SerializeToString())
    for at, replacement in damage:
        at %= len(data) + 1
        data[at : at + 2] = replacement
    with contextlib.suppress(DecodeError, InvalidRequest):  # rpc.errors makes one of the other
        from_wire(kind.FromString(bytes(data)))


def _converters(said: m.Command | m.Report | m.StepOutput) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    if isinstance(said, m.StepOutput):
        return pb.StepOutput, wire.step_output_to_wire, wire.step_output_from_wire
    if isinstance(said, get_args(m.Command)):
        return pb.NodeCommand, wire.command_to_wire, wire.command_from_wire
    return pb.NodeReport, wire.report_to_wire, wire.report_from_wire


@pytest.mark.parametrize("field", tuple(pb.NodeCommand.DESCRIPTOR.fields), ids=lambda field: str(field.name))
def test_a_command_with_nothing_in_it(field: Any) -> None:
    """A message whose parts are all unset, as a careless peer would send: it converts or is refused, kind by kind."""
    message = pb.NodeCommand()
    if field.message_type is None:
        setattr(message, field.name, 0)
    else:
        getattr(message, field.name).SetInParent()
    if field.name == "peer_joined":
        with pytest.raises(InvalidField, match="role is 0; allowed: prefill, decode or unified"):
            wire.command_from_wire(message)
    else:
        command = wire.command_from_wire(message)
        assert (command is None) == (field.name in ("welcome", "heartbeat_ack"))


def test_a_failure_without_a_code_is_internal() -> None:
    report = wire.report_from_wire(pb.NodeReport(room_failed=pb.RoomFailed()))
    assert report == m.RoomFailed(RoomKey(0, 0), "", "", retriable=False, code="INTERNAL")


def test_kinds_of_a_newer_version_are_none() -> None:
    unknown = b"\xa2\x06\x02hi"  # field 100, two bytes
    assert wire.command_from_wire(pb.NodeCommand.FromString(unknown)) is None
    assert wire.report_from_wire(pb.NodeReport.FromString(unknown)) is None
    assert wire.step_output_from_wire(pb.StepOutput.FromString(unknown)) == m.StepOutput()


@pytest.mark.parametrize("length", [1, KEY_BYTES - 1, KEY_BYTES + 1])
def test_page_keys_of_a_wrong_length(length: int) -> None:
    with pytest.raises(InvalidField, match=f"page_keys is {length}; allowed: a multiple of 16 bytes"):
        wire.command_from_wire(pb.NodeCommand(submit=pb.Submit(page_keys=bytes(length))))


@pytest.mark.parametrize("role", [0, 4, 17])
def test_unknown_role(role: int) -> None:
    identity = pb.Identity(node_id="n", incarnation="1")
    with pytest.raises(InvalidField, match=f"role is {role}"):
        wire.registration_from_wire(pb.Register(identity=identity, role=role))  # type: ignore[arg-type]


def test_every_field_of_a_value_has_one_in_the_message() -> None:
    """Converters copy by name: a field added on one side alone would be lost without a word."""
    pairs: list[tuple[Any, Any]] = [
        (m.NodeStats, tp.NodeStats),
        (PageLayout, tp.PageLayout),
        (PoolMemory, pb.PoolMemory),
        (Considered, tp.Considered),
        (Accounts, tp.PassAccounts),
        (Chunk, tp.ChunkForward),
        (EventTime, tp.EventTime),
    ]
    pairs += [(SamplingParams, pb.NodeSampling), (NodeIdentity, pb.Identity), (RoomKey, pb.Room), (PeerInfo, pb.Peer)]
    for cls, message in pairs:
        assert {f.name for f in fields(cls)} == {f.name for f in message.DESCRIPTOR.fields}, cls.__name__
    assert set(wire.ROLES) == set(Role)
