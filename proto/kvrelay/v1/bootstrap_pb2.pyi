from kvrelay.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Identity(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class Room(_message.Message):
    __slots__ = ("room", "epoch")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    room: int
    epoch: int
    def __init__(self, room: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class PoolMemory(_message.Message):
    __slots__ = ("base_address", "page_bytes", "num_pages", "device", "device_index")
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    base_address: int
    page_bytes: int
    num_pages: int
    device: str
    device_index: int
    def __init__(self, base_address: _Optional[int] = ..., page_bytes: _Optional[int] = ..., num_pages: _Optional[int] = ..., device: _Optional[str] = ..., device_index: _Optional[int] = ...) -> None: ...

class NodeReport(_message.Message):
    __slots__ = ("register", "heartbeat", "grant", "room_failed", "room_quiesced", "cache_delta", "inspection", "drained", "room_fenced", "explanation")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ROOM_FAILED_FIELD_NUMBER: _ClassVar[int]
    ROOM_QUIESCED_FIELD_NUMBER: _ClassVar[int]
    CACHE_DELTA_FIELD_NUMBER: _ClassVar[int]
    INSPECTION_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    ROOM_FENCED_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: _types_pb2.NodeStats
    grant: Grant
    room_failed: RoomFailed
    room_quiesced: Room
    cache_delta: CacheDelta
    inspection: Inspection
    drained: bool
    room_fenced: RoomFenced
    explanation: Explanation
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[_types_pb2.NodeStats, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., room_failed: _Optional[_Union[RoomFailed, _Mapping]] = ..., room_quiesced: _Optional[_Union[Room, _Mapping]] = ..., cache_delta: _Optional[_Union[CacheDelta, _Mapping]] = ..., inspection: _Optional[_Union[Inspection, _Mapping]] = ..., drained: _Optional[bool] = ..., room_fenced: _Optional[_Union[RoomFenced, _Mapping]] = ..., explanation: _Optional[_Union[Explanation, _Mapping]] = ...) -> None: ...

class MayAttachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Register(_message.Message):
    __slots__ = ("identity", "role", "protocol_version", "model", "layout", "memory", "agent_metadata", "max_context", "reserved_decode_tokens", "max_running", "host_pages")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    role: _types_pb2.Role
    protocol_version: int
    model: str
    layout: _types_pb2.PageLayout
    memory: PoolMemory
    agent_metadata: bytes
    max_context: int
    reserved_decode_tokens: int
    max_running: int
    host_pages: int
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., protocol_version: _Optional[int] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.PageLayout, _Mapping]] = ..., memory: _Optional[_Union[PoolMemory, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., max_context: _Optional[int] = ..., reserved_decode_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., host_pages: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("room", "pages", "head_room")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROOM_FIELD_NUMBER: _ClassVar[int]
    room: Room
    pages: _containers.RepeatedScalarFieldContainer[int]
    head_room: int
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ..., head_room: _Optional[int] = ...) -> None: ...

class RoomFailed(_message.Message):
    __slots__ = ("room", "phase", "reason", "retriable", "code", "cause")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    room: Room
    phase: str
    reason: str
    retriable: bool
    code: str
    cause: str
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., phase: _Optional[str] = ..., reason: _Optional[str] = ..., retriable: _Optional[bool] = ..., code: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class RoomFenced(_message.Message):
    __slots__ = ("room", "writer")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    room: Room
    writer: Identity
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., writer: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class CacheDelta(_message.Message):
    __slots__ = ("reset", "added", "removed")
    RESET_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    added: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, reset: _Optional[bool] = ..., added: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Inspection(_message.Message):
    __slots__ = ("inspection_id", "stats", "problems")
    INSPECTION_ID_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    inspection_id: int
    stats: _types_pb2.NodeStats
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, inspection_id: _Optional[int] = ..., stats: _Optional[_Union[_types_pb2.NodeStats, _Mapping]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("inspection_id", "rooms")
    INSPECTION_ID_FIELD_NUMBER: _ClassVar[int]
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    inspection_id: int
    rooms: _containers.RepeatedCompositeFieldContainer[_types_pb2.RoomRecord]
    def __init__(self, inspection_id: _Optional[int] = ..., rooms: _Optional[_Iterable[_Union[_types_pb2.RoomRecord, _Mapping]]] = ...) -> None: ...

class NodeCommand(_message.Message):
    __slots__ = ("welcome", "submit", "reserve", "granted", "abort", "peer_joined", "peer_left", "writer_quiesced", "drain", "inspect", "heartbeat_ack", "explain")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PEER_JOINED_FIELD_NUMBER: _ClassVar[int]
    PEER_LEFT_FIELD_NUMBER: _ClassVar[int]
    WRITER_QUIESCED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    submit: Submit
    reserve: Reserve
    granted: Granted
    abort: AbortRoom
    peer_joined: Peer
    peer_left: Identity
    writer_quiesced: Room
    drain: DrainNode
    inspect: int
    heartbeat_ack: int
    explain: Explain
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., abort: _Optional[_Union[AbortRoom, _Mapping]] = ..., peer_joined: _Optional[_Union[Peer, _Mapping]] = ..., peer_left: _Optional[_Union[Identity, _Mapping]] = ..., writer_quiesced: _Optional[_Union[Room, _Mapping]] = ..., drain: _Optional[_Union[DrainNode, _Mapping]] = ..., inspect: _Optional[int] = ..., heartbeat_ack: _Optional[int] = ..., explain: _Optional[_Union[Explain, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_seconds", "lease_seconds")
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_seconds: float
    lease_seconds: float
    def __init__(self, heartbeat_seconds: _Optional[float] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class Explain(_message.Message):
    __slots__ = ("inspection_id", "request_id")
    INSPECTION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    inspection_id: int
    request_id: str
    def __init__(self, inspection_id: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "room", "token_ids", "first_index", "page_keys", "sampling", "stopping", "priority", "routing_key", "extra_key", "ttft_target_seconds", "waited_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    PAGE_KEYS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROUTING_KEY_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    room: Room
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    first_index: int
    page_keys: bytes
    sampling: NodeSampling
    stopping: NodeStopping
    priority: int
    routing_key: str
    extra_key: str
    ttft_target_seconds: float
    waited_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., room: _Optional[_Union[Room, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., first_index: _Optional[int] = ..., page_keys: _Optional[bytes] = ..., sampling: _Optional[_Union[NodeSampling, _Mapping]] = ..., stopping: _Optional[_Union[NodeStopping, _Mapping]] = ..., priority: _Optional[int] = ..., routing_key: _Optional[str] = ..., extra_key: _Optional[str] = ..., ttft_target_seconds: _Optional[float] = ..., waited_seconds: _Optional[float] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("request_id", "room", "prompt_tokens", "first_index", "sampling", "stopping", "priority", "history", "writer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    room: Room
    prompt_tokens: int
    first_index: int
    sampling: NodeSampling
    stopping: NodeStopping
    priority: int
    history: _containers.RepeatedScalarFieldContainer[int]
    writer: Identity
    def __init__(self, request_id: _Optional[str] = ..., room: _Optional[_Union[Room, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., first_index: _Optional[int] = ..., sampling: _Optional[_Union[NodeSampling, _Mapping]] = ..., stopping: _Optional[_Union[NodeStopping, _Mapping]] = ..., priority: _Optional[int] = ..., history: _Optional[_Iterable[int]] = ..., writer: _Optional[_Union[Identity, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("room", "peer", "pages")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    room: Room
    peer: Identity
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., peer: _Optional[_Union[Identity, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRoom(_message.Message):
    __slots__ = ("room", "reason")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    room: Room
    reason: str
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("identity", "role", "memory", "agent_metadata")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    role: _types_pb2.Role
    memory: PoolMemory
    agent_metadata: bytes
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., memory: _Optional[_Union[PoolMemory, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ...) -> None: ...

class DrainNode(_message.Message):
    __slots__ = ("deadline_seconds",)
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    deadline_seconds: float
    def __init__(self, deadline_seconds: _Optional[float] = ...) -> None: ...

class NodeSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class NodeStopping(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "stop_token_ids", "eos_token_ids", "ignore_eos")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("tokens", "prefilled", "relayed", "decoded", "admitted")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    prefilled: _containers.RepeatedCompositeFieldContainer[PrefillReport]
    relayed: _containers.RepeatedCompositeFieldContainer[RelayReport]
    decoded: _containers.RepeatedCompositeFieldContainer[DecodeReport]
    admitted: _containers.RepeatedCompositeFieldContainer[AdmitReport]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., prefilled: _Optional[_Iterable[_Union[PrefillReport, _Mapping]]] = ..., relayed: _Optional[_Iterable[_Union[RelayReport, _Mapping]]] = ..., decoded: _Optional[_Iterable[_Union[DecodeReport, _Mapping]]] = ..., admitted: _Optional[_Iterable[_Union[AdmitReport, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("room", "index", "token_id", "logprob", "finish", "matched_token")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_FIELD_NUMBER: _ClassVar[int]
    room: Room
    index: int
    token_id: int
    logprob: float
    finish: _types_pb2.FinishReason
    matched_token: int
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., finish: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., matched_token: _Optional[int] = ...) -> None: ...

class AdmitReport(_message.Message):
    __slots__ = ("room", "cached_tokens")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    room: Room
    cached_tokens: int
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillReport(_message.Message):
    __slots__ = ("room", "chunks", "prefill_wait", "prefill")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAIT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    room: Room
    chunks: int
    prefill_wait: float
    prefill: float
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., chunks: _Optional[int] = ..., prefill_wait: _Optional[float] = ..., prefill: _Optional[float] = ...) -> None: ...

class RelayReport(_message.Message):
    __slots__ = ("room", "bytes", "seconds")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    room: Room
    bytes: int
    seconds: float
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class DecodeReport(_message.Message):
    __slots__ = ("room", "handoff")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    room: Room
    handoff: float
    def __init__(self, room: _Optional[_Union[Room, _Mapping]] = ..., handoff: _Optional[float] = ...) -> None: ...

class PublishEnd(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
