"""Named errors to gRPC statuses, and back.

Details travel as google.rpc.ErrorInfo (reason and metadata) and, where trying again makes sense,
google.rpc.RetryInfo, in the standard `grpc-status-details-bin` trailer. What is not a KVRelayError becomes INTERNAL
with an id; its text stays in the log.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine.core import errors as named
from engine.core.errors import InvalidRequest, KVRelayError, OurMistake

__all__ = ["ErrorInterceptor", "from_rpc_error"]

DOMAIN = "kvrelay"
MAX_MESSAGE, MAX_VALUE = 400, 128  # characters of what others may have written
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # quoted: generic in the stubs only
log = logging.getLogger("kvrelay.rpc")

_DETAILS = "grpc-status-details-bin"
_CLASSES: dict[grpc.StatusCode, type[KVRelayError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: named.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: named.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: named.PermissionDenied,
    grpc.StatusCode.NOT_FOUND: named.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: named.AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: named.Refused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: named.Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: named.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: named.Cancelled,
    grpc.StatusCode.UNAVAILABLE: named.Unavailable,
}


def _shown(text: str, most: int) -> str:
    """Trailers may be 8 KiB in all, and carry the message twice; beyond that the client would not see the status."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _packed(error: KVRelayError) -> bytes:
    """The serialized google.rpc.Status of an error."""
    details = [any_pb2.Any()]
    metadata = {key: _shown(value, MAX_VALUE) for key, value in error.metadata.items()}
    details[0].Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        retry = any_pb2.Any()
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        details.append(retry)
    code = cast(tuple[int, str], grpc.StatusCode[error.code].value)[0]
    status = status_pb2.Status(code=code, message=_shown(str(error), MAX_MESSAGE), details=details)
    return cast(bytes, status.SerializeToString())


def from_rpc_error(error: grpc.RpcError) -> KVRelayError:
    """The named error behind a failed call, with reason, metadata and retry_after as far as the server gave them."""
    call = cast(grpc.Call, error)
    code = call.code()
    result = _CLASSES.get(code, KVRelayError).__new__(_CLASSES.get(code, KVRelayError))
    KVRelayError.__init__(result, call.details() or code.name.lower())
    result.code = code.name
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # a proxy or an old server answered with inconsistent details: the code still holds
        return result
    for detail in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            result.reason, result.metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            result.retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return result


# The call has its status, or its client is gone or its server has stopped and nobody can be told of any.
_OVER = (grpc.RpcError, grpc.aio.BaseError)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str) -> NoReturn:
    if isinstance(error, NotImplementedError):  # what a generated servicer says of a method that nobody has written
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented here")
    if not isinstance(error, KVRelayError):
        told = OurMistake()
        log.error("handler failed", extra={**told.metadata, "method": method}, exc_info=error)
        error = told
    details = ((_DETAILS, _packed(error)),)
    await context.abort(grpc.StatusCode[error.code], _shown(str(error), MAX_MESSAGE), trailing_metadata=details)
    raise AssertionError("abort always raises")


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request whose bytes are no message. grpc itself would answer UNKNOWN."""

    problem: str


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Malformed(str(error))

    return read


def _checked(request: Any) -> Any:
    """The request, or each of a stream of requests, as long as it is a message. Raises InvalidRequest."""
    if isinstance(request, _Malformed):
        raise InvalidRequest(f"the request is not a valid message: {request.problem}", reason="MALFORMED")
    return _checked_stream(request) if hasattr(request, "__aiter__") else request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _guard_response(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(_checked(request), context)
        except _OVER:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return guarded


def _guard_stream(behaviour: Callable[..., Any], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            responses = behaviour(_checked(request), context)
            if inspect.isawaitable(responses):  # not a generator: it writes to the context
                await responses
                return
            async for response in responses:
                yield response
        except _OVER:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return guarded


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps every handler so that what it raises reaches the client as a status."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return cast(Handler, None)  # unknown method: grpc answers UNIMPLEMENTED
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        guard: Any = _guard_stream if handler.response_streaming else _guard_response
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped = make(
            guard(getattr(handler, kind), handler_call_details.method),
            request_deserializer=_lenient(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return cast(Handler, wrapped)
