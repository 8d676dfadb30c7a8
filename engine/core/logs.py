"""Structured logs: one event name, some fields, one line on stderr, as JSON or as text.

    log = logging.getLogger("kvrelay.engine")
    log.info("request admitted", extra={"request_id": request_id, "room": str(key), "cached_tokens": 64})

This is the standard logging module with one formatter, so what libraries log comes out in the same form. Usual fields:
request_id, room, node, role. (The module itself refuses a field named like an attribute of its records, e.g. "name".)
Formatting never raises: what cannot be written as it is is written as its repr.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from engine.core.config import option

__all__ = ["LogConfig", "LogFormat", "LogLevel", "setup_logging"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormat(enum.StrEnum):
    JSON = "json"
    TEXT = "text"


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logging."""

    log_format: LogFormat = option(LogFormat.TEXT, "of log lines on stderr")
    log_level: LogLevel = option(LogLevel.INFO, "least level that is logged")


class _Formatter(logging.Formatter):
    def __init__(self, log_format: LogFormat, process_fields: Mapping[str, object]):
        super().__init__()
        self._render = _as_json if log_format is LogFormat.JSON else _as_text
        self._process_fields = dict(process_fields)

    def format(self, record: logging.LogRecord) -> str:
        try:
            event = record.getMessage()
        except Exception:  # a library's message and its arguments do not fit each other
            event = f"{record.msg} {record.args!r}"
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
            **self._process_fields,
            **{key: value for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return self._render(line)


def _as_json(line: Mapping[str, object]) -> str:
    try:
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except Exception:  # e.g. a lone surrogate, an integer beyond 64 bits, or a field whose str() raises
        return orjson.dumps({_printable(key): _printable(value) for key, value in line.items()}).decode()


def _as_text(line: Mapping[str, object]) -> str:
    rest = {key: _printable(value) for key, value in line.items() if value is not None}
    trace = rest.pop("exception", None)
    time, level, logger, event = (rest.pop(key) for key in ("time", "level", "logger", "event"))
    shown = "".join(
        f" {key}={value if value and value.isprintable() and ' ' not in value else repr(value)}"
        for key, value in rest.items()
    )
    return f"{time[11:23]} {level.upper():<7} {logger}: {event}{shown}" + (f"\n{trace}" if trace else "")


def _printable(value: object) -> str:
    """Text of any value that every stream can take."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        return str(value).encode("utf-8", "backslashreplace").decode()
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


def setup_logging(config: LogConfig, **process_fields: object) -> None:
    """Send all that this process logs to stderr in one format. `process_fields` (role, node) go on every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(config.log_format, process_fields))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a closed stderr must not end a request
    threading.excepthook = lambda args: root.error(
        "thread ended by an exception",
        exc_info=(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback),
        extra={"in_thread": args.thread.name if args.thread else None},
    )
