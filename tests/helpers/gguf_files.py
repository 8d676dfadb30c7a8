"""Writes tiny models as GGUF files, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from tests.helpers.models import CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE

__all__ = ["write_gguf"]

_HEADS, _KV_HEADS = 4, 2
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


def write_gguf(
    path: Path, model: Path, *, architecture: str = "llama", pre_tokenizer: str = "smollm", without: str = ""
) -> Path:
    """Write the tiny Llama in directory `model` to `path`, with two merges in its vocabulary, a tensor left out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_block_count(3)
    writer.add_feed_forward_length(96)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "ĠĠ"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    unused = VOCAB_SIZE - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens + [f"[UNUSED{i}]" for i in range(unused)])
    writer.add_token_types(types + [gguf.TokenType.UNUSED] * unused)
    writer.add_token_merges(["t h", "Ġ Ġ"])
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in load_file(model / "model.safetensors").items():
        if name == without:
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleave(tensor, _HEADS if "q_proj" in name else _KV_HEADS)
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(tensor: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """From rotating halves, as transformers has it, to rotating neighbours, as llama.cpp has it."""
    by_head = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return by_head.swapaxes(1, 2).reshape(tensor.shape)
