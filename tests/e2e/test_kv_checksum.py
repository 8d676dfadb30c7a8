"""A cluster whose prefill node sends checksums: every page passes, cached ones too, and the answers are the same."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.cluster import cluster
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.reference import greedy

NEW_TOKENS = 8


@pytest.mark.timeout(300)
def test_greedy_equals_one_process(tmp_path: Path) -> None:
    model = tiny_model("llama")
    numbers = random.Random(5)
    prompts = [numbers.choices(range(3, VOCAB_SIZE), k=length) for length in (1, 16, 17, 150, 400)]
    flags = ("--kv-checksum", "--chunk-size", "64")
    with cluster(tmp_path, model, node_flags=("--num-pages", "512"), prefill_flags=flags) as served:

        def ask(prompt: list[int]) -> list[int]:
            return served.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids

        expected = [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
        with ThreadPoolExecutor(5) as pool:
            assert list(pool.map(ask, prompts)) == expected
            assert list(pool.map(ask, prompts)) == expected
        served.settle()
