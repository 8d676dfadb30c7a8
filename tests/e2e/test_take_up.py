"""`kvrelay generate` through two real front doors: the one that carries the answer is killed, the text goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvrelay.v1.types_pb2 import Sampling
from tests.helpers.cluster import Cluster, assert_eventually, cluster
from tests.helpers.models import tiny_model
from tests.helpers.reference import greedy

NEW_TOKENS = 600
NODE_FLAGS = ("--page-size", "16", "--num-pages", "512")
PROMPT = [3 + (7 * k) % 250 for k in range(150)]


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """Two front doors; a prefill and a decode node attached to both."""
    with (
        cluster(tmp_path_factory.mktemp("first"), model, prefill=0, decode=0) as first,
        closing(Cluster(tmp_path_factory.mktemp("second"), str(model))) as second,
    ):
        second.start("bootstrap", "bootstrap")
        addresses = f"{first.address},{second.address}"
        for role in ("prefill", "decode"):
            first.start(role, f"{role}-0", *NODE_FLAGS, "--bootstrap", addresses)
        yield first, second


@pytest.fixture
def doors(both: tuple[Cluster, Cluster]) -> tuple[Cluster, Cluster]:
    """Both serve, also when an earlier test has killed one."""
    for door in both:
        if "bootstrap" not in door.processes:
            door.start("bootstrap", "bootstrap")
        door.wait_serving(1, 1)
    return both


def generate(doors: tuple[Cluster, Cluster], *flags: str) -> subprocess.Popen[bytes]:
    """`kvrelay generate` that asks the second front door first."""
    first, second = doors
    command = [sys.executable, "-m", "cli.main", "generate", "--bootstrap", f"{second.address},{first.address}"]
    command += ["--token-ids", ",".join(map(str, PROMPT)), "--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONUNBUFFERED": "1"})


def kill_in_mid_answer(doors: tuple[Cluster, Cluster]) -> None:
    first, second = doors
    assert_eventually(
        lambda: any(20 < r.output_tokens < NEW_TOKENS // 2 for r in second.live()), "an answer is written"
    )
    assert not first.live()
    assert second.stop("bootstrap", signal.SIGKILL) == -signal.SIGKILL


@pytest.mark.timeout(120)
def test_a_greedy_answer_goes_on_at_another_front_door(doors: tuple[Cluster, Cluster], model: Path) -> None:
    expected = greedy(model, PROMPT, NEW_TOKENS)
    with generate(doors, "--temperature", "0", "--json", "--request-id", "long") as process:
        kill_in_mid_answer(doors)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    answer = json.loads(out)
    assert answer["token_ids"] == expected
    assert answer["request_id"] == "long"
    assert answer["usage"]["output_tokens"] == NEW_TOKENS
    doors[0].settle()


@pytest.mark.timeout(120)
def test_a_sampled_answer_streams_on_without_a_gap_or_repeat(doors: tuple[Cluster, Cluster]) -> None:
    first, _ = doors
    sampling = Sampling(temperature=1.0, seed=77, frequency_penalty=0.5)
    unbroken = first.generate(PROMPT, max_new_tokens=NEW_TOKENS, sampling=sampling)
    flags = ("--seed", "77", "--frequency-penalty", "0.5")
    with generate(doors, *flags) as process:
        kill_in_mid_answer(doors)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.decode() == unbroken.text + "\n"
    first.settle()
