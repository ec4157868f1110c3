"""SGLang's model as the document engine's ``Model``: any rows at their positions, over any KV.

Runs the server's loaded model, with its weights and kernels. Our own attention backend (SGLang's
forward context names a backend for each forward) passes each layer's queries, keys and values to
the engine. The scheduler's batch is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from canopy_documents.fuse.model import Attention, Model, Ranks
from canopy_documents.fuse.rope import Rotation
from canopy_documents.store.chunk import Shape


@dataclass(frozen=True)
class ServedModel(Model):
    """causal_lm: the loaded model (``...ForCausalLM``), whose ``model`` has the layers."""

    causal_lm: Any
    shape: Shape
    rope: Rotation
    identity: str
    ranks: Ranks | None
    compute_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the server computes in."""
        return self.compute_dtype

    @property
    def device(self) -> torch.device:
        return self.causal_lm.model.embed_tokens.weight.device  # type: ignore[no-any-return]

    @torch.no_grad()
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """As :meth:`Model.forward`."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        empty = ids.new_empty(0)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=ids,
            req_pool_indices=empty,
            seq_lens=empty,
            out_cache_loc=empty,
            seq_lens_sum=0,
            positions=positions,
        )
        with forward_context(ForwardContext(attn_backend=RowsBackend(attention))):  # type: ignore[arg-type]
            return self.causal_lm.model(ids, positions, batch)  # type: ignore[no-any-return]

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As :meth:`Model.logits`, with the whole vocabulary on every rank."""
        weight = self.causal_lm.lm_head.weight
        if self.ranks is not None:
            return self.ranks.gather(F.linear(hidden, weight)).float()
        return F.linear(hidden, weight[: self.shape.vocab]).float()


@dataclass(slots=True)
class RowsBackend:
    """The attention backend of SGLang's layers while the engine runs rows."""

    attention: Attention

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend ``q [m, heads * d]``; returns q's shape."""
        heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.tp_v_head_num)
        q, k, v = (x.view(-1, n, layer.head_dim) for x, n in zip((q, k, v), heads))
        out = self.attention(layer.layer_id, q, k, v)
        return out.reshape(out.shape[0], -1)
