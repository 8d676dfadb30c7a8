"""`kvrelay explain`: what became of one request, attempt by attempt and node by node, and why it had to wait."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cli.client import CALL_TIMEOUT_S, ROLES, Client, ClientConfig
from cli.show import printable, say, table
from engine.core.config import add_arguments
from engine.core.journal import Accounts, Considered, EventTime, Refusal, RoomRecord
from engine.core.lifetime import LifetimeEvent
from engine.core.types import Role, RoomKey
from kvrelay.v1 import admin_pb2
from rpc.journal_wire import record_from_wire

__all__ = ["explain"]

# Names of events, and what the time before them was spent on.
_EVENTS: dict[str, tuple[str, str]] = {
    LifetimeEvent.ARRIVED: ("arrived", ""),
    LifetimeEvent.GRANTED: ("granted", "wait until a decode node had set pages aside"),
    LifetimeEvent.ADMITTED: ("admitted", "wait for a place in a forward"),
    LifetimeEvent.TOKEN_0: ("token 0", "sampled"),
    LifetimeEvent.LAST_WRITE: ("last write", "the last pages were on their way"),
    LifetimeEvent.COMPLETE: ("complete", "pages were arriving"),
    LifetimeEvent.FIRST_STEP: ("first step", "wait for a decode step"),
    LifetimeEvent.RETRACTED: ("retracted", "until there was no page for the next token"),
    LifetimeEvent.PREEMPTED: ("preempted", "until one of higher priority needed its pages"),
    LifetimeEvent.RESUMED: ("resumed", "wait for a place in a forward, once more"),
}
_ON_DECODE_NODES: dict[str, tuple[str, str]] = {
    LifetimeEvent.GRANTED: ("reserved", "wait for free pages on this node"),
    LifetimeEvent.RESUMED: ("resumed", "its pages were in host memory"),
}
_PHASES = (  # each from the first of these events that happened
    ("grant", (LifetimeEvent.ARRIVED,), LifetimeEvent.GRANTED),
    ("queue", (LifetimeEvent.GRANTED, LifetimeEvent.ARRIVED), LifetimeEvent.ADMITTED),
    ("prefill", (LifetimeEvent.ADMITTED,), LifetimeEvent.CHUNK_DONE),
    ("writes after it", (LifetimeEvent.CHUNK_DONE,), LifetimeEvent.LAST_WRITE),
    ("transfer", (LifetimeEvent.GRANTED,), LifetimeEvent.COMPLETE),
    ("wait for a step", (LifetimeEvent.COMPLETE,), LifetimeEvent.FIRST_STEP),
    ("decode", (LifetimeEvent.FIRST_STEP,), LifetimeEvent.ENDED),
)
_RECORDED = ("prefill_node", "decode_node", "first_index", "started", "seconds", "phase", "outcome")


@dataclass(frozen=True, slots=True)
class _Told:
    """What one node knows of one attempt."""

    node_id: str
    role: Role | str
    record: RoomRecord


@dataclass(frozen=True, slots=True)
class _Attempt:
    """All that is known of one attempt. `stream`: which of those that the request's id was used for, from 1; another
    one begins when a client takes an answer up elsewhere, and whenever the id is used again.
    """

    stream: int
    key: RoomKey
    record: admin_pb2.AttemptRecord | None  # None: made by another front door, or forgotten
    told: Sequence[_Told]


def explain(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay explain`."""
    parser.add_argument("request_id", metavar="REQUEST_ID", help="of a live request, or one that ended lately")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_arguments(parser, ClientConfig)
    parser.set_defaults(run=_explain)


def _explain(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    with Client.from_flags(flags, env) as client, client.errors():
        client.model()  # from here on it is a front door that answers
        request = admin_pb2.ExplainRequest(request_id=flags.request_id)
        response = client.admin.Explain(request, timeout=CALL_TIMEOUT_S)
    told = [
        _Told(node.node_id, ROLES.get(node.role, ""), record_from_wire(room))
        for node in response.nodes
        for room in node.rooms
    ]
    told.sort(key=lambda one: one.record.arrived)
    attempts = _attempts(told, response.attempts)
    if flags.json:
        print(json.dumps(_json(flags.request_id, attempts, response.silent)))
    else:
        print(_text(flags.request_id, attempts))
    for node_id in response.silent:
        say(f"{node_id} did not answer: what it knows is missing")
    return 0


def _attempts(told: Sequence[_Told], records: Iterable[admin_pb2.AttemptRecord]) -> list[_Attempt]:
    """In the order in which they began, as far as the clocks agree."""
    known = {RoomKey(one.room, one.epoch): one for one in records}
    began = {one.record.key: one.record.arrived for one in reversed(told)}
    began |= {key: one.started for key, one in known.items()}
    attempts: list[_Attempt] = []
    streams: dict[int, int] = {}  # by the front door's number of the request
    stream, newest, last = 0, 0, 0
    for key in sorted(began, key=lambda key: began[key]):
        number = known[key].request if key in known else None
        if number in streams:
            stream = streams[number]
        elif not stream or key.epoch <= last or (number is not None and stream in streams.values()):
            stream = newest = newest + 1
        if number is not None:
            streams[number] = stream
        last = key.epoch
        attempts.append(_Attempt(stream, key, known.get(key), [one for one in told if one.record.key == key]))
    return attempts


def _json(request_id: str, attempts: Sequence[_Attempt], silent: Sequence[str]) -> dict[str, Any]:
    listed, rooms = [], []
    for attempt in attempts:
        name = {"stream": attempt.stream, "attempt": attempt.key.epoch + 1, "room": str(attempt.key)}
        of_it = () if attempt.record is None else _RECORDED
        listed.append({**name, **{field: getattr(attempt.record, field) for field in of_it}})
        for one in attempt.told:
            values = asdict(one.record)
            del values["key"]
            rooms.append({"node_id": one.node_id, "role": one.role, **name, **values})
    return {"request_id": request_id, "attempts": listed, "rooms": rooms, "silent": list(silent)}


# ---- as text ----


def _text(request_id: str, attempts: Sequence[_Attempt]) -> str:
    lines = [f"request {printable(request_id)}: {len(attempts)} attempt" + ("s" if len(attempts) > 1 else "")]
    streams = max(one.stream for one in attempts)
    if streams > 1:
        lines[0] += f" in {streams} streams"
    epochs = {stream: {one.key.epoch for one in attempts if one.stream == stream} for stream in range(1, streams + 1)}
    if any(found != set(range(max(found) + 1)) for found in epochs.values()):
        lines[0] += " known here; others were on nodes that are gone, or are forgotten"
    for attempt in attempts:
        name = f"attempt {attempt.key.epoch + 1}, room {attempt.key}"
        lines += ["", f"stream {attempt.stream}, {name}" if streams > 1 else name]
        if attempt.record is not None:
            lines[-1] += f": {printable(attempt.record.outcome or attempt.record.phase)}"
            lines.append(f"  {_begun(attempt.record)}")
        for one in attempt.told:
            lines += ["", *_node(one)]
    return "\n".join(lines)


def _begun(record: admin_pb2.AttemptRecord) -> str:
    nodes = " and ".join(dict.fromkeys(name for name in (record.prefill_node, record.decode_node) if name))
    with_tokens = f" with {record.first_index:,} tokens of the answer" if record.first_index else ""
    over = "over after" if record.outcome else "lives for"
    return f"begun {_time(record.started)}{with_tokens} on {nodes or 'no node'}, {over} {record.seconds:.3f} s"


def _time(at: float) -> str:
    at = round(at, 3)
    return time.strftime("%H:%M:%S", time.localtime(at)) + f"{at % 1:.3f}"[1:]


def _node(one: _Told) -> Iterator[str]:
    record = one.record
    at = _time(record.arrived)
    fate = record.outcome or f"here for {record.age:.3f} s"
    yield f"  {one.node_id} ({one.role}), {record.prompt_tokens:,} prompt tokens, arrived {at} by its clock: {fate}"
    if record.passes or record.not_reached or record.deferred:
        considered = record.left_out + sum(one.count for one in record.passes)
        missed = f"{_passes(record.not_reached)} did not reach it while it waited"
        yield f"    {_passes(considered)} considered it, {missed}"
    if record.deferred:
        yield f"    {_passes(record.deferred)} held it back for another one that computes what both share"
    for decision in record.passes:
        yield from (f"    {line}" for line in _considered(decision))
    if record.left_out:
        yield f"    {_passes(record.left_out)} in between left no record"
    yield from (f"    {line}" for line in _timeline(one))
    if phases := ", ".join(_phases(one)):
        yield f"    in short: {phases}"


def _considered(one: Considered) -> Iterator[str]:
    when = f"pass {one.number} at {one.time:.4f} s"
    if one.count > 1:
        span = f"{one.first_time:.4f} to {one.time:.4f} s"
        when = f"passes {one.first_number} to {one.number} at {span}, {one.count} of them"
    policy = one.policy if one.policy == one.in_effect else f"{one.in_effect} ({one.policy} was asked for)"
    place = f"position {one.position} of {one.waiting}"
    if one.position is None:
        place = f"partly computed, ahead of {one.waiting} waiting"
    yield f"{when}: {place}, {policy}"
    yield f"  {_why(one)}"
    yield f"  prefix {one.prefix:,}, wanted {one.wanted:,}, given {one.extend:,}; for the next: {one.verdict}"
    yield f"  {_accounts(one)}"


def _why(one: Considered) -> str:
    """A sentence: why it was admitted, or was not."""
    if not one.refusal:
        host = f" ({one.loaded:,} of them loaded from the host)" if one.loaded else ""
        found = f" after {one.prefix:,} that were there{host}" if one.prefix else ""
        if not one.chunked:
            return f"admitted: all {one.wanted:,} tokens left{found}"
        return f"admitted in part: {one.extend:,} of {one.wanted:,} tokens left{found}"
    match one.refusal:
        case Refusal.MEMORY:
            why = f"needs {one.need + 1:,} tokens of memory, {one.left:,.0f} left"
        case Refusal.SPARE:
            why = f"needs {one.need + 1:,} tokens of memory, {one.left:,.0f} left beside what one ahead of it waits for"
        case Refusal.REQUESTS:
            why = "the forward had as many requests as it may"
        case Refusal.INPUT:
            why = f"{one.wanted:,} tokens to compute, {one.before.rem_input:,} left of what one forward computes"
        case Refusal.CHUNK:
            why = f"{one.before.rem_chunk or 0:,} tokens left of the chunk, less than a page for it"
        case Refusal.CUT:
            why = f"{one.wanted:,} tokens did not fit whole, and another prompt was cut already"
        case _:
            why = one.refusal
    return f"refused: {why}"


def _accounts(one: Considered) -> str:
    def change(name: str, of: Accounts, to: Accounts) -> str:
        before, after = getattr(of, name), getattr(to, name)
        if before is None:
            return f"{name} none"
        return f"{name} {before:,.0f}" + (f" > {after:,.0f}" if after != before else "")

    return ", ".join(change(name, one.before, one.after) for name in ("rem_input", "rem_chunk", "total", "current"))


def _timeline(one: _Told) -> Iterator[str]:
    """What happened when, each with the seconds since what happened before it."""
    events = _EVENTS | {LifetimeEvent.ENDED: ("end", one.record.outcome)}
    if one.role is Role.DECODE:
        events |= _ON_DECODE_NODES
    found = [(c.time, f"chunk to {c.end:,}", f"forward with {c.tokens:,} tokens of it") for c in one.record.chunks]
    for event in _events(one):
        name, remark = events.get(event.event, (event.event, ""))
        found.append((event.time, name, f"{remark} (the first of {event.count})" if event.count > 1 else remark))
    found.sort(key=lambda row: row[0])
    rows = [["event", "seconds", "since the last"]]
    before = 0.0
    for at, name, _ in found:
        rows.append([name, f"{at:.4f}", f"{at - before:.4f}"])
        before = at
    lines = table(rows).splitlines()
    width = max(map(len, lines))
    for line, remark in zip(lines, ("", *(remark for _, _, remark in found)), strict=True):
        yield f"{line.ljust(width)}   {remark}".rstrip()


def _events(one: _Told) -> list[EventTime]:
    """What happened. A unified node waits for no grant and writes to nobody."""
    apart = (LifetimeEvent.GRANTED, LifetimeEvent.LAST_WRITE) if one.role is Role.UNIFIED else ()
    return [event for event in one.record.events if event.event not in apart]


def _phases(told: _Told) -> Iterator[str]:
    times = {one.event: one.time for one in _events(told)}
    if told.record.chunks:
        times[LifetimeEvent.CHUNK_DONE] = told.record.chunks[-1].time
    if told.role is Role.UNIFIED and LifetimeEvent.TOKEN_0 in times:
        times[LifetimeEvent.FIRST_STEP] = times[LifetimeEvent.TOKEN_0]  # the second token comes of the next forward
    for name, starts, end in _PHASES:
        start = next((times[one] for one in starts if one in times), None)
        if start is not None and end in times:
            yield f"{name} {times[end] - start:.4f} s"


def _passes(count: int) -> str:
    return f"{count:,} pass" + ("es" if count != 1 else "")
