"""The runner against transformers' own generate, token for token, on every supported architecture."""

import functools
import random
from collections.abc import Sequence

import pytest
import torch

from engine.core.model_store import PreparedModel
from engine.device.batch import Row, build_batch
from engine.device.kv_pool import KVPool
from engine.device.runner import TransformersRunner
from engine.device.weights import load_model
from tests.helpers.models import TINY_ARCHITECTURES, VOCAB_SIZE, demo_model, prepared_tiny
from tests.helpers.reference import greedy

NEW_TOKENS = 10
POOL_TOKENS = 640
# One token, exactly one page of 16, one more than it, several pages, one more than one page of 64.
PROMPTS = tuple(tuple(random.Random(n).choices(range(3, VOCAB_SIZE), k=n)) for n in (1, 16, 17, 50, 65))


@functools.cache
def make_runner(model: PreparedModel, page_size: int, kv_dtype: str = "float32") -> TransformersRunner:
    loaded = load_model(model, dtype="float32", max_context=512, report=lambda _: None)
    return TransformersRunner(loaded, KVPool(model.layout(page_size, kv_dtype), POOL_TOKENS // page_size))


def relay(
    runner: TransformersRunner,
    prompts: Sequence[Sequence[int]],
    page_size: int,
    chunk: int,
    new_tokens: int = NEW_TOKENS,
) -> list[list[int]]:
    """Greedy answers to all prompts at once: in each step every unfinished one computes its next chunk or token."""
    need = [-(-(len(prompt) + new_tokens) // page_size) for prompt in prompts]
    pages = random.Random(0).sample(range(POOL_TOKENS // page_size), sum(need))
    owned = [[pages.pop() for _ in range(n)] for n in need]
    tokens = [list(prompt) for prompt in prompts]
    done = [0] * len(prompts)
    while True:
        rows, asked = [], []
        for i, prompt in enumerate(prompts):
            if len(tokens[i]) < len(prompt) + new_tokens:
                ids = tokens[i][done[i] : done[i] + chunk]
                done[i] += len(ids)
                rows.append(Row(ids, done[i] - len(ids), owned[i], done[i] == len(tokens[i])))
                asked += [i] if rows[-1].wants_logits else []
        if not rows:
            return [line[len(prompt) :] for line, prompt in zip(tokens, prompts, strict=True)]
        logits = runner.forward(build_batch(rows, page_size))
        assert logits.dtype == torch.float32
        for i, token_id in zip(asked, logits.argmax(-1).tolist(), strict=True):
            tokens[i].append(token_id)


@functools.cache
def expected(architecture: str) -> list[list[int]]:
    return [greedy(prepared_tiny(architecture).path, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_greedy_equals_generate(architecture: str, page_size: int, chunk: int) -> None:
    runner = make_runner(prepared_tiny(architecture), page_size)
    assert relay(runner, PROMPTS, page_size, chunk) == expected(architecture)
    for prompt, answer in zip(PROMPTS, expected(architecture), strict=True):
        assert relay(runner, [prompt], page_size, chunk) == [answer]


def test_answers_depend_on_the_whole_prompt() -> None:
    """Otherwise the test above would prove little."""
    path = prepared_tiny("llama").path
    changed = (PROMPTS[-1][0] + 1, *PROMPTS[-1][1:])
    assert greedy(path, changed, NEW_TOKENS) != expected("llama")[-1]


def test_real_model_equals_generate() -> None:
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 2, 198, 1, 4093, 198, 19556, 2, 198]
    runner = make_runner(demo_model(), 16)
    assert relay(runner, [prompt], 16, 12, new_tokens=8) == [greedy(demo_model().path, prompt, 8)]


def test_half_precision_pages_come_close() -> None:
    def logits(kv_dtype: str) -> torch.Tensor:
        runner = make_runner(prepared_tiny("llama"), 16, kv_dtype)
        pages = [5, 3, 9, 1]
        runner.forward(build_batch([Row(PROMPTS[3][:30], 0, pages, False)], 16))
        return runner.forward(build_batch([Row(PROMPTS[3][30:], 30, pages, True)], 16))

    torch.testing.assert_close(logits("float16"), logits("float32"), atol=0.02, rtol=0.01)


def test_logits_only_where_asked() -> None:
    runner = make_runner(prepared_tiny("llama"), 16)
    pages = [[8], [9, 10], [11, 12, 13, 14]]

    def logits(*asked: bool) -> torch.Tensor:
        rows = [Row(PROMPTS[i], 0, pages[i - 1], want) for i, want in enumerate(asked, 1)]
        return runner.forward(build_batch(rows, 16))

    everything = logits(True, True, True)
    assert everything.shape == (3, VOCAB_SIZE)
    torch.testing.assert_close(logits(False, True, False), everything[1:2])
    assert logits(False, False, False).shape == (0, VOCAB_SIZE)
