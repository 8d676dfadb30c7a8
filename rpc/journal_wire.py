"""What a node remembers of its rooms, to messages and back. A part of `rpc.wire`, for those two alone that explain."""

from __future__ import annotations

from dataclasses import asdict, fields

from engine.core.journal import Accounts, Considered, EventTime, RoomRecord
from engine.core.lifetime import Chunk
from engine.core.types import RoomKey
from kvrelay.v1 import types_pb2 as tp

__all__ = ["record_from_wire", "record_to_wire"]


def record_to_wire(record: RoomRecord) -> tp.RoomRecord:
    return tp.RoomRecord(
        room=record.key.room,
        epoch=record.key.epoch,
        prompt_tokens=record.prompt_tokens,
        arrived=record.arrived,
        age=record.age,
        outcome=record.outcome,
        events=[tp.EventTime(event=one.event, time=one.time, count=one.count) for one in record.events],
        chunks=[tp.ChunkForward(end=one.end, tokens=one.tokens, time=one.time) for one in record.chunks],
        passes=[tp.Considered(**asdict(one)) for one in record.passes],
        not_reached=record.not_reached,
        left_out=record.left_out,
        deferred=record.deferred,
    )


def record_from_wire(message: tp.RoomRecord) -> RoomRecord:
    return RoomRecord(
        key=RoomKey(message.room, message.epoch),
        prompt_tokens=message.prompt_tokens,
        arrived=message.arrived,
        age=message.age,
        outcome=message.outcome,
        events=tuple(EventTime(one.event, one.time, one.count) for one in message.events),
        chunks=tuple(Chunk(one.end, one.tokens, one.time) for one in message.chunks),
        passes=tuple(_considered_from_wire(one) for one in message.passes),
        not_reached=message.not_reached,
        left_out=message.left_out,
        deferred=message.deferred,
    )


def _considered_from_wire(message: tp.Considered) -> Considered:
    values = {f.name: getattr(message, f.name) for f in fields(Considered)}
    values |= {
        "position": message.position if message.HasField("position") else None,
        "before": _accounts_from_wire(message.before),
        "after": _accounts_from_wire(message.after),
    }
    return Considered(**values)


def _accounts_from_wire(message: tp.PassAccounts) -> Accounts:
    rem_chunk = message.rem_chunk if message.HasField("rem_chunk") else None
    return Accounts(message.rem_input, rem_chunk, message.total, message.current)
