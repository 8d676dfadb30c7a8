"""Messages of clients and operators to plain values, checked field by field, and back. Messages stop here."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable

from bootstrap.answer import Answer, AnswerOptions, Piece
from bootstrap.chat import ChatMessage
from bootstrap.history import AttemptRecord
from bootstrap.registry import Node
from bootstrap.requests import LiveRequest, Phase, Timing
from engine.core.errors import InvalidField
from engine.core.journal import RoomRecord
from engine.core.sampling import MAX_STOP_TOKENS, FinishReason, SamplingParams, StoppingParams
from kvrelay.v1 import admin_pb2, generation_pb2, types_pb2
from rpc.journal_wire import record_to_wire
from rpc.wire import FINISH, ROLES, layout_to_wire, stats_to_wire

__all__ = [
    "attempt_to_wire",
    "chat_from_wire",
    "check_token_ids",
    "explained_to_wire",
    "finished_to_wire",
    "live_request_to_wire",
    "node_to_wire",
    "options_from_wire",
    "piece_to_wire",
    "resumed_from_wire",
    "sampling_from_wire",
    "stopping_from_wire",
    "ttft_target_from_wire",
]

MAX_REQUEST_ID = 128  # characters
MAX_KEY = 256  # characters of a model name, a routing key or a salt
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_CHAT_MESSAGES = 1024


# ---- requests ----


def check_lengths(message: generation_pb2.GenerateRequest) -> None:
    """Raise InvalidField for a name that is too long."""
    limits = {"request_id": MAX_REQUEST_ID, "model": MAX_KEY, "routing_key": MAX_KEY, "cache_salt": MAX_KEY}
    for name, most in limits.items():
        value = getattr(message, name)
        if len(value) > most:
            raise InvalidField(name, value, f"at most {most} characters")


def ttft_target_from_wire(message: generation_pb2.GenerateRequest) -> float | None:
    """None when there is none. Raises InvalidField."""
    if not message.HasField("ttft_target_seconds"):
        return None
    target = message.ttft_target_seconds
    if not 0 < target < math.inf:
        raise InvalidField("ttft_target_seconds", target, "above 0 and finite")
    return target


def chat_from_wire(message: generation_pb2.Chat) -> tuple[ChatMessage, ...]:
    if not message.messages:
        raise InvalidField("chat.messages", [], "at least one message")
    if len(message.messages) > MAX_CHAT_MESSAGES:
        raise InvalidField("chat.messages", len(message.messages), f"at most {MAX_CHAT_MESSAGES} messages")
    return tuple(ChatMessage(one.role, one.content) for one in message.messages)


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidField for the first id that is no token."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidField(name, token_id, f"below {vocab_size}, the size of the vocabulary")


def sampling_from_wire(message: types_pb2.Sampling) -> SamplingParams:
    """Unset fields get their defaults, an unset seed a random one. Raises InvalidField."""
    given = {field.name: value for field, value in message.ListFields()}
    given.setdefault("seed", secrets.randbits(64))
    params = SamplingParams(**given)
    params.validate()
    return params


def stopping_from_wire(
    message: types_pb2.Stopping, *, default: int, room: int, eos_token_ids: tuple[int, ...], vocab_size: int
) -> StoppingParams:
    """`default`: answer length when none is asked for. `room`: what the context leaves. Raises InvalidField.

    An answer length that was asked for and does not fit is refused, as an answer cut short without a word is worse;
    one that was not asked for is the default, or min_new_tokens if that is more, cut to the room.
    """
    if len(message.stop_token_ids) > MAX_STOP_TOKENS:  # said here too, before each of them is looked at
        raise InvalidField("stopping.stop_token_ids", len(message.stop_token_ids), f"at most {MAX_STOP_TOKENS} ids")
    check_token_ids("stopping.stop_token_ids", message.stop_token_ids, vocab_size)
    if not message.HasField("max_new_tokens"):
        max_new_tokens = min(max(default, message.min_new_tokens), room)
    elif message.max_new_tokens > room:
        limit = f"at most {room}, which the context leaves after the prompt"
        raise InvalidField("stopping.max_new_tokens", message.max_new_tokens, limit)
    else:
        max_new_tokens = message.max_new_tokens
    params = StoppingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=eos_token_ids,
        ignore_eos=message.ignore_eos,
    )
    params.validate()
    return params


def resumed_from_wire(message: generation_pb2.GenerateRequest, most: int, vocab_size: int) -> tuple[int, ...]:
    """Tokens of the answer that another stream has delivered. most: max_new_tokens. Raises InvalidField."""
    if len(message.resumed_token_ids) > most:
        raise InvalidField("resumed_token_ids", len(message.resumed_token_ids), f"at most {most} ids, max_new_tokens")
    check_token_ids("resumed_token_ids", message.resumed_token_ids, vocab_size)
    return tuple(message.resumed_token_ids)


def options_from_wire(message: generation_pb2.GenerateRequest) -> AnswerOptions:
    """What the client wants to see, and the stop strings. Raises InvalidField."""
    response = message.response
    if len(message.stopping.stop) > MAX_STOPS:
        raise InvalidField("stopping.stop", len(message.stopping.stop), f"at most {MAX_STOPS} strings")
    stop = tuple(message.stopping.stop)
    for one in stop:
        if not 1 <= len(one) <= MAX_STOP_LENGTH:
            raise InvalidField("stopping.stop", one, f"1 to {MAX_STOP_LENGTH} characters each")
    return AnswerOptions(
        stop=stop,
        min_new_tokens=message.stopping.min_new_tokens,
        text=response.text if response.HasField("text") else True,
        token_ids=response.token_ids if response.HasField("token_ids") else True,
        logprobs=response.logprobs,
        skip_special_tokens=response.skip_special_tokens if response.HasField("skip_special_tokens") else True,
    )


# ---- answers ----


def started_to_wire(request: LiveRequest, fingerprint: str) -> generation_pb2.GenerateResponse:
    started = generation_pb2.Started(
        request_id=request.ask.request_id,
        prompt_tokens=len(request.ask.token_ids),
        cached_tokens=request.cached_tokens or 0,
        fingerprint=fingerprint,
    )
    return generation_pb2.GenerateResponse(started=started)


def piece_to_wire(piece: Piece) -> generation_pb2.GenerateResponse | None:
    """None when there is nothing in it that the client asked for."""
    if not (piece.token_ids or piece.text or piece.logprobs):
        return None
    delta = generation_pb2.Delta(index=piece.index, token_ids=piece.token_ids, text=piece.text, logprobs=piece.logprobs)
    return generation_pb2.GenerateResponse(delta=delta)


def finished_to_wire(request: LiveRequest, answer: Answer, text: str) -> generation_pb2.GenerateResponse:
    """The last message of a request that has ended without an error."""
    finished = generation_pb2.Finished(
        reason=FINISH[FinishReason.STOP if answer.matched_stop is not None else request.finish],
        usage=generation_pb2.Usage(
            prompt_tokens=len(request.ask.token_ids),
            cached_tokens=request.cached_tokens or 0,
            output_tokens=answer.tokens,
        ),
        timing=_timing_to_wire(request.timing, request.attempts + bool(request.ask.resumed)),
        text=text,
    )
    if answer.matched_stop is not None:
        finished.stop = answer.matched_stop
    elif answer.last is not None and answer.last.matched_token is not None:
        finished.stop_token = answer.last.matched_token
    return generation_pb2.GenerateResponse(finished=finished)


def _timing_to_wire(timing: Timing, attempts: int) -> generation_pb2.Timing:
    phases = timing.phases
    return generation_pb2.Timing(
        total=timing.total,
        first_token=timing.first_token,
        queue=phases.get(Phase.QUEUE, 0.0),
        grant_wait=phases.get(Phase.GRANT_WAIT, 0.0),
        prefill_wait=phases.get(Phase.PREFILL_WAIT, 0.0),
        prefill=phases.get(Phase.PREFILL, 0.0),
        handoff=phases.get(Phase.HANDOFF, 0.0),
        decode=phases.get(Phase.DECODE, 0.0),
        relayed_bytes=timing.relayed_bytes,
        relay=timing.relay,
        prefill_node=timing.prefill_node,
        decode_node=timing.decode_node,
        attempts=attempts,
    )


# ---- operators ----


def node_to_wire(node: Node, now: float, problems: Iterable[str] = (), set_aside: Iterable[str] = ()) -> admin_pb2.Node:
    return admin_pb2.Node(
        node_id=node.node_id,
        incarnation=node.identity.incarnation,
        role=ROLES[node.role],
        model=node.registration.model,
        layout=layout_to_wire(node.registration.layout),
        stats=stats_to_wire(node.stats),
        heartbeat_age=now - node.heard,
        problems=problems,
        set_aside=set_aside,
    )


def explained_to_wire(node: Node, rooms: Iterable[RoomRecord]) -> admin_pb2.ExplainedNode:
    return admin_pb2.ExplainedNode(node_id=node.node_id, role=ROLES[node.role], rooms=map(record_to_wire, rooms))


def attempt_to_wire(record: AttemptRecord, started: float) -> admin_pb2.AttemptRecord:
    """`started`: in seconds since 1970."""
    return admin_pb2.AttemptRecord(
        room=record.key.room,
        epoch=record.key.epoch,
        prefill_node=record.prefill_node,
        decode_node=record.decode_node,
        first_index=record.first_index,
        started=started,
        seconds=record.seconds,
        phase=record.phase,
        outcome=record.outcome,
        request=record.request,
    )


def live_request_to_wire(request: LiveRequest, now: float) -> admin_pb2.LiveRequest:
    attempt = request.attempt
    return admin_pb2.LiveRequest(
        request_id=request.ask.request_id,
        state=request.state.phase,
        prefill_node=attempt.prefill.node_id if attempt and attempt.prefill else "",
        decode_node=attempt.decode.node_id if attempt and attempt.decode else "",
        prompt_tokens=len(request.ask.token_ids),
        output_tokens=len(request.output),
        age=now - request.arrived,
        attempts=request.attempts,
        client=request.ask.client or "",
    )
