"""Loading a prepared model into memory for inference, or saying why it cannot be served."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from engine.core.model_store import ModelRefused, PreparedModel
from engine.core.types import DTYPE_BYTES
from engine.device.runner import ATTENTION
from engine.device.weight_files import tensor_shapes

__all__ = ["load_model", "megabytes", "read_weights", "weight_bytes"]

_MEMORY_PAGE = 4096  # bytes
# Rotary embeddings that change with the longest sequence of a batch: cached keys would become wrong.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_model(
    model: PreparedModel,
    *,
    dtype: str,
    max_context: int,
    report: Callable[[str], None],
    device: torch.device | str = "cpu",
    memory_budget: int | None = None,
) -> PreTrainedModel:
    """Load the weights in `dtype` (a key of DTYPE_BYTES) with paged attention, ready for a TransformersRunner.

    `max_context` is the longest sequence that will be served, in tokens, and `memory_budget` what the weights may
    take, in bytes. `report` gets a line before and after. Raises ModelRefused when the model's attention is not
    what the kernels do at that length, its weights are beyond the budget, or it cannot be loaded.
    """
    config = _from_pretrained(AutoConfig, model.path, local_files_only=True)
    _check_attention(config, model, max_context)
    size = weight_bytes(model.path, dtype)
    if memory_budget is not None and size > memory_budget:
        raise ModelRefused(
            f"{model.name} takes {megabytes(size)} in {dtype}, more than the budget of {megabytes(memory_budget)}"
        )
    report(f"loading {model.name}: {megabytes(size)} of weights from {model.path}")
    start = time.monotonic()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded = read_weights(
        model.path, config=config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION, local_files_only=True
    )
    nn.Module.to(loaded, device).requires_grad_(False)
    for parameter in loaded.parameters():
        # Weights that needed no conversion are still on disk, mapped: read them now, not inside the first request.
        parameter.flatten()[:: _MEMORY_PAGE // parameter.itemsize].sum()
    report(
        f"loaded {model.architecture}: {model.layers} layers, {loaded.num_parameters() / 1e6:.1f} M parameters, "
        f"{dtype} on {device}, in {time.monotonic() - start:.1f} s"
    )
    return loaded


def read_weights(path: Path, **options: Any) -> PreTrainedModel:
    """transformers' from_pretrained, but what it would fill with random numbers is a ModelRefused here."""
    loaded: PreTrainedModel
    loaded, info = _from_pretrained(AutoModelForCausalLM, path, output_loading_info=True, **options)
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            raise ModelRefused(f"{path} has bad weights, {problem}: {', '.join(map(str, sorted(info[problem])[:5]))}")
    return loaded


def weight_bytes(path: Path, dtype: str) -> int:
    """Bytes that all tensors in a directory's safetensors files take in `dtype`. Reads the files' headers only."""
    return sum(math.prod(shape) for shape in tensor_shapes(path).values()) * DTYPE_BYTES[dtype]


def _from_pretrained(factory: Any, path: Path, **options: Any) -> Any:
    """What transformers makes of `path`, or ModelRefused: what a bad file raises there is anything at all."""
    try:
        return factory.from_pretrained(path, **options)
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelRefused(f"{path} cannot be loaded: {problem}") from error


def _check_attention(config: PreTrainedConfig, model: PreparedModel, max_context: int) -> None:
    if max_context > model.max_context:
        raise ModelRefused(f"{model.name} was trained for {model.max_context} tokens; asked to serve {max_context}")
    window = getattr(config, "sliding_window", None)  # None as well when the model has one but does not use it
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])  # no list: all do
    if window is not None and slides and window < max_context:
        raise ModelRefused(
            f"{model.name} attends to the last {window} tokens only, which is not implemented: "
            f"serve at most {window} tokens (asked for {max_context})"
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _BATCH_DEPENDENT_ROPE:
        raise ModelRefused(f"{model.name} scales its positions by the length of the text ({rope}): not implemented")


def megabytes(size: int) -> str:
    """A number of bytes, for people."""
    return f"{size / 1e6:,.0f} MB"
