"""Who may do what: options for TLS, join token, API keys and limits of clients, and what can be checked of them.

    client ── API key (metadata `authorization`) ──► Generation, and Admin if it is an admin key
    node ──── join token (metadata `kvrelay-join-token`) ──► Bootstrap

Keys are kept as SHA-256 of the key, one `name sha256-hex [admin]` a line. A key has 256 random bits, so one SHA-256 is
enough: slow or salted hashes are for what people choose, which can be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
import ssl
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.config import option

__all__ = [
    "ApiKey",
    "BootstrapAccess",
    "ClientAccess",
    "DialTls",
    "NodeAccess",
    "digest",
    "find_key",
    "is_loopback",
    "new_key",
    "parse_api_keys",
]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECRET = re.compile(r"[!-~]{1,1024}")  # it travels in a header, where nothing else may stand


# ---- keys ----


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a client's key."""

    name: str
    sha256: bytes = field(repr=False)
    admin: bool = False

    @property
    def line(self) -> str:
        """As it stands in the keys file."""
        return f"{self.name} {self.sha256.hex()}" + (" admin" if self.admin else "")


def digest(secret: str) -> bytes:
    """What a server keeps of a key or token."""
    return hashlib.sha256(secret.encode()).digest()


def new_key(name: str, admin: bool) -> tuple[str, ApiKey]:
    """A new random key, and what a server is told of it. ValueError for a name that no key may have."""
    _check_name(name)
    key = f"kvrelay-{secrets.token_urlsafe(32)}"
    return key, ApiKey(name, digest(key), admin)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError("a name is 1 to 64 letters, digits, dots, dashes and underscores")


def parse_api_keys(text: str) -> tuple[ApiKey, ...]:
    """Keys from lines `name sha256-hex [admin]`, also several on one line with commas between; `#` begins a comment.

    ValueError with every mistake, a line each; of a line that is wrong only its number is told.
    """
    keys: dict[str, ApiKey] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        for entry in (entry.split() for entry in line.partition("#")[0].split(",")):
            if not entry:
                continue
            try:
                key = _parse_entry(entry)
                if key.name in keys:
                    raise ValueError(f"a second key of the name {key.name}")
                if same := next((one.name for one in keys.values() if one.sha256 == key.sha256), None):
                    raise ValueError(f"the key of {same} once more: whose call it shows could not be told")
                keys[key.name] = key
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if not keys and not problems:
        problems.append("no key in it")
    if problems:
        raise ValueError("\n".join(problems))
    return tuple(keys.values())


def _parse_entry(words: Sequence[str]) -> ApiKey:
    name, sha256, *rest = (*words, "")
    _check_name(name)
    if not _SHA256.fullmatch(sha256) or rest not in ([""], ["admin", ""]):
        raise ValueError("not `name sha256-hex [admin]`, as `kvrelay key NAME` prints it")
    return ApiKey(name, bytes.fromhex(sha256), bool(rest[:-1]))


def find_key(keys: Iterable[ApiKey], presented: str) -> ApiKey | None:
    """The key that was presented. Takes as long whichever it is."""
    wanted, found = digest(presented), None
    for key in keys:
        if hmac.compare_digest(key.sha256, wanted):
            found = key
    return found


# ---- addresses ----


def is_loopback(listen: str) -> bool:
    """Whether "host:port" can be reached from this machine only: for a name, all that it resolves to."""
    host = listen.rpartition(":")[0].strip("[]")
    if not host:
        return False
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


# ---- options ----


def _certificate_problems(cert: Path | None, key: Path | None) -> Iterator[str]:
    if (cert is None) != (key is None):
        yield "tls_cert and tls_key: one is of no use without the other"
    elif cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
        except OSError as error:  # ssl.SSLError is one
            yield f"tls_cert {cert} and tls_key {key}: {_said(error, 'not a PEM certificate and its key')}"


def _ca_problems(name: str, ca: Path | None) -> Iterator[str]:
    if ca is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca)
        except OSError as error:
            yield f"{name} {ca}: {_said(error, 'not a PEM file of certificates')}"


def _said(error: OSError, otherwise: str) -> str:
    return otherwise if isinstance(error, ssl.SSLError) else str(error.strerror)


def _secret_problems(name: str, secret: str | None) -> Iterator[str]:
    if secret is not None and not _SECRET.fullmatch(secret):
        yield f"{name}: allowed are 1 to 1024 printable ASCII characters and no space"


@dataclass(frozen=True, slots=True)
class BootstrapAccess:
    """Access."""

    tls_cert: Path | None = option(None, "PEM file of the certificate shown to clients and nodes; none: no TLS")
    tls_key: Path | None = option(None, "PEM file of its private key")
    tls_client_ca: Path | None = option(
        None, "PEM file: clients and nodes must show a certificate of one of these authorities; none: they need not"
    )
    join_token: str | None = option(None, "what nodes must know to attach; none: anyone may", secret=True)
    join_token_file: Path | None = option(None, "file that holds the join token")
    api_keys: str | None = option(
        None, "lines `name sha256-hex [admin]`, or with commas between; none: no key is needed", secret=True
    )
    api_keys_file: Path | None = option(None, "file of such lines; `kvrelay key` makes them")
    client_rate: float | None = option(
        None, "Generate and (de)tokenize calls a second of one client, in the long run; none: no limit", low=0.001
    )
    client_burst: int = option(10, "with client_rate: so many at once after a pause", low=1)
    client_concurrency: int | None = option(None, "live Generate calls of one client; none: no limit", low=1)
    insecure_listen: bool = option(
        False, "listen also on addresses that others can reach, without join token and API keys"
    )

    def problems(self) -> Iterator[str]:
        yield from _certificate_problems(self.tls_cert, self.tls_key)
        yield from _ca_problems("tls_client_ca", self.tls_client_ca)
        if self.tls_client_ca is not None and self.tls_cert is None:
            yield "tls_client_ca: needs tls_cert and tls_key"
        yield from _secret_problems("join_token", self.join_token)
        if self.api_keys is not None:
            try:
                parse_api_keys(self.api_keys)
            except ValueError as error:
                yield from (f"api_keys: {problem}" for problem in str(error).splitlines())

    def listen_problems(self, listen: str) -> Iterator[str]:
        """Why the bootstrap service must not listen there."""
        if self.insecure_listen or (self.join_token and self.api_keys) or is_loopback(listen):
            return
        if not listen.rpartition(":")[0]:
            yield f"listen is {listen!r}; allowed: host:port"
            return
        told = f"listen is {listen!r}, which others may reach"
        if not self.join_token:
            yield f"{told}: configure a join token (join_token_file), or say --insecure-listen"
        if not self.api_keys:
            yield f"{told}: configure API keys (`kvrelay key`, api_keys_file), or say --insecure-listen"

    def keys(self) -> tuple[ApiKey, ...]:
        return () if self.api_keys is None else parse_api_keys(self.api_keys)


@dataclass(frozen=True, slots=True)
class DialTls:
    """TLS."""

    tls_ca: Path | None = option(
        None, "PEM file: dial the bootstrap service with TLS, verified by these authorities; none: no TLS"
    )
    tls_cert: Path | None = option(
        None, "PEM file of the certificate to show there; a node's own health service shows it too"
    )
    tls_key: Path | None = option(None, "PEM file of its private key")

    def problems(self) -> Iterator[str]:
        yield from _ca_problems("tls_ca", self.tls_ca)
        yield from _certificate_problems(self.tls_cert, self.tls_key)
        if self.tls_ca is None and self.tls_cert is not None:
            yield "tls_cert: needs tls_ca, or the bootstrap would be dialled without TLS"


@dataclass(frozen=True, slots=True)
class NodeAccess:
    """Access."""

    tls: DialTls = field(default_factory=DialTls)
    join_token: str | None = option(None, "shown to the bootstrap service when attaching", secret=True)
    join_token_file: Path | None = option(None, "file that holds the join token")

    def problems(self) -> Iterator[str]:
        yield from _secret_problems("join_token", self.join_token)


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """Access."""

    tls: DialTls = field(default_factory=DialTls)
    api_key: str | None = option(None, "shown to the bootstrap service with every call", secret=True)
    api_key_file: Path | None = option(None, "file that holds the API key")

    def problems(self) -> Iterator[str]:
        yield from _secret_problems("api_key", self.api_key)
