"""The client commands against a real gRPC server with canned answers."""

# ruff: noqa: N802  # methods of a servicer are named as in the .proto

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.main import main
from engine.core.access import find_key, parse_api_keys
from engine.core.errors import InvalidField, NotFound, Overloaded
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, types_pb2
from kvrelay.v1 import generation_pb2 as pb
from rpc.server import RpcServer
from tests.helpers.without_torch import decode_without_torch

ROOT = Path(__file__).parents[2]


class CannedGeneration(generation_pb2_grpc.GenerationServicer):
    """Echoes the last message or text, word by word. Some prompts do something else."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.hurry = threading.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        prompt = request.text or (request.chat.messages[-1].content if request.chat.messages else "ids here")
        if prompt == "fail":
            raise InvalidField("sampling.top_p", 7.0, "above 0, at most 1")
        if prompt == "busy":
            raise Overloaded("the queue is full", retry_after=1.5, phase="queued")
        if request.model == "other":
            raise NotFound("model 'other' is not served here")
        yield pb.GenerateResponse(started=pb.Started(request_id=request.request_id or "r-1", prompt_tokens=3))
        if prompt == "slow":
            await asyncio.to_thread(self.hurry.wait, 10)
        for index, word in enumerate(prompt.split()):
            yield pb.GenerateResponse(delta=pb.Delta(index=index, token_ids=[100 + index], text=f"{word} "))
        if prompt == "for ever":
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        yield pb.GenerateResponse(
            finished=pb.Finished(
                reason=types_pb2.FINISH_REASON_STOP,
                stop_token=2,
                text="end",
                usage=pb.Usage(prompt_tokens=3, cached_tokens=1, output_tokens=7),
                timing=pb.Timing(total=0.5, prefill=0.25, decode=0.1, relayed_bytes=2_000_000, relay=0.001, attempts=1),
            )
        )

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(name="tiny", max_context=2048, page_size=16)


class CannedAdmin(admin_pb2_grpc.AdminServicer):
    def __init__(self) -> None:
        self.drains: list[admin_pb2.DrainRequest] = []
        self.problems: list[str] = []
        self.set_aside: list[str] = []
        self.explanation = explanation()
        self.known_id = "r-7"
        self.busy = False

    def listing(self, *, running: int = 1, draining: bool = False, gone: bool = False) -> admin_pb2.ListNodesResponse:
        stats = types_pb2.NodeStats(
            pages_total=64, pages_free=50, pages_cached=14, running=running, serving=not draining, draining=draining,
            cached_tokens_total=30, computed_tokens_total=90, relayed_bytes_total=1_500_000,
        )  # fmt: skip
        node = admin_pb2.Node(node_id="prefill-0", incarnation="abc", role=types_pb2.ROLE_PREFILL, stats=stats)
        node.problems.extend(self.problems)
        node.set_aside.extend(self.set_aside)
        nodes = [] if gone else [node]
        if self.busy:
            numbers = {f.name: 12345 for f in stats.DESCRIPTOR.fields if f.name not in ("serving", "draining")}
            stats = types_pb2.NodeStats(serving=True, **numbers)  # type: ignore[arg-type]  # all are numbers
            nodes.append(admin_pb2.Node(node_id="decode-0", role=types_pb2.ROLE_DECODE, stats=stats))
        return admin_pb2.ListNodesResponse(nodes=nodes, queued_requests=2, live_requests=5)

    async def ListNodes(self, request: admin_pb2.ListNodesRequest, context: Any) -> admin_pb2.ListNodesResponse:
        return self.listing()

    async def ListRequests(self, request: Any, context: Any) -> admin_pb2.ListRequestsResponse:
        live = admin_pb2.LiveRequest(
            request_id=self.known_id, state="decoding", prefill_node="prefill-0", output_tokens=9
        )
        return admin_pb2.ListRequestsResponse(requests=[live])

    async def Drain(self, request: admin_pb2.DrainRequest, context: Any) -> admin_pb2.DrainResponse:
        self.drains.append(request)
        return admin_pb2.DrainResponse()

    async def Explain(self, request: admin_pb2.ExplainRequest, context: Any) -> admin_pb2.ExplainResponse:
        if request.request_id != self.known_id:
            raise NotFound("no node knows of a request", request_id=request.request_id)
        return self.explanation

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[admin_pb2.ListNodesResponse]:
        yield self.listing(running=2, draining=True)
        yield self.listing(running=1, draining=True)
        yield self.listing(gone=True)


def explanation() -> admin_pb2.ExplainResponse:
    """Of a request that waited for memory, was computed in two chunks, and whose first decode node was lost."""
    full = types_pb2.PassAccounts(rem_input=16384, rem_chunk=2048, total=1920, current=1920)
    before = types_pb2.PassAccounts(rem_input=16384, rem_chunk=2048, total=9000, current=9000)
    after = types_pb2.PassAccounts(rem_input=14336, rem_chunk=0, total=6936, current=6936)
    passes = [
        types_pb2.Considered(
            count=329, first_number=12, first_time=0.5, number=340, time=1.5, policy="lpm", in_effect="fcfs",
            position=3, waiting=17, wanted=2064, verdict="NO_TOKEN", refusal="memory", need=2080, left=1920,
            before=full, after=full,
        ),
        types_pb2.Considered(
            count=1, first_number=341, first_time=2, number=341, time=2, policy="lpm", in_effect="lpm", position=1,
            waiting=2, prefix=16, loaded=16, wanted=2064, extend=2048, chunked=True, verdict="OTHER",
            before=before, after=after,
        ),
        types_pb2.Considered(
            count=1, first_number=342, first_time=3, number=342, time=3, policy="lpm", in_effect="lpm",
            waiting=4, prefix=2064, wanted=16, extend=16, verdict="CONTINUE", before=before, after=before,
        ),
    ]  # fmt: skip

    def room(times: dict[str, float], epoch: int, outcome: str, **fields: Any) -> types_pb2.RoomRecord:
        events = [types_pb2.EventTime(event=name, time=at, count=1) for name, at in times.items()]
        return types_pb2.RoomRecord(
            room=9,
            epoch=epoch,
            prompt_tokens=2080,
            arrived=1e9 + epoch,
            age=9,
            outcome=outcome,
            events=events,
            **fields,
        )

    prefill = room(
        {"arrived": 0, "granted": 0.25, "admitted": 2, "token_0": 3.25, "last_write": 3.5, "ended": 3.5},
        0,
        "finished",
        chunks=[
            types_pb2.ChunkForward(end=2064, tokens=2048, time=2.5),
            types_pb2.ChunkForward(end=2080, tokens=16, time=3.25),
        ],
        passes=passes,
        not_reached=7,
        left_out=2,
    )
    lost = room({"arrived": 0, "granted": 0.25, "ended": 1}, 0, "aborted: a node was lost")
    again = room({"arrived": 0, "granted": 0.5, "complete": 4, "first_step": 4.25}, 1, "")
    return admin_pb2.ExplainResponse(
        nodes=[
            admin_pb2.ExplainedNode(node_id="prefill-0", role=types_pb2.ROLE_PREFILL, rooms=[prefill]),
            admin_pb2.ExplainedNode(node_id="decode-0", role=types_pb2.ROLE_DECODE, rooms=[lost, again]),
        ],
        silent=["decode-1"],
        attempts=[
            admin_pb2.AttemptRecord(
                room=9, epoch=0, prefill_node="prefill-0", decode_node="decode-0", started=1e9 - 0.5, seconds=1.5,
                phase="transferring", outcome="decode node decode-0 was lost while transferring: its session ended",
            ),
            admin_pb2.AttemptRecord(
                room=9, epoch=1, prefill_node="prefill-0", decode_node="decode-0", first_index=12, started=1e9 + 1,
                seconds=8, phase="decoding",
            ),
        ],
    )  # fmt: skip


class Front:
    """The server, in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.generation = CannedGeneration()
        self.admin = CannedAdmin()
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _add(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServicer_to_server(self.generation, server)
        admin_pb2_grpc.add_AdminServicer_to_server(self.admin, server)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = RpcServer("127.0.0.1:0", ["kvrelay.v1.Generation"], self._add)
        await server.start()
        server.set_serving(True)
        self.address = f"127.0.0.1:{server.port}"
        self._stop = asyncio.Event()
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)

    def __enter__(self) -> Front:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def front() -> Iterator[Front]:
    with Front() as front:
        yield front


@pytest.fixture
def run(front: Front) -> Callable[..., int]:
    def run(*argv: str) -> int:
        return main(argv, {"KVRELAY_BOOTSTRAP": front.address})

    return run


Run = Callable[..., int]
Capture = pytest.CaptureFixture[str]

# ---- generate ----


def test_generate_prints_the_text(run: Run, front: Front, capsys: Capture) -> None:
    assert (
        run("generate", "one two", "--temperature", "0", "--seed", str(2**64 - 1), "--stop", "a,b", "--stop", "c") == 0
    )
    assert capsys.readouterr().out == "one two end\n"
    (request,) = front.generation.requests
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert request.sampling.seed == 2**64 - 1
    assert list(request.stopping.stop) == ["a,b", "c"]
    assert not request.HasField("priority")
    assert not request.HasField("ttft_target_seconds")


def test_a_target_for_the_first_token_is_passed_on(run: Run, front: Front) -> None:
    assert run("generate", "one two", "--ttft-target", "0.5") == 0
    assert front.generation.requests[0].ttft_target_seconds == 0.5


def test_generate_from_standard_input_and_ids(
    run: Run, front: Front, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("from a file")
    with (tmp_path / "prompt").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run("generate", "-") == 0
    assert run("generate", "--token-ids", "1, 2,3") == 0
    assert capsys.readouterr().out == "from a file end\nids here end\n"
    assert list(front.generation.requests[1].token_ids.ids) == [1, 2, 3]


def test_generate_json_and_timing(run: Run, capsys: Capture) -> None:
    assert run("generate", "one two", "--json", "--timing", "--request-id", "mine") == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["text"] == "one two end"
    assert answer["token_ids"] == [100, 101]
    assert answer["request_id"] == "mine"
    assert (answer["finish_reason"], answer["matched"]) == ("stop", 2)
    assert answer["usage"] == {"prompt_tokens": 3, "cached_tokens": 1, "output_tokens": 7}
    assert answer["timing"]["prefill"] == 0.25
    lines = {line.split("  ")[1]: line.split() for line in err.splitlines() if line.startswith("  ")}
    assert lines["prefill"][1] == "0.2500"
    assert lines["GB/s"][1] == "2.00"


def test_times_add_up_and_the_rate_is_of_the_time_decode_spans(run: Run, capsys: Capture) -> None:
    assert run("generate", "one two", "--timing") == 0
    lines = [line.strip().split("  ") for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    values = {line[0]: next(cell.strip() for cell in line[1:] if cell) for line in lines}
    phases = list(values)[: list(values).index("total")]
    assert sum(float(values[phase]) for phase in phases) == pytest.approx(float(values["total"]))
    assert values["first step"] == "0.1500"
    assert values["a second"] == "50.00"  # of 7 tokens, 5 came in the 0.1 s after the decode node's first


class Terminal(io.StringIO):
    """A terminal that tells when something is waited for."""

    def __init__(self, seen: threading.Event):
        super().__init__()
        self._seen = seen

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "waiting for the first token" in text:
            self._seen.set()
        return super().write(text)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sign_of_life_before_the_first_token(
    run: Run, front: Front, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("cli.show.SIGN_OF_LIFE_S", 0.01)
    monkeypatch.setattr("sys.stderr", Terminal(front.generation.hurry))
    assert run(command, "slow") == 0
    assert front.generation.hurry.is_set()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["fail"], "INVALID_ARGUMENT: sampling.top_p is 7.0; allowed: above 0, at most 1"),
        (["busy"], "RESOURCE_EXHAUSTED: the queue is full (phase=queued, retry after 1.5 s)"),
        (["hi", "--model", "other"], "NOT_FOUND: model 'other' is not served here"),
        (["for ever", "--deadline", "0.2"], "DEADLINE_EXCEEDED: {address} did not finish in the time given"),
    ],
)
def test_failed_request_is_one_clear_line(run: Run, front: Front, capsys: Capture, argv: list[str], line: str) -> None:
    assert run("generate", *argv) == 1
    assert capsys.readouterr().err == f"kvrelay: {line.format(address=front.address)}\n"


def test_nobody_listens(capsys: Capture) -> None:
    assert main(["generate", "hi", "--bootstrap", "127.0.0.1:1"], {}) == 1
    assert capsys.readouterr().err == (
        "kvrelay: UNAVAILABLE: cannot reach 127.0.0.1:1 (Connection refused): is a cluster running? (kvrelay up)\n"
    )


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "hi", "--token-ids", "1"],
        ["generate", "--token-ids", "-1"],
        ["generate", "hi", "--top-k", "-1"],
        ["generate", "hi", "--deadline", "nan"],
        ["generate", "hi", "--deadline", "-1"],
        ["generate", "hi", "--priority", str(2**31)],
        ["up", "--prefill", "0"],
    ],
)
def test_wrong_usage(argv: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv, {})
    assert left.value.code == 2


@pytest.mark.parametrize("command", ["bootstrap", "prefill", "decode", "unified", "up"])
def test_every_group_of_options_has_a_title(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"], {})
    assert "Config(" not in capsys.readouterr().out


def test_a_variable_that_is_no_option_is_warned_of_whatever_the_command(run: Run, capsys: Capture) -> None:
    env = {"KVRELAY_KVMEMORY": "8GiB", "KVRELAY_MAX_RUNNING": "9", "KVRELAY_CONFIG": "of nodes"}
    assert main(["prepare", "no-such-model"], env | {"KVRELAY_MODEL_DIR": "/nowhere"}) != 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warned == ["kvrelay: warning: KVRELAY_KVMEMORY: no such option, did you mean KVRELAY_KV_MEMORY?"]


def test_wrong_configuration_lists_everything(capsys: Capture) -> None:
    env = {"KVRELAY_PAGE_SIZE": "0", "KVRELAY_DTYPE": "int3"}
    assert main(["prefill", "--kv-memory", "lots"], env) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_prompt_that_is_no_text(run: Run, capsys: Capture) -> None:
    assert run("generate", "\udcff") == 2
    assert "not valid UTF-8" in capsys.readouterr().err


# ---- key ----


@pytest.mark.parametrize("flags", [[], ["--admin"]])
def test_key_prints_a_key_and_the_line_that_knows_it(capsys: Capture, flags: list[str]) -> None:
    assert main(["key", "alice", *flags], {}) == 0
    secret, line = capsys.readouterr().out.splitlines()
    (key,) = parse_api_keys(line)
    assert (key.name, key.admin) == ("alice", bool(flags))
    assert find_key([key], secret) == key


def test_key_of_a_name_that_is_none(capsys: Capture) -> None:
    assert main(["key", "a b"], {}) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvrelay: NAME: ")


@pytest.mark.parametrize("argv", [["generate", "hi"], ["up"], ["bootstrap"], ["decode"]])
@pytest.mark.parametrize("flag", ["--api-key", "--api-keys", "--join-token"])
def test_no_secret_is_given_as_a_flag(capsys: Capture, argv: list[str], flag: str) -> None:
    with pytest.raises(SystemExit) as left:
        main([*argv, flag, "x"], {})
    assert left.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


# ---- chat ----


def test_chat_once(run: Run, front: Front, capsys: Capture) -> None:
    assert run("chat", "--system", "be brief", "hello you") == 0
    assert capsys.readouterr().out == "hello you end\n"
    messages = front.generation.requests[0].chat.messages
    assert [(m.role, m.content) for m in messages] == [("system", "be brief"), ("user", "hello you")]


def test_conversation_remembers_until_reset(
    run: Run, front: Front, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "typed").write_text("first\n\nfail\nsecond\n/what\n/reset\nthird\n/quit\nnever\n")
    with (tmp_path / "typed").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert run("chat", "--system", "s") == 0
    out, err = capsys.readouterr()
    assert out == "first end\nsecond end\nthird end\n"
    assert "sampling.top_p" in err
    assert "/reset forgets" in err
    asked = [[m.content for m in request.chat.messages] for request in front.generation.requests]
    assert asked == [
        ["s", "first"],
        ["s", "first", "first end", "fail"],
        ["s", "first", "first end", "second"],
        ["s", "third"],
    ]


# ---- status, drain, health ----


def test_status(run: Run, capsys: Capture) -> None:
    assert run("status", "--requests") == 0
    out = capsys.readouterr().out
    assert "tiny at 127.0.0.1:" in out
    assert "5 live, 2 of them waiting" in out
    header, row = (line.split() for line in out.splitlines()[3:5])
    assert row[:6] == ["prefill-0", "prefill", "serving", "64", "50", "14"]
    assert header[:6] == ["node", "role", "state", "pages", "free", "cached"]
    assert header[6:] == ["running", "cache", "hits", "relayed", "seen"]  # what is zero everywhere is left out
    assert "25%" in row
    assert "r-7" in out


def test_status_of_a_busy_cluster_fits_a_terminal(run: Run, front: Front, capsys: Capture) -> None:
    front.admin.busy = True
    assert run("status") == 0
    out = capsys.readouterr().out
    assert "transferring" in out
    assert "room (tokens)" in out
    assert max(map(len, out.splitlines())) <= 105
    assert out.count("decode-0") == 3  # the table goes on below


def test_inspection_says_that_it_found_nothing(run: Run, capsys: Capture) -> None:
    assert run("status", "--inspect") == 0
    assert capsys.readouterr().out.endswith("\nbooks checked: no problems\n")


def test_status_names_pairs_that_are_set_aside(run: Run, front: Front, capsys: Capture) -> None:
    front.admin.set_aside = ["decode-0", "decode-3"]
    assert run("status") == 0
    expected = "prefill-0: transfers kept failing, not paired for now with decode-0, decode-3"
    assert capsys.readouterr().out.splitlines()[-1] == expected
    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["set_aside"] == ["decode-0", "decode-3"]


def test_status_json_and_problems(run: Run, front: Front, capsys: Capture) -> None:
    front.admin.problems = ["page 3 has two owners"]
    assert run("status", "--json", "--inspect") == 1
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert node["stats"]["pages_cached"] == 14
    assert node["problems"] == ["page 3 has two owners"]


def test_status_watch_prints_every_change(run: Run, capsys: Capture) -> None:
    assert run("status", "--watch", "--json") == 0
    states = [[node["state"] for node in json.loads(line)["nodes"]] for line in capsys.readouterr().out.splitlines()]
    assert states == [["draining"], ["draining"], []]


def test_explain_tells_every_pass_and_the_time_of_everything(run: Run, capsys: Capture) -> None:
    assert run("explain", "r-7") == 0
    out, err = capsys.readouterr()
    assert err == "decode-1 did not answer: what it knows is missing\n"
    lines = out.splitlines()
    assert lines[0] == "request r-7: 2 attempts"
    assert [line for line in lines if line.startswith("attempt")] == [
        "attempt 1, room 0000000000000009/0: decode node decode-0 was lost while transferring: its session ended",
        "attempt 2, room 0000000000000009/1: decoding",
    ]
    assert [line.partition(" on ")[2] for line in lines if line.startswith("  begun")] == [
        "prefill-0 and decode-0, over after 1.500 s",
        "prefill-0 and decode-0, lives for 8.000 s",
    ]
    assert " with 12 tokens of the answer on " in out
    assert [line.split()[0] for line in lines if "prompt tokens" in line] == ["prefill-0", "decode-0", "decode-0"]
    start = next(i for i, line in enumerate(lines) if "considered it" in line)
    assert [line[4:] for line in lines[start : start + 14]] == [
        "333 passes considered it, 7 passes did not reach it while it waited",
        "passes 12 to 340 at 0.5000 to 1.5000 s, 329 of them: position 3 of 17, fcfs (lpm was asked for)",
        "  refused: needs 2,081 tokens of memory, 1,920 left",
        "  prefix 0, wanted 2,064, given 0; for the next: NO_TOKEN",
        "  rem_input 16,384, rem_chunk 2,048, total 1,920, current 1,920",
        "pass 341 at 2.0000 s: position 1 of 2, lpm",
        "  admitted in part: 2,048 of 2,064 tokens left after 16 that were there (16 of them loaded from the host)",
        "  prefix 16, wanted 2,064, given 2,048; for the next: OTHER",
        "  rem_input 16,384 > 14,336, rem_chunk 2,048 > 0, total 9,000 > 6,936, current 9,000 > 6,936",
        "pass 342 at 3.0000 s: partly computed, ahead of 4 waiting, lpm",
        "  admitted: all 16 tokens left after 2,064 that were there",
        "  prefix 2,064, wanted 16, given 16; for the next: CONTINUE",
        "  rem_input 16,384, rem_chunk 2,048, total 9,000, current 9,000",
        "2 passes in between left no record",
    ]
    assert [line[4:] for line in lines[start + 14 : start + 24]] == [
        "event           seconds  since the last",
        "arrived          0.0000          0.0000",
        "granted          0.2500          0.2500   wait until a decode node had set pages aside",
        "admitted         2.0000          1.7500   wait for a place in a forward",
        "chunk to 2,064   2.5000          0.5000   forward with 2,048 tokens of it",
        "chunk to 2,080   3.2500          0.7500   forward with 16 tokens of it",
        "token 0          3.2500          0.0000   sampled",
        "last write       3.5000          0.2500   the last pages were on their way",
        "end              3.5000          0.0000   finished",
        "in short: grant 0.2500 s, queue 1.7500 s, prefill 1.2500 s, writes after it 0.2500 s",
    ]
    assert "reserved   0.2500          0.2500   wait for free pages on this node" in out
    assert "end        1.0000          0.7500   aborted: a node was lost" in out
    assert "by its clock: here for 9.000 s" in out
    assert lines[-1].strip() == "in short: grant 0.5000 s, transfer 3.5000 s, wait for a step 0.2500 s"


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        ("spare", "needs 2,081 tokens of memory, 1,920 left beside what one ahead of it waits for"),
        ("requests", "the forward had as many requests as it may"),
        ("input", "2,064 tokens to compute, 16,384 left of what one forward computes"),
        ("chunk", "2,048 tokens left of the chunk, less than a page for it"),
        ("cut", "2,064 tokens did not fit whole, and another prompt was cut already"),
        ("of a newer version", "of a newer version"),
    ],
)
def test_explain_says_in_a_sentence_why_it_was_refused(
    run: Run, front: Front, capsys: Capture, refusal: str, why: str
) -> None:
    front.admin.explanation.nodes[0].rooms[0].passes[0].refusal = refusal
    assert run("explain", "r-7") == 0
    assert f"      refused: {why}\n" in capsys.readouterr().out


def test_explain_json(run: Run, capsys: Capture) -> None:
    assert run("explain", "r-7", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["request_id"], answer["silent"]) == ("r-7", ["decode-1"])
    rooms = {(room["node_id"], room["room"]): room for room in answer["rooms"]}
    assert list(rooms) == [
        ("prefill-0", "0000000000000009/0"), ("decode-0", "0000000000000009/0"), ("decode-0", "0000000000000009/1"),
    ]  # fmt: skip
    room = rooms["prefill-0", "0000000000000009/0"]
    assert (room["role"], room["outcome"], room["not_reached"]) == ("prefill", "finished", 7)
    assert [one["position"] for one in room["passes"]] == [3, 1, None]
    assert room["passes"][1]["after"] == {"rem_input": 14336, "rem_chunk": 0, "total": 6936.0, "current": 6936}
    assert room["chunks"][0] == {"end": 2064, "tokens": 2048, "time": 2.5}
    assert room["events"][1] == {"event": "granted", "time": 0.25, "count": 1}
    assert [(one["stream"], one["attempt"], one["outcome"][:11]) for one in answer["attempts"]] == [
        (1, 1, "decode node"), (1, 2, ""),
    ]  # fmt: skip
    assert [one["attempt"] for one in answer["rooms"]] == [1, 1, 2]


def test_attempts_of_an_answer_that_was_taken_up_have_names_of_their_own(
    run: Run, front: Front, capsys: Capture
) -> None:
    again = front.admin.explanation.attempts[1]
    again.room, again.epoch = 5, 0  # the first attempt of this front door, which the answer was taken up at
    front.admin.explanation.nodes[1].rooms[1].MergeFrom(types_pb2.RoomRecord(room=5))
    front.admin.explanation.nodes[1].rooms[1].epoch = 0
    del front.admin.explanation.attempts[0]
    assert run("explain", "r-7") == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "request r-7: 2 attempts in 2 streams"
    assert [line for line in rest if "attempt" in line] == [
        "stream 1, attempt 1, room 0000000000000009/0",
        "stream 2, attempt 1, room 0000000000000005/0: decoding",
    ]
    assert run("explain", "r-7", "--json") == 0
    assert [(one["stream"], one["attempt"]) for one in json.loads(capsys.readouterr().out)["attempts"]] == [
        (1, 1), (2, 1),
    ]  # fmt: skip


def test_explain_tells_how_often_a_request_gave_way(run: Run, front: Front, capsys: Capture) -> None:
    room = front.admin.explanation.nodes[1].rooms[1]
    room.events.add(event="retracted", time=5, count=3)
    room.events.add(event="resumed", time=6, count=3)
    front.admin.explanation.nodes[0].rooms[0].deferred = 2
    assert run("explain", "r-7") == 0
    out = capsys.readouterr().out
    assert "until there was no page for the next token (the first of 3)" in out
    assert "its pages were in host memory (the first of 3)" in out
    assert "    2 passes held it back for another one that computes what both share\n" in out


def test_explain_says_when_attempts_are_missing(run: Run, front: Front, capsys: Capture) -> None:
    del front.admin.explanation.attempts[0]
    for node in front.admin.explanation.nodes:
        kept = [room for room in node.rooms if room.epoch == 1]
        del node.rooms[:]
        node.rooms.extend(kept)
    assert run("explain", "r-7") == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "request r-7: 1 attempt known here; others were on nodes that are gone, or are forgotten"


def test_explain_of_a_unified_node_tells_of_no_grant_and_no_writes(run: Run, front: Front, capsys: Capture) -> None:
    front.admin.explanation.nodes[0].role = types_pb2.ROLE_UNIFIED
    del front.admin.explanation.attempts[:]
    del front.admin.explanation.nodes[1:]
    assert run("explain", "r-7") == 0
    out = capsys.readouterr().out
    assert "granted" not in out
    assert "last write" not in out
    assert out.splitlines()[-1].strip() == "in short: queue 2.0000 s, prefill 1.2500 s, decode 0.2500 s"


def test_a_request_id_cannot_play_with_the_terminal(run: Run, front: Front, capsys: Capture) -> None:
    evil = "\x1b[2Jr\u202e\n\x9b"
    shown = "\\x1b[2Jr\\u202e\\n\\x9b"
    front.admin.known_id = evil
    assert run("explain", evil) == 0
    assert capsys.readouterr().out.startswith(f"request {shown}: 2 attempts\n")
    assert run("status", "--requests") == 0
    assert shown in capsys.readouterr().out
    front.admin.known_id = "another"
    assert run("explain", evil) == 1
    assert capsys.readouterr().err.endswith(f"(request_id={shown})\n")


def test_explain_of_an_unknown_request(run: Run, capsys: Capture) -> None:
    assert run("explain", "r-8") == 1
    assert capsys.readouterr() == ("", "kvrelay: NOT_FOUND: no node knows of a request (request_id=r-8)\n")


def test_drain_tells_until_the_node_is_gone(run: Run, front: Front, capsys: Capture) -> None:
    assert run("drain", "prefill-0", "--deadline", "3") == 0
    assert capsys.readouterr().err.splitlines() == [
        "prefill-0 draining: 2 running",
        "prefill-0 draining: 1 running",
        "prefill-0 has left",
    ]
    assert front.admin.drains == [admin_pb2.DrainRequest(node_id="prefill-0", deadline_seconds=3)]


def test_drain_of_an_unknown_node(run: Run, front: Front, capsys: Capture) -> None:
    assert run("drain", "prefill-9") == 1
    assert "NOT_FOUND" in capsys.readouterr().err
    assert not front.admin.drains


def test_health(front: Front, capsys: Capture) -> None:
    assert main(["health", front.address], {}) == 0
    assert main(["health", front.address, "--service", "kvrelay.v1.Generation", "--wait", "5"], {}) == 0
    assert main(["health", front.address, "--service", "no.Such"], {}) == 1
    assert main(["health", "127.0.0.1:1"], {}) == 1
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert (first, second) == ("SERVING", "SERVING")
    assert third == f"NOT_FOUND: no service 'no.Such' at {front.address}"
    assert fourth == "UNAVAILABLE: cannot reach 127.0.0.1:1 (Connection refused)"


# ---- as a process ----


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
    done = decode_without_torch(tmp_path, "--bootstrap", "127.0.0.1:1, 127.0.0.1:2")
    first, *dialled, last = done.stderr.splitlines()
    assert " starting role=decode node=" in first
    assert first.endswith(" bootstrap=127.0.0.1:1,127.0.0.1:2")
    assert len(dialled) == 2
    assert all(" no bootstrap yet " in line for line in dialled)
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
