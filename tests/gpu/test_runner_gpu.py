"""The device layer on CUDA: the same tokens as transformers, through pages in device memory."""

from __future__ import annotations

import pytest
import torch

from engine.core.sampling import SamplingParams
from engine.device.batch import Row, build_batch
from engine.device.kv_pool import KVPool
from engine.device.runner import TransformersRunner
from engine.device.sampler import sample
from engine.device.weights import load_model
from tests.helpers.models import prepared_tiny
from tests.helpers.reference import greedy

pytestmark = pytest.mark.gpu

NEW_TOKENS = 12


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_equals_transformers(architecture: str, page_size: int) -> None:
    model = prepared_tiny(architecture)
    prompt = [3 + 7 * i % 250 for i in range(100)]
    loaded = load_model(model, dtype="float32", max_context=512, report=print, device="cuda")
    pool = KVPool(model.layout(page_size, "float32"), 256, "cuda")
    assert pool.base_address % 4096 == 0
    runner = TransformersRunner(loaded, pool)
    pages = list(range(255, -1, -1))
    tokens: list[int] = []
    for start, end in ((0, 40), (40, 100)):  # two chunks, then one token a step
        logits = runner.forward(build_batch([Row(prompt[start:end], start, pages, True)], page_size, "cuda"))
    for _ in range(NEW_TOKENS):
        tokens.append(sample(logits, [SamplingParams(temperature=0.0)], [len(tokens)], [()], [None])[0].token_id)
        row = Row([tokens[-1]], len(prompt) + len(tokens) - 1, pages, True)
        logits = runner.forward(build_batch([row], page_size, "cuda"))
    assert tokens == greedy(model.path, prompt, NEW_TOKENS)
    assert torch.isfinite(pool.data).all()
