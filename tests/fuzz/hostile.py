"""Messages and calls that nobody in good faith would send: Hypothesis strategies made from protobuf descriptors.

Nothing here knows the fields of a message. `messages` fills any message with anything; `near` changes a field or two of
a valid one, so that what comes gets past the first checks; `payloads` makes bytes of either, some of them broken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

__all__ = ["LARGE", "Call", "calls", "each", "messages", "near", "payloads"]

LARGE = 20_000  # items or characters of what is called huge
DEPTH = 3  # of messages in messages

M = TypeVar("M", bound=Message)
T = TypeVar("T")

_INTS: dict[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 3e38, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    ":",
    "a:b",
    "\x00",
    "\n\r\t",
    "%s%n{}",
    "../../etc/passwd",
    "decoding",
    "no-such-phase",
    "größe 模型 🙂",
    "\u202e\ufeff\uffff",
    "x" * 129,
    "x" * 257,
    "é" * 9000,
    "x" * LARGE,
)
_BYTES = (b"", b"\x00", b"\xff" * 15, b"\x00" * 16, b"k" * 17, b"\x00" * LARGE)
_UNKNOWN = b"\xa2\x06\x02hi"  # field 100
_GARBAGE = (b"\x00", b"\xff", b"\xff" * 11, b"\x0a\xff\xff\xff\xff\x0f", b"\x0b" * 300, bytes(range(256)))


# Made once each: to make a strategy costs more than to draw from it.
_integers = functools.cache(st.integers)


@functools.cache
def _choice(options: tuple[T, ...]) -> st.SearchStrategy[T]:
    return st.sampled_from(options)


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated)


def _number(draw: st.DrawFn, low: int, high: int) -> int:
    edges = (low, high, 0, 1, 2, 3, 5, 100, high // 2 + 1)
    return draw(_integers(low, high)) if draw(_integers(0, 1)) else draw(_choice(edges))


def _value(draw: st.DrawFn, field: Any, depth: int) -> Any:
    """Anything that one item of this field can hold."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return _message(draw, field.message_type._concrete_class, depth - 1)
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw(st.booleans())
        case FieldDescriptor.CPPTYPE_ENUM:
            return draw(_choice((*range(-1, len(field.enum_type.values) + 1), 2**31 - 1)))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return draw(_choice(_FLOATS))
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return draw(_choice(_BYTES))
        case FieldDescriptor.CPPTYPE_STRING:
            return draw(_choice(_TEXTS))
        case kind:
            return _number(draw, *_INTS[kind])


def _fill(draw: st.DrawFn, message: Message, field: Any, depth: int) -> None:
    """Give a field anything in place of what it holds."""
    message.ClearField(field.name)
    if not _repeated(field):
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(_value(draw, field, depth))
        else:
            setattr(message, field.name, _value(draw, field, depth))
        return
    items = [_value(draw, field, depth) for _ in range(draw(_choice((0, 1, 1, 2, 3))))]
    small = items and field.cpp_type not in (FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE)
    if small and draw(_integers(0, 15)) == 0:
        items *= LARGE // len(items)  # a few drawn numbers, very many times
    getattr(message, field.name).extend(items)


def _message(draw: st.DrawFn, kind: type[M], depth: int) -> M:
    message = kind()
    for field in kind.DESCRIPTOR.fields if depth > 0 else ():
        if draw(st.booleans()):
            _fill(draw, message, field, depth)
    return message


@st.composite
def messages(draw: st.DrawFn, kind: type[M]) -> M:
    """Every field set or not, to anything."""
    return _message(draw, kind, DEPTH - 1)


def _change(draw: st.DrawFn, message: Message, depth: int) -> None:
    """Change one thing somewhere in a message."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    if not fields or depth == 0:
        return
    set_now: list[Any] = [field for field, _ in message.ListFields()]
    of_those = bool(set_now) and draw(_integers(0, 3)) > 0
    field = draw(st.sampled_from(set_now if of_those else fields))
    deeper: list[Any] = []
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE and field in set_now:
        deeper = list(getattr(message, field.name)) if _repeated(field) else [getattr(message, field.name)]
    if deeper and draw(_integers(0, 4)) > 0:
        _change(draw, draw(st.sampled_from(deeper)), depth - 1)
    elif draw(_integers(0, 5)) == 0:
        message.ClearField(field.name)
    else:
        _fill(draw, message, field, depth)


@st.composite
def near(draw: st.DrawFn, valid: M) -> M:
    """A valid message with up to three things changed."""
    message = type(valid)()
    message.CopyFrom(valid)
    for _ in range(draw(_choice((0, 1, 1, 1, 2, 3)))):
        _change(draw, message, DEPTH)
    return message


@st.composite
def payloads(draw: st.DrawFn, kind: type[Message], valid: Sequence[Message] = (), oversized: int = 0) -> bytes:
    """Bytes of a message: nearly valid, of any content, or no message at all; rarely more than `oversized` of them."""
    choice = draw(_integers(0, 99))
    if choice == 0 and oversized:
        return b"\x00" * (oversized + 1)
    if choice < 8:
        garbage: bytes = draw(_choice(_GARBAGE))
        return garbage
    if valid and choice < 90:
        message: Message = draw(near(draw(st.sampled_from(tuple(valid)))))
    else:
        message = draw(messages(kind))
    data = bytes(message.SerializeToString())
    match draw(_integers(0, 19)):
        case 0:
            return data[: draw(_integers(0, len(data)))]
        case 1 if data:
            at = draw(_integers(0, min(len(data), 400) - 1))
            return data[:at] + bytes([data[at] ^ draw(_integers(1, 255))]) + data[at + 1 :]
        case 2:
            return data + _UNKNOWN
    return data


@dataclass(frozen=True, slots=True)
class Call:
    """One call as raw bytes, whatever kind of method it is. How it ends is the caller's doing, or the server's."""

    method: str  # full path
    payloads: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    half_close: bool = True  # say that no more is coming
    patience: float | None = None  # seconds until it is cancelled; None: it must end by itself

    def __repr__(self) -> str:
        shown = ", ".join(one[:200].hex() + ("…" if len(one) > 200 else "") for one in self.payloads)
        return f"Call({self.method}, [{shown}], {self.metadata}, {self.half_close=}, {self.patience=})"


_METADATA: tuple[tuple[tuple[str, str | bytes], ...], ...] = (
    (),
    (),
    (("kvrelay-node", ""),),
    (("kvrelay-node", "nobody:1"), ("kvrelay-node", ":")),
    (("authorization", "Bearer " + "x" * 500),),
    (("te", "gzip"),),
    (("x-bin", b"\x00\xff" * 100),),
    (("long", "y" * 3000),),
)


@st.composite
def calls(
    draw: st.DrawFn, method: str, payload: st.SearchStrategy[bytes], *, streams: bool, endless: bool = False
) -> Call:
    """streams: it takes several messages. endless: the server does not end it."""
    count = draw(st.sampled_from((0, 1, 2, 3) if streams else (1,) * 14 + (0, 2)))
    half_close = bool(draw(_integers(0, 7)))
    patience = draw(st.sampled_from((None, None, None, 0.0, 0.001, 0.02)))
    # grpc itself never answers a call of a unary method that ends before its one message: its client has to give up.
    if patience is None and (endless or not half_close or not (streams or count)):
        patience = 0.05
    made = tuple(draw(payload) for _ in range(count))
    return Call(method, made, draw(_choice(_METADATA)), half_close, patience)


def each(strategy: st.SearchStrategy[T], examples: int, start: int, check: Callable[[T], None]) -> None:
    """Call `check` on so many examples, the same ones every time, until it raises.

    Nothing is made smaller, as the state that examples meet is shared, or printed, as they may be huge.
    """
    failures: list[Exception] = []

    @seed(start)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: T) -> None:
        if failures:
            return
        try:
            check(example)
        except Exception as error:
            failures.append(error)

    run()
    if failures:
        raise failures[0]
