"""Who is calling: TLS for servers and channels, the guard before every handler, and what callers show.

The guard looks at a call's metadata and at nothing else. A call it turns away is answered before one of its messages is
read. It keeps hashes of the join token and of the API keys, never what they are made of.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import grpc

from engine.core.access import ApiKey, BootstrapAccess, DialTls, digest, find_key
from engine.core.errors import ConfigError, PermissionDenied, Unauthenticated

__all__ = [
    "API_KEY_METADATA",
    "CHANNEL_OPTIONS",
    "JOIN_TOKEN_METADATA",
    "JOIN_TOKEN_REASONS",
    "Caller",
    "Guard",
    "Handler",
    "caller_name",
    "open_channel",
    "open_channel_aio",
    "refusal",
    "server_credentials",
]

API_KEY_METADATA = "authorization"  # "Bearer <key>"
JOIN_TOKEN_METADATA = "kvrelay-join-token"
JOIN_TOKEN_REASONS = (_NO_TOKEN, _WRONG_TOKEN) = ("NO_JOIN_TOKEN", "WRONG_JOIN_TOKEN")
_SCHEME = "Bearer"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # quoted: generic in the stubs only
Options: TypeAlias = Sequence[tuple[str, Any]]

# Of every channel to a bootstrap service: one that hangs, or whose host vanished, is noticed meanwhile.
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # of the same pings; a minute, unless said here, too
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


# ---- TLS ----


def _read(file: Path | None) -> bytes | None:
    """Raises ConfigError: the file was there when the configuration was checked."""
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from error


def server_credentials(cert: Path | None, key: Path | None, client_ca: Path | None) -> grpc.ServerCredentials | None:
    """What a server listens with; None for no TLS. With `client_ca`, callers must show a certificate of it."""
    chain, private, authority = _read(cert), _read(key), _read(client_ca)
    if chain is None or private is None:
        return None
    return grpc.ssl_server_credentials([(private, chain)], authority, require_client_auth=authority is not None)


def _channel_credentials(tls: DialTls) -> grpc.ChannelCredentials | None:
    if tls.tls_ca is None:
        return None
    return grpc.ssl_channel_credentials(_read(tls.tls_ca), _read(tls.tls_key), _read(tls.tls_cert))


def open_channel_aio(address: str, tls: DialTls, options: Options) -> grpc.aio.Channel:
    credentials = _channel_credentials(tls)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_channel(address: str, tls: DialTls, api_key: str | None, options: Options) -> grpc.Channel:
    """A blocking channel whose calls show the API key, if there is one."""
    credentials = _channel_credentials(tls)
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    return channel if api_key is None else grpc.intercept_channel(channel, _ShowKey(api_key))


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]] | None
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any


class _ShowKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Adds the key to every call. (grpc's own call credentials work with TLS only.)"""

    def __init__(self, api_key: str):
        self._shown = (API_KEY_METADATA, f"{_SCHEME} {api_key}")

    def _with_key(self, details: Any) -> Any:
        metadata = (*(details.metadata or ()), self._shown)
        return _CallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready, details.compression
        )

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)


# ---- the guard ----


class Caller(Enum):
    """Who may call a service."""

    CLIENT = auto()  # with an API key, if there are keys
    OPERATOR = auto()  # with an admin key, if there are keys
    NODE = auto()  # with the join token, if there is one


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Turns callers away before their messages are read. `services` that are not named here are open to everybody."""

    def __init__(self, access: BootstrapAccess, services: Mapping[str, Caller]):
        self._keys = access.keys()
        self._token = None if access.join_token is None else digest(access.join_token)
        self._services = services

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        service = handler_call_details.method.removeprefix("/").partition("/")[0]
        try:
            self._check(self._services.get(service), _pairs(handler_call_details.invocation_metadata))
        except (Unauthenticated, PermissionDenied) as error:
            return refusal(error)
        return await continuation(handler_call_details)

    def _check(self, caller: Caller | None, metadata: Mapping[str, str]) -> None:
        if caller is Caller.NODE and self._token is not None:
            shown = metadata.get(JOIN_TOKEN_METADATA)
            if shown is None:
                raise Unauthenticated(
                    "nodes need a join token here (--join-token-file, KVRELAY_JOIN_TOKEN)", reason=_NO_TOKEN
                )
            if not hmac.compare_digest(digest(shown), self._token):
                raise Unauthenticated("the join token is not the one of this cluster", reason=_WRONG_TOKEN)
        elif caller in (Caller.CLIENT, Caller.OPERATOR) and self._keys:
            key = _key_shown(self._keys, metadata)
            if caller is Caller.OPERATOR and not key.admin:
                raise PermissionDenied(f"the API key {key.name!r} is no admin key", reason="NOT_ADMIN", key=key.name)

    def key(self, context: grpc.aio.ServicerContext[Any, Any]) -> ApiKey | None:
        """The API key that a client's call shows; None where none is needed."""
        return _key_shown(self._keys, _pairs(context.invocation_metadata())) if self._keys else None


def caller_name(key: ApiKey | None, context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Whose call a client's call is, by name of the API key that it shows; where none is needed, by IP address."""
    return context.peer().rpartition(":")[0] if key is None else key.name


def _pairs(metadata: Any) -> dict[str, str]:
    """Metadata as text; of binary values and of a key given twice nobody here asks."""
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _key_shown(keys: Sequence[ApiKey], metadata: Mapping[str, str]) -> ApiKey:
    """Raises Unauthenticated."""
    shown = metadata.get(API_KEY_METADATA)
    if shown is None:
        raise Unauthenticated("an API key is needed here (--api-key-file, KVRELAY_API_KEY)", reason="NO_API_KEY")
    scheme, _, secret = shown.partition(" ")
    key = find_key(keys, secret)
    if key is None or scheme.lower() != _SCHEME.lower():
        raise Unauthenticated("the API key is not known here", reason="WRONG_API_KEY")
    return key


def refusal(error: Exception) -> Handler:
    """A handler that reads nothing, whatever kind of call it answers, and raises `error`."""

    async def refuse(requests: AsyncIterator[Any], context: object) -> NoReturn:
        raise error

    return grpc.stream_stream_rpc_method_handler(refuse, request_deserializer=bytes)
