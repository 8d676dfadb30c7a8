"""A cluster of unified nodes: real processes, plain transformers as the judge."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvrelay.v1.generation_pb2 import AbortRequest
from kvrelay.v1.types_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH, ROLE_UNIFIED, Sampling, Stopping
from rpc.errors import from_rpc_error
from tests.helpers.cluster import Answer, Cluster, assert_eventually, cluster
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.reference import greedy

PAGE_SIZE, CHUNK = 16, 64
NEW_TOKENS = 12
FLAGS = ("--page-size", str(PAGE_SIZE), "--chunk-size", str(CHUNK), "--max-running", "24")


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    numbers = random.Random(11)

    def random_ids(count: int) -> list[int]:
        return numbers.choices(range(3, VOCAB_SIZE), k=count)

    shared = random_ids(150)
    return {
        "one token": random_ids(1),
        "a page": random_ids(PAGE_SIZE),
        "a page and one": random_ids(PAGE_SIZE + 1),
        "shared prefix, one end": shared + random_ids(20),
        "shared prefix, another end": shared + random_ids(45),
        "a chunk": random_ids(CHUNK),
        "several chunks": random_ids(333),
        "long": random_ids(900),
    }


@pytest.fixture(scope="module")
def expected(model: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: greedy(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}


@pytest.fixture(scope="module", params=["--mixed-chunk", "--no-mixed-chunk"])
def served(model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = (*FLAGS, "--num-pages", "512", request.param)
    with cluster(tmp_path_factory.mktemp("cluster"), model, unified=1, node_flags=flags) as running:
        yield running


def check(answer: Answer, expected: list[int]) -> None:
    assert answer.token_ids == expected
    assert answer.finished.reason == FINISH_REASON_LENGTH
    assert answer.finished.usage.output_tokens == len(expected)


def test_greedy_equals_one_process_cold_cached_and_crowded(
    served: Cluster, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    for name, prompt in prompts.items():
        check(served.generate(prompt, max_new_tokens=NEW_TOKENS), expected[name])
    served.settle()
    for name, prompt in prompts.items():
        again = served.generate(prompt, max_new_tokens=NEW_TOKENS)
        check(again, expected[name])
        assert again.started.cached_tokens == (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE
    crowd = [(name, salt) for name in prompts for salt in ("", "cold")]
    assert len(crowd) == 16
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(
            lambda one: served.generate(prompts[one[0]], max_new_tokens=NEW_TOKENS, cache_salt=one[1]), crowd
        )
        for (name, _), answer in zip(crowd, answers, strict=True):
            check(answer, expected[name])
    served.settle()


def test_seeded_sampling_is_the_same_alone_and_in_a_crowd(served: Cluster, prompts: dict[str, list[int]]) -> None:
    def ask(seed: int) -> list[int]:
        sampling = Sampling(temperature=0.9, top_p=0.95, seed=seed, repetition_penalty=1.2)
        return served.generate(prompts["a chunk"], max_new_tokens=24, sampling=sampling).token_ids

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, [*range(4), *range(4)])) == alone + alone


def test_the_next_turn_finds_the_answer_cached(served: Cluster, model: Path, prompts: dict[str, list[int]]) -> None:
    first = served.generate(prompts["a chunk"], max_new_tokens=40, cache_salt="a conversation")
    turn = [*prompts["a chunk"], *first.token_ids, *prompts["a page"]]
    second = served.generate(turn, max_new_tokens=NEW_TOKENS, cache_salt="a conversation")
    check(second, greedy(model, turn, NEW_TOKENS))
    assert second.started.cached_tokens == (CHUNK + 39) // PAGE_SIZE * PAGE_SIZE


def test_what_clients_and_operators_see(served: Cluster, prompts: dict[str, list[int]]) -> None:
    timing = served.generate(prompts["several chunks"], max_new_tokens=30, cache_salt="timed").finished.timing
    assert timing.prefill_node == timing.decode_node == "unified-0"
    assert (timing.grant_wait, timing.handoff, timing.relayed_bytes) == (0, 0, 0)
    assert 0 < timing.prefill < timing.first_token < timing.total
    assert timing.first_token + timing.decode == pytest.approx(timing.total, abs=0.2)
    (node,) = served.nodes()
    assert (node.role, node.stats.serving) == (ROLE_UNIFIED, True)
    status = [sys.executable, "-m", "cli.main", "status", "--json", "--bootstrap", served.address]
    listed = json.loads(subprocess.run(status, capture_output=True, check=True, text=True).stdout)
    assert [(one["node_id"], one["role"], one["state"]) for one in listed["nodes"]] == [
        ("unified-0", "unified", "serving")
    ]


def test_abort_frees_the_pages(served: Cluster, prompts: dict[str, list[int]]) -> None:
    request = served.request(prompts["long"], max_new_tokens=1000, request_id="r-abort")
    stream = served.generation.Generate(request)
    next(stream)
    assert next(stream).HasField("delta")
    served.generation.Abort(AbortRequest(request_id="r-abort"))
    assert list(stream)[-1].finished.reason == FINISH_REASON_ABORT
    served.settle()


def test_another_kind_of_node_is_refused(served: Cluster) -> None:
    process = served.start("decode", "decode-0", "--page-size", str(PAGE_SIZE), "--num-pages", "64")
    assert process.popen.wait(90) == 1
    del served.processes["decode-0"]
    assert "role is 'decode'; in this cluster: unified nodes only" in process.tail()


def test_a_tiny_pool_retracts_and_nothing_shows(model: Path, tmp_path: Path) -> None:
    """Eight answers of 100 tokens that are let in as if they were short, in memory for less than half of them."""
    prompts = [[3 + (first * 31 + 7 * i) % 250 for i in range(20)] for first in range(8)]
    flags = (*FLAGS, "--num-pages", "24", "--schedule-conservativeness", "0")
    with cluster(tmp_path, model, unified=1, node_flags=flags) as tiny:

        def ask(prompt: list[int]) -> Answer:
            # Of what ignores the end of sequence, all that it may become is counted.
            stopping = Stopping(max_new_tokens=100, ignore_eos=False)
            return tiny.generate(prompt, stopping=stopping)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, prompts))
        assert [a.token_ids for a in answers] == [greedy(model, p, 100, ignore_eos=False) for p in prompts]
        assert all(answer.finished.timing.attempts == 1 for answer in answers)
        tiny.settle()
        with pytest.raises(grpc.RpcError) as refused:
            tiny.generate(prompts[0], max_new_tokens=400)
        error = from_rpc_error(refused.value)
        assert (error.code, error.metadata["field"]) == ("INVALID_ARGUMENT", "stopping.max_new_tokens")
        assert "retracted" in tiny.processes["unified-0"].log.read_text()


def test_nodes_come_and_go(model: Path, tmp_path: Path) -> None:
    """A drained node finishes what it has; what a killed one leaves behind goes on elsewhere."""
    prompt = [3 + 7 * i % 250 for i in range(40)]
    whole = greedy(model, prompt, 400)
    with cluster(tmp_path, model, unified=2, node_flags=(*FLAGS, "--num-pages", "256")) as two:
        answers: list[Answer] = []

        def ask(salt: str) -> None:  # else the node that has the prompt cached would be given all of them
            answers.append(two.generate(prompt, max_new_tokens=400, cache_salt=salt))

        asking = [threading.Thread(target=ask, args=(f"salt {i}",)) for i in range(4)]
        for thread in asking:
            thread.start()
        assert_eventually(lambda: {one.prefill_node for one in two.live()} == {"unified-0", "unified-1"}, "both work")
        assert_eventually(lambda: all(one.output_tokens > 3 for one in two.live()), "all have begun")
        assert two.stop("unified-0") == 0
        two.start("unified", "unified-2", *FLAGS, "--num-pages", "256")
        two.wait_serving(0, 0, 2)
        late = threading.Thread(target=lambda: answers.append(two.generate(prompt, max_new_tokens=400)))
        late.start()
        assert_eventually(lambda: any(one.output_tokens for one in two.live()), "it has begun")
        where = next(one.prefill_node for one in two.live())
        two.stop(where, signal.SIGKILL)
        for thread in (*asking, late):
            thread.join()
        assert [answer.token_ids for answer in answers] == [whole] * 5
        assert max(answer.finished.timing.attempts for answer in answers) == 2
        two.settle()
