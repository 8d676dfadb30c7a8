"""Named errors for what input or the surroundings can cause. Our own invariants are asserts.

    KVRelayError                  code         whose fault
    ├── InvalidRequest            INVALID_ARGUMENT     the caller's
    │   └── InvalidField          names field, value and limit
    ├── Unauthenticated           UNAUTHENTICATED      the caller's: no key or token, or a wrong one
    ├── PermissionDenied          PERMISSION_DENIED    the caller's: its key is not one for this
    ├── NotFound                  NOT_FOUND            the caller's: no such model, node or request
    ├── AlreadyExists             ALREADY_EXISTS       the caller's: a live request has that id
    ├── Refused                   FAILED_PRECONDITION  the node's: its layout or role does not fit the cluster
    ├── Overloaded                RESOURCE_EXHAUSTED   nobody's: come back later (carries retry_after)
    ├── DeadlineExceeded          DEADLINE_EXCEEDED    names the phase that was too slow
    ├── Cancelled                 CANCELLED            the caller asked
    ├── Unavailable               UNAVAILABLE          a node or a pool is gone (carries phase)
    ├── OurMistake                INTERNAL             ours: names the incident to look up in the log
    └── ConfigError               (start-up only)      the operator's: lists every mistake at once
        └── ModelRefused          (engine.core.model_store) this model cannot be served, and why

Each carries what a caller may act on, as strings, in `metadata`; `rpc.errors` turns them into statuses with
google.rpc.ErrorInfo. `code` is the name of the gRPC status, so that this module needs no grpc.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

__all__ = [
    "AlreadyExists",
    "Cancelled",
    "ConfigError",
    "DeadlineExceeded",
    "InvalidField",
    "InvalidRequest",
    "KVRelayError",
    "NotFound",
    "OurMistake",
    "Overloaded",
    "PermissionDenied",
    "Refused",
    "Unauthenticated",
    "Unavailable",
]


class KVRelayError(Exception):
    """Root of the tree. `reason` is a stable UPPER_SNAKE_CASE word for programs, the message is for people."""

    code = "INTERNAL"
    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, retry_after: float | None = None, **metadata: str):
        super().__init__(message)
        self.reason = reason or type(self).reason
        self.retry_after = retry_after  # seconds
        self.metadata = metadata


class InvalidRequest(KVRelayError):
    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"


class InvalidField(InvalidRequest):
    """One field is outside its limit."""

    reason = "INVALID_FIELD"

    def __init__(self, field: str, value: object, limit: str, *, reason: str | None = None):
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        super().__init__(f"{field} is {shown}; allowed: {limit}", reason=reason, field=field, value=shown, limit=limit)


class Unauthenticated(KVRelayError):
    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(KVRelayError):
    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class NotFound(KVRelayError):
    code = "NOT_FOUND"
    reason = "NOT_FOUND"


class AlreadyExists(KVRelayError):
    code = "ALREADY_EXISTS"
    reason = "ALREADY_EXISTS"


class Refused(KVRelayError):
    code = "FAILED_PRECONDITION"
    reason = "NODE_REFUSED"


class Overloaded(KVRelayError):
    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class DeadlineExceeded(KVRelayError):
    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"


class Cancelled(KVRelayError):
    code = "CANCELLED"
    reason = "CANCELLED"


class Unavailable(KVRelayError):
    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class OurMistake(KVRelayError):
    """What others are told of an exception that is none of these. Its text belongs in the log, under the incident."""

    def __init__(self) -> None:
        incident = secrets.token_hex(6)
        super().__init__(f"internal error; look for incident {incident} in the server's log", incident=incident)


class ConfigError(KVRelayError):
    """Start-up configuration is wrong. The message lists every mistake found, one a line."""

    code = "FAILED_PRECONDITION"
    reason = "CONFIG"

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)
