"""What `kvrelay status`, `explain`, `drain` and `health` print, against a server with canned answers."""

from __future__ import annotations

import json

import pytest

from cli.main import main
from kvrelay.v1 import admin_pb2, types_pb2
from tests.helpers.canned_front import Capture, Front, Run


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


def test_attempts_of_two_clients_with_one_id_are_told_apart(run: Run, front: Front, capsys: Capture) -> None:
    del front.admin.explanation.nodes[:]
    del front.admin.explanation.attempts[:]
    for started, (number, epoch) in enumerate(((4, 0), (5, 0), (4, 1), (5, 1))):
        front.admin.explanation.attempts.add(request=number, room=number, epoch=epoch, started=started, outcome="lost")
    assert run("explain", "r-7") == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "request r-7: 4 attempts in 2 streams"
    assert [line.partition(", room")[0] for line in rest if "attempt" in line] == [
        "stream 1, attempt 1", "stream 2, attempt 1", "stream 1, attempt 2", "stream 2, attempt 2",
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
    assert capsys.readouterr() == ("", "kvrelay: NOT_FOUND: nobody here knows of a request (request_id=r-8)\n")


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
