"""A synchronous client of a running cluster: one channel, the stubs, and errors by name.

An answer outlives the front door that carries it. The client keeps the tokens it was given; when the front door is
gone it asks the next one to go on behind them (`resumed_token_ids`), under the same request id and with the same seed.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc

from engine.core.access import ClientAccess
from engine.core.clock import Clock, monotonic
from engine.core.config import address_problems, load, option
from engine.core.errors import AlreadyExists, DeadlineExceeded, KVRelayError, Overloaded, Unavailable
from engine.core.sampling import FinishReason
from engine.core.types import Role
from kvrelay.v1 import generation_pb2 as pb
from kvrelay.v1 import types_pb2
from kvrelay.v1.admin_pb2_grpc import AdminStub
from kvrelay.v1.generation_pb2_grpc import GenerationStub
from rpc import security
from rpc.errors import from_rpc_error

__all__ = ["ROLES", "Answer", "Client", "ClientConfig", "Retry", "finish_reason", "named_error", "open_channel"]

CALL_TIMEOUT_S = 30.0  # of calls that need no model
PATIENCE_S = 10.0  # without a word of any front door, once one has been lost: then the answer is given up
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0  # whenever all front doors have been tried
UNREACHABLE = "UNREACHABLE"  # reason of an error that no server sent
_GONE = {UNREACHABLE, "DRAINING", Unavailable.reason}  # the last: of a connection that broke, as gRPC names no reason
ROLES = {
    types_pb2.ROLE_PREFILL: Role.PREFILL,
    types_pb2.ROLE_DECODE: Role.DECODE,
    types_pb2.ROLE_UNIFIED: Role.UNIFIED,
}

_TLS_REASON = re.compile(r"OPENSSL_internal:(\w+)")
_FINISH = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Connection."""

    bootstrap: tuple[str, ...] = option(
        ("127.0.0.1:7070",),
        "bootstrap addresses, host:port: the first that answers; an answer whose bootstrap is lost goes on at the next",
    )
    access: ClientAccess = field(default_factory=ClientAccess)

    def problems(self) -> Iterator[str]:
        yield from address_problems("bootstrap", self.bootstrap)


_OPEN = ClientAccess()
_CHANNEL_OPTIONS = (
    *security.CHANNEL_OPTIONS,
    ("grpc.min_reconnect_backoff_ms", 3_000),  # the longest that one attempt to connect takes
)


def open_channel(address: str, access: ClientAccess = _OPEN) -> grpc.Channel:
    return security.open_channel(address, access.tls, access.api_key, _CHANNEL_OPTIONS)


def finish_reason(finished: pb.Finished) -> str:
    """The reason as a word, "stop" for instance."""
    return str(_FINISH.get(finished.reason, "unspecified"))


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `text` is all of it; `finished` has usage and timing."""

    started: pb.Started
    finished: pb.Finished
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class Client:
    """One channel to a bootstrap service: to that at `address`, or to one of the `others` when an answer needs that.

    Errors of calls made inside `with client.errors()` are KVRelayErrors.
    """

    def __init__(self, address: str, access: ClientAccess = _OPEN, others: Sequence[str] = ()):
        self._addresses = tuple(dict.fromkeys((address, *others)))
        self._access = access
        self._connect(address)

    @classmethod
    def from_flags(cls, flags: object, env: Mapping[str, str]) -> Client:
        """Client of the addresses that the parsed arguments or the environment name."""
        config = load(ClientConfig, file=None, env=env, flags=vars(flags))
        first, *others = config.bootstrap
        return cls(first, config.access, others)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._channel.close()

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise named_error(error, self.address, ": is a cluster running? (kvrelay up)") from error

    def answer(self, request: pb.GenerateRequest, show: Callable[[str], None], deadline: float | None = None) -> Answer:
        """Stream one answer, giving each piece of text to `show`, from however many front doors. `deadline` in seconds.

        A KeyboardInterrupt cancels the request. Raises KVRelayError when the request fails.
        """
        asked = pb.GenerateRequest()
        asked.CopyFrom(request)
        asked.request_id = request.request_id or secrets.token_hex(8)
        asked.response.token_ids = True
        if not asked.sampling.HasField("seed"):
            asked.sampling.seed = secrets.randbits(64)
        until = math.inf if deadline is None else monotonic() + deadline
        partial, retry = _Partial(show), Retry(len(self._addresses))
        while True:
            del asked.resumed_token_ids[:]
            asked.resumed_token_ids.extend(partial.token_ids)
            asked.fingerprint = partial.started.fingerprint if partial.started else request.fingerprint
            try:
                return self._stream(asked, partial, retry, until)
            except KVRelayError as error:
                if retry.lost and isinstance(error, AlreadyExists):
                    # Our own stream, whose end this front door has not noticed yet.
                    with contextlib.suppress(grpc.RpcError):
                        self.generation.Abort(pb.AbortRequest(request_id=asked.request_id), timeout=CALL_TIMEOUT_S)
                self._go_on(retry, error, until)

    def model(self) -> pb.GetModelResponse:
        """What is served, said by the first front door that answers; calls from now on go there."""
        retry = Retry(len(self._addresses))
        while True:
            try:
                with self.errors():
                    model: pb.GetModelResponse = self.generation.GetModel(pb.GetModelRequest(), timeout=CALL_TIMEOUT_S)
                    return model
            except KVRelayError as error:
                self._go_on(retry, error)

    def _stream(self, asked: pb.GenerateRequest, partial: _Partial, retry: Retry, until: float) -> Answer:
        """The rest of an answer, from the present front door."""
        timeout = None if until == math.inf else max(0.0, until - monotonic())
        call: Any = self.generation.Generate(asked, timeout=timeout)
        try:
            with self.errors():
                for response in call:
                    if not response.HasField("started"):  # that alone brings an answer no nearer to its end
                        retry.progress()
                    if (answer := partial.take(response)) is not None:
                        return answer
        finally:
            call.cancel()  # does nothing to a call that has ended
        raise Unavailable(f"{self.address} ended the answer before it was finished")

    def _go_on(self, retry: Retry, error: KVRelayError, until: float = math.inf) -> None:
        """Connect to the next front door, in due time. Raises the error when it is final."""
        delay = retry.after(error)
        if delay is None:
            raise error
        time.sleep(max(0.0, min(delay, until - monotonic())))
        self._channel.close()
        self._connect(self._addresses[(self._addresses.index(self.address) + 1) % len(self._addresses)])

    def _connect(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address, self._access)
        self.generation = GenerationStub(self._channel)
        self.admin = AdminStub(self._channel)


@dataclass(slots=True)
class _Partial:
    """What has come of an answer, over however many streams."""

    show: Callable[[str], None]
    started: pb.Started | None = None  # of the first stream
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, response: pb.GenerateResponse) -> Answer | None:
        """The whole answer, when this was the end of it."""
        match response.WhichOneof("event"):
            case "started":
                self.started = self.started or response.started
            case "delta":
                self.token_ids += response.delta.token_ids
                self.logprobs += response.delta.logprobs
                self._text(response.delta.text)
            case "finished":
                self._text(response.finished.text)
                text, started = "".join(self.pieces), self.started or pb.Started()
                return Answer(started, response.finished, text, tuple(self.token_ids), tuple(self.logprobs))
        return None

    def _text(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.show(text)


class Retry:
    """Whether and when what one front door did not do is asked of the next.

    One that cannot be reached makes way for the next, once round. From the loss of one that had been reached (its
    connection broke, or it shuts down) they are tried again and again, since that one may come back, until `PATIENCE_S`
    have passed without a word of any. Meanwhile those that have no node yet, are full, or still hold the stream that
    broke may do better soon. Every other error is an answer, and final.
    """

    def __init__(self, front_doors: int, clock: Clock = monotonic):
        self._front_doors = front_doors
        self._clock = clock
        self.lost = False  # one that had been reached
        self._failed = 0  # tries in a row that brought nothing
        self._since = 0.0  # when the first of these failed

    def progress(self) -> None:
        """A front door has sent something."""
        self._failed = 0

    def after(self, error: KVRelayError) -> float | None:
        """Seconds to wait before the next try after one that ended with `error`; None: there is none."""
        gone = isinstance(error, Unavailable) and error.reason in _GONE
        soon = isinstance(error, AlreadyExists | Overloaded) or (
            isinstance(error, Unavailable) and error.retry_after is not None
        )
        if not gone and not (soon and self.lost):
            return None
        self.lost = self.lost or (gone and error.reason != UNREACHABLE)
        if self._failed == 0:
            self._since = self._clock()
        self._failed += 1
        rounds, further = divmod(self._failed, self._front_doors)
        if rounds and not (self.lost and self._clock() - self._since < PATIENCE_S):
            return None
        return 0.0 if further else min(FIRST_BACKOFF_S * 2.0 ** (rounds - 1), MAX_BACKOFF_S)


def named_error(error: grpc.RpcError, address: str, hint: str = "") -> KVRelayError:
    """The server's error; or, when no server answered, one that says so in plain words, and the hint."""
    named = from_rpc_error(error)
    message = str(named)
    if isinstance(named, Unavailable) and message.startswith(("failed to connect", "errors resolving")):
        why = message.rpartition(": ")[2].rstrip("]")
        if tls := _TLS_REASON.search(message):
            why, hint = f"TLS: {tls[1]}", ""
        elif why == "Socket closed":
            hint = ": does it want TLS, or a client certificate? (--tls-ca, --tls-cert)"
        return Unavailable(f"cannot reach {address} ({why}){hint}", reason=UNREACHABLE)
    if isinstance(named, DeadlineExceeded) and not named.metadata:  # ours passed first
        return DeadlineExceeded(f"{address} did not finish in the time given")
    return named
