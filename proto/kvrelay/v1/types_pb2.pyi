from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_UNIFIED: _ClassVar[Role]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_UNIFIED: Role

class Sampling(_message.Message):
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

class Stopping(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class PageLayout(_message.Message):
    __slots__ = ("page_size", "layers", "kv_heads", "head_dim", "dtype", "fingerprint", "version")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    fingerprint: str
    version: int
    def __init__(self, page_size: _Optional[int] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., fingerprint: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class NodeStats(_message.Message):
    __slots__ = ("pages_total", "pages_free", "pages_cached", "pages_held", "pages_fenced", "ungranted", "waiting", "running", "transferring", "queued_tokens", "tokens_per_second", "head_room", "serving", "draining", "requests_total", "cached_tokens_total", "computed_tokens_total", "output_tokens_total", "retractable", "relayed_bytes_total", "host_pages_total", "host_pages_free", "host_pages_cached", "host_hit_tokens_total", "retracted")
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_HELD_FIELD_NUMBER: _ClassVar[int]
    PAGES_FENCED_FIELD_NUMBER: _ClassVar[int]
    UNGRANTED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROOM_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RETRACTABLE_FIELD_NUMBER: _ClassVar[int]
    RELAYED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    HOST_HIT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    pages_fenced: int
    ungranted: int
    waiting: int
    running: int
    transferring: int
    queued_tokens: int
    tokens_per_second: float
    head_room: int
    serving: bool
    draining: bool
    requests_total: int
    cached_tokens_total: int
    computed_tokens_total: int
    output_tokens_total: int
    retractable: int
    relayed_bytes_total: int
    host_pages_total: int
    host_pages_free: int
    host_pages_cached: int
    host_hit_tokens_total: int
    retracted: int
    def __init__(self, pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_held: _Optional[int] = ..., pages_fenced: _Optional[int] = ..., ungranted: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., transferring: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., head_room: _Optional[int] = ..., serving: _Optional[bool] = ..., draining: _Optional[bool] = ..., requests_total: _Optional[int] = ..., cached_tokens_total: _Optional[int] = ..., computed_tokens_total: _Optional[int] = ..., output_tokens_total: _Optional[int] = ..., retractable: _Optional[int] = ..., relayed_bytes_total: _Optional[int] = ..., host_pages_total: _Optional[int] = ..., host_pages_free: _Optional[int] = ..., host_pages_cached: _Optional[int] = ..., host_hit_tokens_total: _Optional[int] = ..., retracted: _Optional[int] = ...) -> None: ...

class PassAccounts(_message.Message):
    __slots__ = ("rem_input", "rem_chunk", "total", "current")
    REM_INPUT_FIELD_NUMBER: _ClassVar[int]
    REM_CHUNK_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    rem_input: int
    rem_chunk: int
    total: float
    current: int
    def __init__(self, rem_input: _Optional[int] = ..., rem_chunk: _Optional[int] = ..., total: _Optional[float] = ..., current: _Optional[int] = ...) -> None: ...

class Considered(_message.Message):
    __slots__ = ("count", "first_number", "first_time", "number", "time", "policy", "in_effect", "position", "waiting", "prefix", "wanted", "extend", "chunked", "verdict", "refusal", "need", "left", "before", "after", "loaded")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TIME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    IN_EFFECT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    CHUNKED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    count: int
    first_number: int
    first_time: float
    number: int
    time: float
    policy: str
    in_effect: str
    position: int
    waiting: int
    prefix: int
    wanted: int
    extend: int
    chunked: bool
    verdict: str
    refusal: str
    need: int
    left: float
    before: PassAccounts
    after: PassAccounts
    loaded: int
    def __init__(self, count: _Optional[int] = ..., first_number: _Optional[int] = ..., first_time: _Optional[float] = ..., number: _Optional[int] = ..., time: _Optional[float] = ..., policy: _Optional[str] = ..., in_effect: _Optional[str] = ..., position: _Optional[int] = ..., waiting: _Optional[int] = ..., prefix: _Optional[int] = ..., wanted: _Optional[int] = ..., extend: _Optional[int] = ..., chunked: _Optional[bool] = ..., verdict: _Optional[str] = ..., refusal: _Optional[str] = ..., need: _Optional[int] = ..., left: _Optional[float] = ..., before: _Optional[_Union[PassAccounts, _Mapping]] = ..., after: _Optional[_Union[PassAccounts, _Mapping]] = ..., loaded: _Optional[int] = ...) -> None: ...

class ChunkForward(_message.Message):
    __slots__ = ("end", "tokens", "time")
    END_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    end: int
    tokens: int
    time: float
    def __init__(self, end: _Optional[int] = ..., tokens: _Optional[int] = ..., time: _Optional[float] = ...) -> None: ...

class EventTime(_message.Message):
    __slots__ = ("event", "time", "count")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    event: str
    time: float
    count: int
    def __init__(self, event: _Optional[str] = ..., time: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class RoomRecord(_message.Message):
    __slots__ = ("room", "epoch", "prompt_tokens", "arrived", "age", "outcome", "events", "chunks", "passes", "not_reached", "left_out", "deferred")
    ROOM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    NOT_REACHED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    room: int
    epoch: int
    prompt_tokens: int
    arrived: float
    age: float
    outcome: str
    events: _containers.RepeatedCompositeFieldContainer[EventTime]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkForward]
    passes: _containers.RepeatedCompositeFieldContainer[Considered]
    not_reached: int
    left_out: int
    deferred: int
    def __init__(self, room: _Optional[int] = ..., epoch: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., arrived: _Optional[float] = ..., age: _Optional[float] = ..., outcome: _Optional[str] = ..., events: _Optional[_Iterable[_Union[EventTime, _Mapping]]] = ..., chunks: _Optional[_Iterable[_Union[ChunkForward, _Mapping]]] = ..., passes: _Optional[_Iterable[_Union[Considered, _Mapping]]] = ..., not_reached: _Optional[int] = ..., left_out: _Optional[int] = ..., deferred: _Optional[int] = ...) -> None: ...
