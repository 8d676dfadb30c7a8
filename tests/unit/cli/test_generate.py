"""What `kvrelay generate`, `chat` and `key` print and how they end, against a server with canned answers."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest

from cli.main import main
from engine.core.access import find_key, parse_api_keys
from tests.helpers.canned_front import Capture, Front, Run


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
