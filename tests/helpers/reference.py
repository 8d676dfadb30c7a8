"""What a model answers when transformers runs it alone, in one process, with its own attention and cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

__all__ = ["greedy", "reference_model"]


@functools.cache
def reference_model(path: Path) -> PreTrainedModel:
    """The model in float32, loaded once a session."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    nn.Module.eval(model)
    return model


def greedy(path: Path, token_ids: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """The tokens `generate` adds to `token_ids`, the end token among them when it ends before `max_new_tokens`."""
    model: Any = reference_model(path)
    settings = {"eos_token_id": None} if ignore_eos else {}
    prompt = torch.tensor([list(token_ids)])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        **settings,
    )
    return [int(token_id) for token_id in output[0, prompt.shape[1] :]]
