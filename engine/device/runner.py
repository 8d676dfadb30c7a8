"""The forward pass: a batch of tokens in, logits out. Reads and writes the pool's pages, knows no request."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from engine.device.batch import ForwardBatch
from engine.device.kv_pool import KVPool
from kvrelay_kernels import decode_attention, extend_attention, store_kv

__all__ = ["ATTENTION", "Runner", "TransformersRunner"]

ATTENTION = "kvrelay_paged"  # the name transformers knows our attention by; a model must be loaded with it


class Runner(Protocol):
    """A model together with the pool it keeps K and V in."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the batch, writing K and V of its tokens to their slots. Returns logits ``[L, vocab]`` float32.

        When it returns the pages are written: the caller may hand them to a transfer that knows no device streams.
        """
        ...


class TransformersRunner:
    """Runs transformers' own modelling code, with attention over the pool's pages in place of its cache."""

    def __init__(self, model: PreTrainedModel, pool: KVPool):
        assert model.config._attn_implementation == ATTENTION
        assert not model.training
        self._body: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
        self._head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._pool = pool

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = self._body(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            kv_pool=self._pool,
            forward_batch=batch,
        ).last_hidden_state
        logits: Tensor = self._head(hidden[0].index_select(0, batch.logit_rows))
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return logits.float()


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,  # always None: causality follows from positions in the pages
    *,
    scaling: float,
    kv_pool: KVPool,
    forward_batch: ForwardBatch,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, once a layer. Returns ``[1, T, heads, head_dim]``."""
    batch = forward_batch
    pages = kv_pool.layer(module.layer_idx)  # type: ignore[arg-type]
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    store_kv(key, value, pages, batch.slots)
    if batch.is_decode:
        out = decode_attention(query, pages, batch.page_table, batch.seq_lens, scaling)
    else:
        out = extend_attention(query, pages, batch.page_table, batch.query_starts, batch.seq_lens, scaling)
    return out.unsqueeze(0), None


# Without an entry in transformers' mask interface under the same name, no mask is built.
AttentionInterface.register(ATTENTION, _paged_attention)
