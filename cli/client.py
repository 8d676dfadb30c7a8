"""A synchronous client of a running cluster: one channel, the stubs, and errors by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from engine.core.config import load, option
from engine.core.errors import DeadlineExceeded, KVRelayError, Unavailable
from engine.core.sampling import FinishReason
from engine.core.types import Role
from kvrelay.v1 import generation_pb2 as pb
from kvrelay.v1 import types_pb2
from kvrelay.v1.admin_pb2_grpc import AdminStub
from kvrelay.v1.generation_pb2_grpc import GenerationStub
from rpc.errors import from_rpc_error

__all__ = ["ROLES", "Answer", "Client", "ClientConfig", "finish_reason", "named_error", "open_channel"]

CALL_TIMEOUT_S = 30.0  # of calls that need no model
ROLES = {
    types_pb2.ROLE_PREFILL: Role.PREFILL,
    types_pb2.ROLE_DECODE: Role.DECODE,
    types_pb2.ROLE_UNIFIED: Role.UNIFIED,
}

_FINISH = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Connection."""

    bootstrap: tuple[str, ...] = option(("127.0.0.1:7070",), "bootstrap address, host:port; of several, the first")

    def problems(self) -> Iterator[str]:
        if not self.bootstrap:
            yield "bootstrap: a host:port is needed"


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(
        address,
        options=(
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ),
    )


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
    """One channel to a bootstrap service. Errors of calls made inside `with client.errors()` are KVRelayErrors."""

    def __init__(self, address: str):
        self.address = address
        self._channel = open_channel(address)
        self.generation = GenerationStub(self._channel)
        self.admin = AdminStub(self._channel)

    @classmethod
    def from_flags(cls, flags: object, env: Mapping[str, str]) -> Client:
        """Client of the address that the parsed arguments or the environment name."""
        return cls(load(ClientConfig, file=None, env=env, flags=vars(flags)).bootstrap[0])

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
        """Stream one answer, giving each piece of text to `show`. `deadline` in seconds.

        A KeyboardInterrupt cancels the request. Raises KVRelayError when the request fails.
        """
        started, finished = pb.Started(), None
        pieces: list[str] = []
        token_ids: list[int] = []
        logprobs: list[float] = []

        def take(text: str) -> None:
            if text:
                pieces.append(text)
                show(text)

        call: Any = self.generation.Generate(request, timeout=deadline)
        try:
            with self.errors():
                for response in call:
                    match response.WhichOneof("event"):
                        case "started":
                            started = response.started
                        case "delta":
                            token_ids += response.delta.token_ids
                            logprobs += response.delta.logprobs
                            take(response.delta.text)
                        case "finished":
                            finished = response.finished
                            take(finished.text)
        finally:
            call.cancel()  # does nothing to a call that has ended
        if finished is None:
            raise Unavailable(f"{self.address} ended the answer before it was finished")
        return Answer(started, finished, "".join(pieces), tuple(token_ids), tuple(logprobs))


def named_error(error: grpc.RpcError, address: str, hint: str = "") -> KVRelayError:
    """The server's error; or, when no server answered, one that says so in plain words, and the hint."""
    named = from_rpc_error(error)
    message = str(named)
    if isinstance(named, Unavailable) and message.startswith(("failed to connect", "errors resolving")):
        return Unavailable(f"cannot reach {address} ({message.rpartition(': ')[2].rstrip(']')}){hint}")
    if isinstance(named, DeadlineExceeded) and not named.metadata:  # ours passed first
        return DeadlineExceeded(f"{address} did not finish in the time given")
    return named
