from kvrelay.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListNodesRequest(_message.Message):
    __slots__ = ("inspect",)
    INSPECT_FIELD_NUMBER: _ClassVar[int]
    inspect: bool
    def __init__(self, inspect: _Optional[bool] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "incarnation", "role", "model", "layout", "stats", "heartbeat_age", "problems", "set_aside")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    role: _types_pb2.Role
    model: str
    layout: _types_pb2.PageLayout
    stats: _types_pb2.NodeStats
    heartbeat_age: float
    problems: _containers.RepeatedScalarFieldContainer[str]
    set_aside: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., model: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.PageLayout, _Mapping]] = ..., stats: _Optional[_Union[_types_pb2.NodeStats, _Mapping]] = ..., heartbeat_age: _Optional[float] = ..., problems: _Optional[_Iterable[str]] = ..., set_aside: _Optional[_Iterable[str]] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes", "queued_requests", "live_requests")
    NODES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    queued_requests: int
    live_requests: int
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., queued_requests: _Optional[int] = ..., live_requests: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LiveRequest(_message.Message):
    __slots__ = ("request_id", "state", "prefill_node", "decode_node", "prompt_tokens", "output_tokens", "age", "attempts", "client")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    prefill_node: str
    decode_node: str
    prompt_tokens: int
    output_tokens: int
    age: float
    attempts: int
    client: str
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., age: _Optional[float] = ..., attempts: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[LiveRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[LiveRequest, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node_id", "deadline_seconds")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    deadline_seconds: float
    def __init__(self, node_id: _Optional[str] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainedNode(_message.Message):
    __slots__ = ("node_id", "role", "rooms")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ROOMS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: _types_pb2.Role
    rooms: _containers.RepeatedCompositeFieldContainer[_types_pb2.RoomRecord]
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., rooms: _Optional[_Iterable[_Union[_types_pb2.RoomRecord, _Mapping]]] = ...) -> None: ...

class AttemptRecord(_message.Message):
    __slots__ = ("room", "epoch", "prefill_node", "decode_node", "first_index", "started", "seconds", "phase", "outcome", "request")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    room: int
    epoch: int
    prefill_node: str
    decode_node: str
    first_index: int
    started: float
    seconds: float
    phase: str
    outcome: str
    request: int
    def __init__(self, room: _Optional[int] = ..., epoch: _Optional[int] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., first_index: _Optional[int] = ..., started: _Optional[float] = ..., seconds: _Optional[float] = ..., phase: _Optional[str] = ..., outcome: _Optional[str] = ..., request: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("nodes", "silent", "attempts")
    NODES_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[ExplainedNode]
    silent: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedCompositeFieldContainer[AttemptRecord]
    def __init__(self, nodes: _Optional[_Iterable[_Union[ExplainedNode, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[_Union[AttemptRecord, _Mapping]]] = ...) -> None: ...
