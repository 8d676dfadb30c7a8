"""What scheduling passes leave behind: for each request what they decided about it, and a file of all of them.

Both are made from `PassRecord`s, and know nothing of the loop that runs the passes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from pathlib import Path

import orjson

from engine.core.errors import ConfigError
from engine.core.journal import Considered, RoomJournal
from prefill_service.records import PassRecord

__all__ = ["PassJournal", "PassLog"]

log = logging.getLogger("kvrelay.prefill")


class PassJournal(RoomJournal):
    """A journal of rooms on a node that holds passes."""

    def on_pass(self, record: PassRecord) -> None:
        """Note what a pass decided. Passes are numbered without a gap, and all of them must come by here."""
        self._number = record.number
        for position, attempt in record.placed():
            considered = Considered(
                1, record.number, record.time, record.number, record.time, record.policy, record.in_effect,
                position, record.waiting, attempt.prefix, attempt.loaded, attempt.wanted, attempt.extend,
                attempt.chunked, attempt.verdict, attempt.refusal or "", attempt.need, attempt.room,
                attempt.before, attempt.after,
            )  # fmt: skip
            self.considered(attempt.request.key, considered)
        for request in record.deferred:
            self.deferred(request.key)


class PassLog:
    """A file that gets one line of JSON a pass. Several nodes may write to one file, as lines are written whole.

    An engine must not end for want of disk space, nor wait for whoever reads a pipe: the first error while writing is
    logged, and ends the log.
    Raises ConfigError when the file cannot be opened.
    """

    def __init__(self, path: Path, node_id: str):
        self._node_id = node_id
        self._path = path
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            self._file = io.FileIO(path, "ab", opener=lambda name, _: os.open(name, flags, 0o666))
        except OSError as error:
            raise ConfigError([f"log_passes: cannot write {path}: {error.strerror}"]) from error

    def on_pass(self, record: PassRecord) -> None:
        if self._file.closed:
            return
        line = orjson.dumps(pass_to_json(record, self._node_id), option=orjson.OPT_APPEND_NEWLINE)
        try:
            if self._file.write(line) != len(line):
                raise OSError("the line was cut off")
        except OSError as error:
            log.error("passes are logged no more", extra={"file": str(self._path), "error": str(error)})
            self.close()

    def close(self) -> None:
        """May be called twice."""
        with contextlib.suppress(OSError):  # what a network file system has kept until now is lost
            self._file.close()


def pass_to_json(record: PassRecord, node_id: str) -> dict[str, object]:
    """A line of the log: tokens, and seconds. `unix` is now by the wall clock, `time` the pass's by the node's own."""
    return {
        "node": node_id,
        "number": record.number,
        "time": record.time,
        "unix": time.time(),
        "policy": record.policy,
        "in_effect": record.in_effect,
        "bootstrap": record.bootstrap,
        "waiting": record.waiting,
        "in_flight": record.in_flight,
        "batch_tokens": record.batch_tokens,
        "cached_tokens": record.cached_tokens,
        "attempts": [
            {
                "request_id": attempt.request.task.request_id,
                "room": str(attempt.request.key),
                "position": position,
                "prefix": attempt.prefix,
                "loaded": attempt.loaded,
                "wanted": attempt.wanted,
                "extend": attempt.extend,
                "chunked": attempt.chunked,
                "verdict": attempt.verdict,
                "refusal": attempt.refusal,
                "need": attempt.need,
                "left": attempt.room,
                "before": attempt.before,
                "after": attempt.after,
            }
            for position, attempt in record.placed()
        ],
    }
