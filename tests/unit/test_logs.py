"""Log lines: one JSON object each, whatever is thrown at them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.core.logs import LogConfig, LogFormat, LogLevel, setup_logging

log = logging.getLogger("kvrelay.test")


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hook, raising = root.handlers[:], root.level, threading.excepthook, logging.raiseExceptions
    yield
    root.handlers[:], threading.excepthook, logging.raiseExceptions = handlers, hook, raising
    root.setLevel(level)
    logging.captureWarnings(False)


def read(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_fields_of_line_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(LogFormat.JSON), role="prefill", node="p1")
    log.info("request admitted", extra={"request_id": "r-1", "cached_tokens": 64})
    (line,) = read(capsys)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "kvrelay.test",
        "event": "request admitted",
        "role": "prefill",
        "node": "p1",
        "request_id": "r-1",
        "cached_tokens": 64,
    }


def test_exceptions_are_one_field(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(LogFormat.JSON))
    try:
        raise ValueError("no\nsuch thing")
    except ValueError:
        log.exception("pass failed")
    (line,) = read(capsys)
    assert line["event"] == "pass failed"
    assert "Traceback" in line["exception"]
    assert line["exception"].endswith("ValueError: no\nsuch thing")


class Stubborn:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize("value", ["\ud800", 1 << 70, Stubborn(), {Stubborn(): 1}, float("nan"), {1: b"x"}])
@pytest.mark.parametrize("log_format", LogFormat)
def test_any_value_is_written(capsys: pytest.CaptureFixture[str], log_format: LogFormat, value: object) -> None:
    setup_logging(LogConfig(log_format))
    log.info("odd", extra={"value": value})
    log.info("%d of %d", 1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "odd" in lines[0]
    if log_format is LogFormat.JSON:
        assert json.loads(lines[0])["event"] == "odd"


def test_text_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(LogFormat.TEXT, LogLevel.WARNING), role="decode")
    log.info("not shown")
    log.warning("pages are short", extra={"free": 0, "why": "two words", "error": None, "chat": True})
    (line,) = capsys.readouterr().err.splitlines()
    assert line[12:] == " WARNING kvrelay.test: pages are short role=decode free=0 why='two words' chat=true"


def test_thread_that_dies_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogConfig(LogFormat.JSON))

    def fail() -> None:
        raise ValueError("gone")

    thread = threading.Thread(target=fail, name="helper")
    thread.start()
    thread.join()
    (line,) = read(capsys)
    assert line["in_thread"] == "helper"
    assert "ValueError: gone" in line["exception"]
