"""Values of `engine.core` to protobuf messages, and back. Pure; nothing else in the project builds node messages.

Messages from a peer are input: what does not convert raises InvalidField, never a bare ValueError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields

from engine.core import messages as m
from engine.core.errors import InvalidField
from engine.core.handoff import FailureCause
from engine.core.page_keys import KEY_BYTES
from engine.core.sampling import FinishReason, SamplingParams, StoppingParams
from engine.core.types import (
    NODE_NAME,
    NODE_NAME_RULE,
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
from rpc.journal_wire import record_from_wire, record_to_wire

ROLES = {Role.PREFILL: tp.ROLE_PREFILL, Role.DECODE: tp.ROLE_DECODE, Role.UNIFIED: tp.ROLE_UNIFIED}
_ROLES_BACK = {value: role for role, value in ROLES.items()}
FINISH = {
    None: tp.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: tp.FINISH_REASON_STOP,
    FinishReason.LENGTH: tp.FINISH_REASON_LENGTH,
    FinishReason.ABORT: tp.FINISH_REASON_ABORT,
}
_CAUSES = {str(cause): cause for cause in FailureCause}
_FINISH_BACK = {value: reason for reason, value in FINISH.items()}

# ---- parts ----


def identity_to_wire(identity: NodeIdentity) -> pb.Identity:
    return pb.Identity(node_id=identity.node_id, incarnation=identity.incarnation)


def identity_from_wire(message: pb.Identity) -> NodeIdentity:
    return NodeIdentity(message.node_id, message.incarnation)


def room_to_wire(key: RoomKey) -> pb.Room:
    return pb.Room(room=key.room, epoch=key.epoch)


def room_from_wire(message: pb.Room) -> RoomKey:
    return RoomKey(message.room, message.epoch)


def role_from_wire(value: int) -> Role:
    role = _ROLES_BACK.get(value)  # type: ignore[call-overload]  # enum values are ints at run time
    if role is None:
        raise InvalidField("role", value, "prefill, decode or unified")
    return role  # type: ignore[no-any-return]


def layout_to_wire(layout: PageLayout) -> tp.PageLayout:
    return tp.PageLayout(**asdict(layout))


def layout_from_wire(message: tp.PageLayout) -> PageLayout:
    return PageLayout(**{f.name: getattr(message, f.name) for f in fields(PageLayout)})


def memory_to_wire(memory: PoolMemory) -> pb.PoolMemory:
    return pb.PoolMemory(**asdict(memory))


def memory_from_wire(message: pb.PoolMemory) -> PoolMemory:
    return PoolMemory(**{f.name: getattr(message, f.name) for f in fields(PoolMemory)})


def stats_to_wire(stats: m.NodeStats) -> tp.NodeStats:
    return tp.NodeStats(**asdict(stats))


def stats_from_wire(message: tp.NodeStats) -> m.NodeStats:
    return m.NodeStats(**{f.name: getattr(message, f.name) for f in fields(m.NodeStats)})


def sampling_to_wire(sampling: SamplingParams) -> pb.NodeSampling:
    return pb.NodeSampling(**asdict(sampling))


def sampling_from_wire(message: pb.NodeSampling) -> SamplingParams:
    return SamplingParams(**{f.name: getattr(message, f.name) for f in fields(SamplingParams)})


def stopping_to_wire(stopping: StoppingParams) -> pb.NodeStopping:
    return pb.NodeStopping(**asdict(stopping))


def stopping_from_wire(message: pb.NodeStopping) -> StoppingParams:
    return StoppingParams(
        max_new_tokens=message.max_new_tokens,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        ignore_eos=message.ignore_eos,
    )


def _keys(name: str, keys: Iterable[bytes]) -> tuple[bytes, ...]:
    """Raises InvalidField for one that is no page key."""
    keys = tuple(keys)
    for key in keys:
        if len(key) != KEY_BYTES:
            raise InvalidField(f"cache_delta.{name}", key[: KEY_BYTES + 1], f"keys of {KEY_BYTES} bytes")
    return keys


def _split_keys(data: bytes) -> tuple[bytes, ...]:
    if len(data) % KEY_BYTES:
        raise InvalidField("page_keys", len(data), f"a multiple of {KEY_BYTES} bytes")
    return tuple(data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES))


# ---- registration ----


def registration_to_wire(registration: m.Registration) -> pb.Register:
    return pb.Register(
        identity=identity_to_wire(registration.identity),
        role=ROLES[registration.role],
        protocol_version=registration.protocol_version,
        model=registration.model,
        layout=layout_to_wire(registration.layout),
        memory=memory_to_wire(registration.memory),
        agent_metadata=registration.agent_metadata,
        max_context=registration.max_context,
        reserved_decode_tokens=registration.reserved_decode_tokens,
        max_running=registration.max_running,
        host_pages=registration.host_pages,
    )


def registration_from_wire(message: pb.Register) -> m.Registration:
    for name in ("node_id", "incarnation"):
        value = getattr(message.identity, name)
        if not NODE_NAME.fullmatch(value):
            raise InvalidField(f"identity.{name}", value, NODE_NAME_RULE)
    return m.Registration(
        identity=identity_from_wire(message.identity),
        role=role_from_wire(message.role),
        protocol_version=message.protocol_version,
        model=message.model,
        layout=layout_from_wire(message.layout),
        memory=memory_from_wire(message.memory),
        agent_metadata=message.agent_metadata,
        max_context=message.max_context,
        reserved_decode_tokens=message.reserved_decode_tokens,
        max_running=message.max_running,
        host_pages=message.host_pages,
    )


# ---- commands ----


def _submit_to_wire(task: PrefillTask) -> pb.Submit:
    return pb.Submit(
        request_id=task.request_id,
        room=room_to_wire(task.key),
        token_ids=task.token_ids,
        first_index=task.first_index,
        page_keys=b"".join(task.page_keys),
        sampling=sampling_to_wire(task.sampling),
        stopping=stopping_to_wire(task.stopping),
        priority=task.priority,
        routing_key=task.routing_key,
        extra_key=task.extra_key,
        ttft_target_seconds=task.ttft_target,
        waited_seconds=task.waited,
    )


def _submit_from_wire(message: pb.Submit) -> m.Submit:
    return m.Submit(
        PrefillTask(
            request_id=message.request_id,
            key=room_from_wire(message.room),
            token_ids=tuple(message.token_ids),
            first_index=message.first_index,
            page_keys=_split_keys(message.page_keys),
            sampling=sampling_from_wire(message.sampling),
            stopping=stopping_from_wire(message.stopping),
            priority=message.priority if message.HasField("priority") else None,
            routing_key=message.routing_key,
            extra_key=message.extra_key,
            ttft_target=message.ttft_target_seconds if message.HasField("ttft_target_seconds") else None,
            waited=message.waited_seconds,
        )
    )


def _reserve_to_wire(reservation: Reservation) -> pb.Reserve:
    return pb.Reserve(
        request_id=reservation.request_id,
        room=room_to_wire(reservation.key),
        prompt_tokens=reservation.prompt_tokens,
        first_index=reservation.first_index,
        sampling=sampling_to_wire(reservation.sampling),
        stopping=stopping_to_wire(reservation.stopping),
        priority=reservation.priority,
        history=reservation.history,
        writer=identity_to_wire(reservation.writer),
    )


def _reserve_from_wire(message: pb.Reserve) -> m.Reserve:
    return m.Reserve(
        Reservation(
            request_id=message.request_id,
            key=room_from_wire(message.room),
            prompt_tokens=message.prompt_tokens,
            first_index=message.first_index,
            sampling=sampling_from_wire(message.sampling),
            stopping=stopping_from_wire(message.stopping),
            writer=identity_from_wire(message.writer),
            priority=message.priority if message.HasField("priority") else None,
            history=tuple(message.history),
        )
    )


def peer_to_wire(peer: PeerInfo) -> pb.Peer:
    return pb.Peer(
        identity=identity_to_wire(peer.identity),
        role=ROLES[peer.role],
        memory=memory_to_wire(peer.memory),
        agent_metadata=peer.agent_metadata,
    )


def peer_from_wire(message: pb.Peer) -> PeerInfo:
    return PeerInfo(
        identity=identity_from_wire(message.identity),
        role=role_from_wire(message.role),
        memory=memory_from_wire(message.memory),
        agent_metadata=message.agent_metadata,
    )


def command_to_wire(command: m.Command) -> pb.NodeCommand:
    match command:
        case m.Submit(task):
            return pb.NodeCommand(submit=_submit_to_wire(task))
        case m.Reserve(reservation):
            return pb.NodeCommand(reserve=_reserve_to_wire(reservation))
        case m.Granted(key, peer, pages):
            granted = pb.Granted(room=room_to_wire(key), peer=identity_to_wire(peer), pages=pages)
            return pb.NodeCommand(granted=granted)
        case m.Abort(key, reason):
            return pb.NodeCommand(abort=pb.AbortRoom(room=room_to_wire(key), reason=reason))
        case m.PeerJoined(info):
            return pb.NodeCommand(peer_joined=peer_to_wire(info))
        case m.PeerLeft(identity):
            return pb.NodeCommand(peer_left=identity_to_wire(identity))
        case m.WriterQuiesced(key):
            return pb.NodeCommand(writer_quiesced=room_to_wire(key))
        case m.Drain(deadline_s):
            return pb.NodeCommand(drain=pb.DrainNode(deadline_seconds=deadline_s))
        case m.Inspect(inspection_id):
            return pb.NodeCommand(inspect=inspection_id)
        case m.Explain(inspection_id, request_id):
            return pb.NodeCommand(explain=pb.Explain(inspection_id=inspection_id, request_id=request_id))


def command_from_wire(message: pb.NodeCommand) -> m.Command | None:
    """The command, or None for welcome, heartbeat_ack and kinds this version does not know."""
    match message.WhichOneof("command"):
        case "submit":
            return _submit_from_wire(message.submit)
        case "reserve":
            return _reserve_from_wire(message.reserve)
        case "granted":
            granted = message.granted
            return m.Granted(room_from_wire(granted.room), identity_from_wire(granted.peer), tuple(granted.pages))
        case "abort":
            return m.Abort(room_from_wire(message.abort.room), message.abort.reason)
        case "peer_joined":
            return m.PeerJoined(peer_from_wire(message.peer_joined))
        case "peer_left":
            return m.PeerLeft(identity_from_wire(message.peer_left))
        case "writer_quiesced":
            return m.WriterQuiesced(room_from_wire(message.writer_quiesced))
        case "drain":
            return m.Drain(message.drain.deadline_seconds)
        case "inspect":
            return m.Inspect(message.inspect)
        case "explain":
            return m.Explain(message.explain.inspection_id, message.explain.request_id)
        case _:
            return None


# ---- reports ----


def report_to_wire(report: m.Report) -> pb.NodeReport:
    match report:
        case m.Heartbeat(stats):
            return pb.NodeReport(heartbeat=stats_to_wire(stats))
        case m.Grant(key, pages, head_room):
            return pb.NodeReport(grant=pb.Grant(room=room_to_wire(key), pages=pages, head_room=head_room))
        case m.RoomFailed(key, phase, reason, retriable, code, cause):
            room = room_to_wire(key)
            failed = pb.RoomFailed(room=room, phase=phase, reason=reason, retriable=retriable, code=code, cause=cause)
            return pb.NodeReport(room_failed=failed)
        case m.RoomFenced(key, writer):
            return pb.NodeReport(room_fenced=pb.RoomFenced(room=room_to_wire(key), writer=identity_to_wire(writer)))
        case m.RoomQuiesced(key):
            return pb.NodeReport(room_quiesced=room_to_wire(key))
        case m.CacheDelta(added, removed, reset):
            return pb.NodeReport(cache_delta=pb.CacheDelta(reset=reset, added=added, removed=removed))
        case m.Inspection(inspection_id, stats, problems):
            inspection = pb.Inspection(inspection_id=inspection_id, stats=stats_to_wire(stats), problems=problems)
            return pb.NodeReport(inspection=inspection)
        case m.Explanation(inspection_id, rooms):
            told = pb.Explanation(inspection_id=inspection_id, rooms=map(record_to_wire, rooms))
            return pb.NodeReport(explanation=told)
        case m.Drained():
            return pb.NodeReport(drained=True)


def report_from_wire(message: pb.NodeReport) -> m.Report | None:
    """The report, or None for register and kinds this version does not know."""
    match message.WhichOneof("report"):
        case "heartbeat":
            return m.Heartbeat(stats_from_wire(message.heartbeat))
        case "grant":
            return m.Grant(room_from_wire(message.grant.room), tuple(message.grant.pages), message.grant.head_room)
        case "room_failed":
            failed = message.room_failed
            key, code = room_from_wire(failed.room), failed.code or "INTERNAL"
            cause = _CAUSES.get(failed.cause, FailureCause.FAULT)
            return m.RoomFailed(key, failed.phase, failed.reason, failed.retriable, code, cause)
        case "room_fenced":
            fenced = message.room_fenced
            return m.RoomFenced(room_from_wire(fenced.room), identity_from_wire(fenced.writer))
        case "room_quiesced":
            return m.RoomQuiesced(room_from_wire(message.room_quiesced))
        case "cache_delta":
            delta = message.cache_delta
            return m.CacheDelta(_keys("added", delta.added), _keys("removed", delta.removed), delta.reset)
        case "inspection":
            found = message.inspection
            return m.Inspection(found.inspection_id, stats_from_wire(found.stats), tuple(found.problems))
        case "explanation":
            told = message.explanation
            return m.Explanation(told.inspection_id, tuple(map(record_from_wire, told.rooms)))
        case "drained":
            return m.Drained()
        case _:
            return None


# ---- output ----


def _token_to_wire(token: TokenOutput) -> pb.Token:
    return pb.Token(
        room=room_to_wire(token.key),
        index=token.index,
        token_id=token.token_id,
        logprob=token.logprob,
        finish=FINISH[token.finish],
        matched_token=token.matched_token,
    )


def _token_from_wire(message: pb.Token) -> TokenOutput:
    return TokenOutput(
        key=room_from_wire(message.room),
        index=message.index,
        token_id=message.token_id,
        logprob=message.logprob,
        finish=_FINISH_BACK.get(message.finish),
        matched_token=message.matched_token if message.HasField("matched_token") else None,
    )


def step_output_to_wire(step: m.StepOutput) -> pb.StepOutput:
    return pb.StepOutput(
        tokens=[_token_to_wire(token) for token in step.tokens],
        prefilled=[
            pb.PrefillReport(
                room=room_to_wire(r.key),
                chunks=r.chunks,
                prefill_wait=r.prefill_wait,
                prefill=r.prefill,
            )
            for r in step.prefilled
        ],
        relayed=[pb.RelayReport(room=room_to_wire(r.key), bytes=r.bytes, seconds=r.seconds) for r in step.relayed],
        decoded=[pb.DecodeReport(room=room_to_wire(r.key), handoff=r.handoff) for r in step.decoded],
        admitted=[pb.AdmitReport(room=room_to_wire(r.key), cached_tokens=r.cached_tokens) for r in step.admitted],
    )


def step_output_from_wire(message: pb.StepOutput) -> m.StepOutput:
    return m.StepOutput(
        tokens=tuple(_token_from_wire(token) for token in message.tokens),
        prefilled=tuple(
            m.PrefillReport(room_from_wire(r.room), r.chunks, r.prefill_wait, r.prefill) for r in message.prefilled
        ),
        relayed=tuple(m.RelayReport(room_from_wire(r.room), r.bytes, r.seconds) for r in message.relayed),
        decoded=tuple(m.DecodeReport(room_from_wire(r.room), r.handoff) for r in message.decoded),
        admitted=tuple(m.AdmitReport(room_from_wire(r.room), r.cached_tokens) for r in message.admitted),
    )
