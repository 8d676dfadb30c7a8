"""A prefill node whose page pool holds two prompts and whose host tier holds all of them."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.cluster import cluster
from tests.helpers.models import VOCAB_SIZE, tiny_model
from tests.helpers.reference import greedy

PAGE_SIZE, PAGES, LENGTH, NEW_TOKENS = 16, 48, 330, 6


@pytest.mark.timeout(300)
def test_prompts_that_take_turns_are_found_on_the_host(tmp_path: Path) -> None:
    model = tiny_model("llama")
    numbers = random.Random(11)
    prompts = [numbers.choices(range(3, VOCAB_SIZE), k=LENGTH) for _ in range(6)]
    expected = [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    with cluster(
        tmp_path,
        model,
        node_flags=("--page-size", str(PAGE_SIZE)),
        prefill_flags=("--num-pages", str(PAGES), "--host-kv-memory", "8MiB", "--chunk-size", "128"),
        decode_flags=("--num-pages", "256"),
    ) as served:

        def ask(index: int) -> int:
            """Returns the prompt tokens that were found cached."""
            answer = served.generate(prompts[index], max_new_tokens=NEW_TOKENS)
            assert answer.token_ids == expected[index]
            return answer.started.cached_tokens

        whole = LENGTH // PAGE_SIZE * PAGE_SIZE
        assert [ask(i) for i in range(6)] == [0] * 6
        assert [ask(i) for i in range(6)] == [whole] * 6
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, [0, 1, 2, 3, 4, 5] * 3)) == [whole] * 18
        served.settle()
        (node,) = [node for node in served.nodes() if node.node_id == "prefill-0"]
        stats = node.stats
        assert stats.host_hit_tokens_total >= 4 * whole
        assert stats.host_pages_free + stats.host_pages_cached == stats.host_pages_total > 6 * whole // PAGE_SIZE
        assert stats.pages_cached + stats.host_pages_cached == 6 * whole // PAGE_SIZE, "a page is in one of the tiers"
