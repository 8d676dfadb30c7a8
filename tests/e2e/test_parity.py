"""Through the relay or in one process: the same tokens. Real processes, real NIXL, plain transformers as the judge."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvrelay.v1.types_pb2 import FINISH_REASON_LENGTH
from tests.helpers.cluster import Answer, Cluster, cluster
from tests.helpers.models import tiny_model
from tests.helpers.reference import greedy

NEW_TOKENS = 12
NON_ASCII = "Größe, 数学, नमस्ते, 🚀🚀: «¿qué tal?» — naïve café, Ωμέγα, مرحبا."


@dataclass(frozen=True)
class Setup:
    model: str  # tiny-<architecture> or demo
    page_size: int
    chunk_size: str
    num_pages: int


SETUPS = [
    Setup("tiny-llama", 1, "32", 16384),
    Setup("tiny-qwen3", 16, "32", 1024),
    Setup("tiny-mistral", 64, "64", 256),
    Setup("tiny-qwen2", 16, "none", 1024),
    Setup("demo", 16, "512", 600),
]


@pytest.fixture(params=SETUPS, ids=lambda s: f"{s.model}-page{s.page_size}-chunk{s.chunk_size}", scope="module")
def setup(request: pytest.FixtureRequest) -> Setup:
    chosen: Setup = request.param
    return chosen


@pytest.fixture(scope="module")
def model(setup: Setup, request: pytest.FixtureRequest) -> Path:
    if setup.model == "demo":
        path: Path = request.getfixturevalue("demo_model")
        return path
    return tiny_model(setup.model.removeprefix("tiny-"))


@pytest.fixture(scope="module")
def served(setup: Setup, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    node_flags = ("--page-size", str(setup.page_size), "--num-pages", str(setup.num_pages))
    chunk = ("--chunk-size", setup.chunk_size)
    directory = tmp_path_factory.mktemp("cluster")
    with cluster(directory, model, node_flags=node_flags, prefill_flags=chunk) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(setup: Setup, model: Path) -> dict[str, list[int]]:
    """Named prompts of 1 to 1,500 tokens, ordinary ids only, the same for every run."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    numbers = random.Random(7)
    vocabulary = range(3, tokenizer.get_vocab_size())

    def random_ids(count: int) -> list[int]:
        return numbers.choices(vocabulary, k=count)

    page, shared = setup.page_size, random_ids(400)
    return {
        "one token": random_ids(1),
        "two tokens": random_ids(2),
        "one page exactly": random_ids(page),
        "a page and one": random_ids(page + 1),
        "a page less one": random_ids(max(1, page - 1)),
        "non-ASCII text": tokenizer.encode(NON_ASCII).ids,
        "shared prefix, one end": shared + random_ids(37),
        "shared prefix, another end": shared + random_ids(90),
        "shared prefix alone": shared,
        "several chunks": random_ids(777),
        "long": random_ids(1500),
    }


@pytest.fixture(scope="module")
def expected(model: Path, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: greedy(model, prompt, NEW_TOKENS) for name, prompt in prompts.items()}


def check(answer: Answer, prompt: list[int], expected: list[int]) -> None:
    assert answer.token_ids == expected
    assert answer.started.prompt_tokens == len(prompt)
    assert answer.finished.reason == FINISH_REASON_LENGTH
    assert answer.finished.usage.output_tokens == NEW_TOKENS


@pytest.mark.timeout(300)
def test_greedy_equals_one_process_cold_cached_and_crowded(
    setup: Setup, served: Cluster, prompts: dict[str, list[int]], expected: dict[str, list[int]]
) -> None:
    page = setup.page_size
    for name, prompt in prompts.items():
        check(served.generate(prompt, max_new_tokens=NEW_TOKENS), prompt, expected[name])
    served.settle()

    for name, prompt in prompts.items():
        again = served.generate(prompt, max_new_tokens=NEW_TOKENS)
        check(again, prompt, expected[name])
        # All whole pages but one token are found: the last token is always computed.
        assert again.started.cached_tokens == (len(prompt) - 1) // page * page
    served.settle()

    crowd = [*prompts, *list(prompts)[-5:]]
    salts = ["", "cold"]  # half of the crowd finds its prefix cached, half of it computes everything again
    assert len(crowd) == 16
    with ThreadPoolExecutor(len(crowd)) as pool:
        answers = pool.map(
            lambda i: served.generate(prompts[crowd[i]], max_new_tokens=NEW_TOKENS, cache_salt=salts[i % 2]),
            range(len(crowd)),
        )
        for name, answer in zip(crowd, answers, strict=True):
            check(answer, prompts[name], expected[name])
    served.settle()


def test_salts_share_nothing(served: Cluster, prompts: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    prompt = prompts["shared prefix alone"]
    first = served.generate(prompt, max_new_tokens=NEW_TOKENS, cache_salt="a salt of its own")
    check(first, prompt, expected["shared prefix alone"])
    assert first.started.cached_tokens == 0
    served.settle()
