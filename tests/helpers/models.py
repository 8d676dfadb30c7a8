"""Tiny random models of every supported architecture, made on the spot: real files, real tokenizer, no download."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from engine.core.model_store import DEMO_MODEL, PreparedModel, default_cache_dir, ensure_prepared, resolve
from engine.device.prepare import prepare

__all__ = [
    "CHAT_TEMPLATE",
    "EOS_ID",
    "SPECIAL_TOKENS",
    "TINY_ARCHITECTURES",
    "VOCAB_SIZE",
    "build_model",
    "demo_model",
    "prepared",
    "prepared_tiny",
    "tiny_model",
]

_CONFIGS: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
TINY_ARCHITECTURES = tuple(_CONFIGS)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2
VOCAB_SIZE = 320  # 3 special tokens, 256 bytes, and some ids that only the model knows
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_model(architecture: str = "llama") -> Path:
    """Directory of a tiny model, one per architecture and test session, removed when the session ends."""
    root = Path(tempfile.mkdtemp(prefix=f"kvrelay-{architecture}-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return build_model(root / f"tiny-{architecture}", architecture)


@functools.cache
def prepared_tiny(architecture: str = "llama") -> PreparedModel:
    """`tiny_model`, prepared."""
    return prepared(tiny_model(architecture))


def prepared(path: Path) -> PreparedModel:
    """Prepare a model directory in this process, with a cache beside it."""
    return prepare(resolve(str(path)), path.parent / "cache")


@functools.cache
def demo_model() -> PreparedModel:
    """The real model. Converted into the user's own cache the first time (half a minute), there ever after."""
    return ensure_prepared(DEMO_MODEL, default_cache_dir(), print)


def build_model(path: Path, architecture: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model with grouped-query attention to `path`; `changes` go to its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        # Large enough for answers that depend on every token before them.
        "initializer_range": 0.3,
    }
    if architecture == "mistral":
        settings["sliding_window"] = None
    if architecture in ("qwen3", "mistral"):
        settings["head_dim"] = 32  # not hidden_size / heads
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_CONFIGS[architecture](**(settings | changes)))  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    _write_tokenizer(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """A byte-level tokenizer without merges: one token a byte, so any text goes there and back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
