"""Long answers that together outgrow a decode node: parked in host memory, sent through prefill again, or both.

Nothing of it shows in the answers.
"""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrelay.v1.types_pb2 import Sampling
from tests.helpers.cluster import Answer, cluster, free_port
from tests.helpers.models import tiny_model
from tests.helpers.reference import greedy

PAGES, PAGE_SIZE, NEW_TOKENS = 28, 16, 140
PROMPTS = [[3 + (10 * first + 7 * i) % 250 for i in range(12 + 5 * first)] for first in range(6)]


def retractions(port: int) -> dict[str, float]:
    """By where they went."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {s.labels["where"]: s.value for s in samples if s.name == "kvrelay_retractions_total"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("memory", "where"),
    [("64MiB", {"host"}), ("none", {"prefill"}), ("100KB", {"host", "prefill"})],
    ids=["host", "prefill", "mixed"],
)
def test_answers_that_outgrow_a_decode_node(tmp_path: Path, memory: str, where: set[str]) -> None:
    model, port = tiny_model("llama"), free_port()
    with cluster(
        tmp_path,
        model,
        node_flags=("--page-size", str(PAGE_SIZE)),
        prefill_flags=("--num-pages", "256"),
        decode_flags=(
            *("--num-pages", str(PAGES), "--reserved-decode-tokens", "16", "--host-kv-memory", memory),
            *("--metrics-listen", f"127.0.0.1:{port}"),
        ),
    ) as served:

        def ask(number: int) -> Answer:
            """Every second one with penalties, which count all that was said before."""
            sampling = Sampling(temperature=0.8, top_k=50, seed=5, repetition_penalty=1.2, frequency_penalty=0.2)
            drawn = sampling if number % 2 else None
            return served.generate(PROMPTS[number], max_new_tokens=NEW_TOKENS, sampling=drawn)

        numbers = range(len(PROMPTS))
        alone = [ask(i).token_ids if i % 2 else greedy(model, PROMPTS[i], NEW_TOKENS) for i in numbers]
        assert retractions(port) == {}, "one alone fits"
        with ThreadPoolExecutor(len(numbers)) as pool:
            answers = list(pool.map(ask, numbers))
        assert [answer.token_ids for answer in answers] == alone
        went = retractions(port)
        assert went.keys() == where
        more_attempts = sum(answer.finished.timing.attempts - 1 for answer in answers)
        assert more_attempts == went.get("prefill", 0), "who was parked kept its attempt"
        served.settle()
        (stats,) = [node.stats for node in served.nodes() if node.node_id == "decode-0"]
        assert (stats.pages_free, stats.host_pages_free) == (PAGES, stats.host_pages_total)
        assert (stats.host_pages_total > 0) == ("host" in where)
