"""What became of a request can be asked of a real cluster, while it lives and afterwards, and read from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from tests.helpers.cluster import Cluster, assert_eventually, cluster
from tests.helpers.models import tiny_model

CHUNK = 64
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("passes") / "passes.jsonl"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, passes: Path) -> Iterator[Cluster]:
    with cluster(
        tmp_path_factory.mktemp("cluster"),
        tiny_model("llama"),
        node_flags=("--page-size", "16", "--num-pages", "64"),
        prefill_flags=("--chunk-size", str(CHUNK), "--log-passes", str(passes)),
    ) as running:
        yield running


def prompt(length: int, first: int = 10) -> list[int]:
    return [3 + (first + 7 * i) % 250 for i in range(length)]


def explained(served: Cluster, request_id: str, capsys: Capture) -> dict[str, Any]:
    """The rooms of a request that was tried once, by node."""
    capsys.readouterr()
    assert main(["explain", request_id, "--bootstrap", served.address, "--json"], {}) == 0
    answer = json.loads(capsys.readouterr().out)
    assert not answer["silent"]
    return {room["node_id"]: room for room in answer["rooms"]}


def test_a_request_is_explained_on_both_nodes_and_its_passes_are_in_the_file(
    served: Cluster, passes: Path, capsys: Capture
) -> None:
    length = 2 * CHUNK + 20
    answer = served.generate(prompt(length), max_new_tokens=8, request_id="asked")
    served.settle()
    rooms = explained(served, "asked", capsys)
    prefill, decode = rooms["prefill-0"], rooms["decode-0"]
    assert prefill["room"] == decode["room"]
    assert (prefill["outcome"], decode["outcome"]) == ("finished", "finished")
    assert [(chunk["end"], chunk["tokens"]) for chunk in prefill["chunks"]] == [(64, 64), (128, 64), (148, 20)]
    assert [one["extend"] for one in prefill["passes"]] == [64, 64, 20]
    names = ["arrived", "granted", "admitted", "token_0", "last_write", "ended"]
    assert [event["event"] for event in prefill["events"]] == names
    names = ["arrived", "granted", "complete", "first_step", "ended"]
    assert [event["event"] for event in decode["events"]] == names
    at = {event["event"]: event["time"] for event in prefill["events"]}
    assert at["admitted"] - at["granted"] == pytest.approx(answer.finished.timing.prefill_wait), "the same stamps"

    lines = [json.loads(line) for line in passes.read_text().splitlines()]
    of_it = [(line, one) for line in lines for one in line["attempts"] if one["request_id"] == "asked"]
    assert [one["extend"] for _, one in of_it] == [64, 64, 20]
    assert [line["number"] for line, _ in of_it] == [one["number"] for one in prefill["passes"]]
    assert {line["node"] for line in lines} == {"prefill-0"}

    assert main(["explain", "asked", "--bootstrap", served.address], {}) == 0
    out = capsys.readouterr().out
    assert "admitted in part: 64 of 148 tokens left" in out
    assert "chunk to 148" in out


def test_a_live_request_is_explained(served: Cluster, capsys: Capture) -> None:
    stream = served.generation.Generate(Cluster.request(prompt(20, 90), 400, request_id="live"), timeout=60)
    next(stream)
    assert_eventually(lambda: any(one.output_tokens > 1 for one in served.live()), "it is being answered")
    decode = explained(served, "live", capsys)["decode-0"]
    stream.cancel()
    assert decode["outcome"] == ""
    assert decode["events"][-1]["event"] == "first_step"
    served.settle()
    assert explained(served, "live", capsys)["decode-0"]["outcome"] == "aborted: the client has gone"


def test_nobody_knows_a_request_that_never_was(served: Cluster, capsys: Capture) -> None:
    assert main(["explain", "nobody", "--bootstrap", served.address], {}) == 1
    assert capsys.readouterr().err == "kvrelay: NOT_FOUND: nobody here knows of a request 'nobody'\n"


def test_a_log_that_cannot_be_written_keeps_the_node_from_starting(served: Cluster, tmp_path: Path) -> None:
    process = served.start("prefill", "prefill-1", "--log-passes", str(tmp_path))
    try:
        assert process.popen.wait(60) == 2
    finally:
        served.stop("prefill-1")
    assert f"kvrelay: log_passes: cannot write {tmp_path}: Is a directory" in process.tail()
