"""The `kvrelay` command as a process: signals, pipes, what it imports and when."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.canned_front import Front
from tests.helpers.without_torch import run_without_torch

ROOT = Path(__file__).parents[3]


def environment() -> dict[str, str]:
    """One in which the packages are found without being installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "proto", "kernels"))}


@contextlib.contextmanager
def process(*argv: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def test_ctrl_c_cancels_the_request(front: Front) -> None:
    with process("generate", "for ever", "--bootstrap", front.address) as child:
        assert child.stdout is not None
        assert child.stdout.read(9) == "for ever "  # streamed, not held back until the end
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=10)
    assert (out, err) == ("\n", "")
    assert child.returncode == 130
    assert front.generation.cancelled.wait(10)


def test_ctrl_c_stops_an_answer_and_not_the_chat(front: Front) -> None:
    with process("chat", "--bootstrap", front.address) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("for ever\n")
        child.stdin.flush()
        assert child.stdout.read(9) == "for ever "
        child.send_signal(signal.SIGINT)
        assert front.generation.cancelled.wait(10)
        out, err = child.communicate("again\n", timeout=10)
    assert (out, err) == ("\nagain end\n", "(stopped)\n")
    assert child.returncode == 0
    assert [m.content for m in front.generation.requests[1].chat.messages] == ["for ever", "for ever ", "again"]


def test_reader_that_leaves_early(front: Front) -> None:
    with process("generate", "a b c", "--bootstrap", front.address) as child:
        assert child.stdout is not None
        child.stdout.close()
        assert child.wait(timeout=10) in (0, 1)
        assert child.stderr is not None
        assert child.stderr.read() == ""


def test_node_says_that_it_starts_before_torch_is_imported(tmp_path: Path) -> None:
    done = run_without_torch(tmp_path, "decode", "--bootstrap", "127.0.0.1:1, 127.0.0.1:2")
    first, *dialled, last = done.stderr.splitlines()
    assert " starting role=decode node=" in first
    assert first.endswith(" bootstrap=127.0.0.1:1,127.0.0.1:2")
    assert len(dialled) == 2
    assert all(" bootstrap not there yet " in line for line in dialled)
    assert last == "torch is imported"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, cli.main\n"
        "try: cli.main.main(sys.argv[1:], {})\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    for argv, absent in (
        (["--help"], {"grpc", "google.protobuf", "torch", "transformers", "nixl", "numpy"}),
        (["generate", "--help"], {"torch", "transformers", "nixl", "numpy"}),
        (["health", "127.0.0.1:1"], {"torch", "transformers", "nixl", "numpy"}),
        (["prefill", "--help"], {"torch", "transformers", "nixl"}),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, *argv], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert not absent & set(done.stderr.split())
