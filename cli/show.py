"""What people see: aligned tables, sizes, where the time of an answer went, and a sign of life while waiting."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from engine.core.errors import KVRelayError

if TYPE_CHECKING:  # `kvrelay --help` comes by here and needs no protobuf
    from kvrelay.v1 import generation_pb2 as pb

__all__ = ["Waiting", "bytes_text", "describe_error", "printable", "say", "table", "timing_table", "wide_table"]

SIGN_OF_LIFE_S = 2.0

_PHASES = (
    ("queue", "in the bootstrap queue, until a decode or a unified node was asked"),
    ("grant_wait", "until the decode node had set pages aside"),
    ("prefill_wait", "until the node that prefills took it up"),
    ("prefill", "reading the prompt"),
    ("handoff", "last chunk computed to first decode step"),
    ("first_step", "first decode step, and messages on their way"),
    ("decode", "writing the rest of the answer"),
)


def say(line: str) -> None:
    """A line about progress: on stderr, so that stdout holds answers only. Never fails: nothing depends on progress
    being seen, and what follows it, stopping a cluster say, must happen when the terminal or pipe has gone too.
    """
    try:
        sys.stderr.write(f"{line}\n")  # in one piece: several threads say things
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def printable(text: str) -> str:
    """Text that a terminal shows as it is: others choose request ids, and some characters would clear the screen."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def describe_error(error: KVRelayError) -> str:
    """One line: status, message, and what the server added to it."""
    message = printable(" ".join(str(error).split()))
    added = {key: printable(value) for key, value in error.metadata.items()}
    details = [f"{key}={value}" for key, value in added.items() if value not in message]
    if error.retry_after is not None:
        details.append(f"retry after {error.retry_after:g} s")
    return f"{error.code}: {message}" + (f" ({', '.join(details)})" if details else "")


def table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as aligned columns, the first `left` of them to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]

    def aligned(row: Sequence[str]) -> str:
        cells = zip(row, widths, strict=True)
        return "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(cells)).rstrip()

    return "\n".join(aligned(row) for row in rows)


def wide_table(rows: Sequence[Sequence[str]], left: int = 1, width: int = 105) -> str:
    """`table`; columns for which `width` is too little go on below, beside the first column again."""
    columns = list(zip(*rows, strict=True))
    blocks, used = [[0]], max(map(len, columns[0]))
    for index, column in enumerate(columns[1:], 1):
        needed = 2 + max(map(len, column))
        if used + needed > width:
            blocks.append([0])
            used = max(map(len, columns[0]))
        blocks[-1].append(index)
        used += needed
    parts = [table([[row[i] for i in block] for row in rows], sum(i < left for i in block)) for block in blocks]
    return "\n\n".join(parts)


def bytes_text(count: float) -> str:
    """A size in decimal units: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def timing_table(answers: Sequence[tuple[str, pb.Finished]]) -> str:
    """Where the time went, in seconds, one column an answer."""
    ended = [finished for _, finished in answers]
    times = [finished.timing for finished in ended]
    usages = [finished.usage for finished in ended]
    rows = [["seconds", *(title for title, _ in answers), ""]]
    rows += [[f"  {p.replace('_', ' ')}", *(f"{_phase(t, p):.4f}" for t in times), what] for p, what in _PHASES]
    rows += [
        ["  total", *(f"{t.total:.4f}" for t in times), "arrival to the end"],
        ["  first token", *(f"{t.first_token:.4f}" for t in times), "arrival to the first token"],
        ["prompt tokens", *(str(u.prompt_tokens) for u in usages), ""],
        ["  of these cached", *(str(u.cached_tokens) for u in usages), ""],
        ["output tokens", *(str(u.output_tokens) for u in usages), ""],
        ["  a second", *(_decode_rate(u, t) for u, t in zip(usages, times, strict=True)), "while in decode"],
        ["relayed", *(bytes_text(t.relayed_bytes) for t in times), "KV pages, prefill to decode node"],
        ["  GB/s", *(_rate(t.relayed_bytes / 1e9, t.relay) for t in times), "while writes were in progress"],
    ]
    # The remarks are the last column, to the left; so they are joined on after the numbers are aligned.
    numbers = table([row[:-1] for row in rows]).splitlines()
    width = max(map(len, numbers))
    return "\n".join(f"{line.ljust(width)}   {row[-1]}".rstrip() for line, row in zip(numbers, rows, strict=True))


def _phase(timing: pb.Timing, phase: str) -> float:
    """Seconds in a phase. The first step is what no other phase accounts for."""
    if phase != "first_step":
        return float(getattr(timing, phase))
    accounted: float = sum(getattr(timing, name) for name, _ in _PHASES if name != phase)
    return max(0.0, timing.total - accounted)


def _decode_rate(usage: pb.Usage, timing: pb.Timing) -> str:
    """Tokens a second. `decode` begins at the decode node's first token, which is the second one; a unified node makes
    the first one, too. Of an answer of several attempts it is not known how many tokens came in it.
    """
    unified = "" != timing.prefill_node == timing.decode_node
    tokens = usage.output_tokens - (1 if unified else 2)
    return _rate(tokens, timing.decode) if timing.attempts <= 1 and tokens > 0 else "-"


def _rate(amount: float, seconds: float) -> str:
    return f"{amount / seconds:.2f}" if seconds > 0 else "-"


class Waiting:
    """Says every two seconds what is being waited for, until left or `done` is called.

    `detail` may add what is known at that moment.
    """

    def __init__(self, what: str, detail: Callable[[], str] = lambda: ""):
        self._what = what
        self._detail = detail
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.done()
        self._thread.join()

    def done(self) -> None:
        self._over.set()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(SIGN_OF_LIFE_S):
            say(f"  {self._what}: {time.monotonic() - began:.0f} s{self._detail()}")
