"""A plain decoder of the Llama family: its weights, and a forward in torch alone, for an engine without
a server. Tests hold SGLang's own layers against it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from canopy_documents.fuse.model import Attention, Model, Ranks
from canopy_documents.fuse.rope import Rotation, movable_variant, rotate
from canopy_documents.store.chunk import Shape
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class Rope(Rotation):
    """Rotation by frequencies.

    inv_freq: ``[head_dim / 2]`` fp32, radians per token; scaling: factor on cos and sin.
    """

    inv_freq: torch.Tensor
    scaling: float = 1.0

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        angle = positions.to(torch.float32)[:, None] * self.inv_freq
        return torch.cat([angle.cos(), angle.sin()], dim=-1) * self.scaling


def from_config(config: Any) -> Rope:
    """Return the rotation of a Hugging Face config. Raises CanopyError if it cannot be moved."""
    variant, params = movable_variant(config)
    if variant == "default":
        theta: Any = params.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        steps = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return Rope(1.0 / float(theta) ** steps)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    init = ROPE_INIT_FUNCTIONS[variant]
    args = {"device": "cpu"} if "device" in inspect.signature(init).parameters else {}
    inv_freq, scaling = init(config, **args)
    return Rope(inv_freq.float(), float(scaling))


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. ``qkv [(heads + 2 kv_heads) head_dim, hidden]``, ``gate_up [2 inner, hidden]``.

    head_norms: of queries and of keys, ``[head_dim]`` each. Keys are normalised before RoPE, so a
    chunk's keys can be rotated to a new position. mlp_biases: of ``gate_up`` and of ``down``.
    """

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    norm_mid: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
    out_bias: torch.Tensor | None = None
    mlp_biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)


@dataclass(frozen=True)
class PlainModel(Model):
    """Weights, rotation and identity of a decoder. With ``ranks``, ``embed`` has the rows of all ranks;
    window: the sliding window in tokens, or None."""

    shape: Shape
    layers: tuple[Layer, ...]
    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    rope: Rope
    identity: str
    ranks: Ranks | None = None
    window: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        self._check_length(positions)
        eps, table = self.shape.eps, self.rope.table(positions)
        hidden = F.embedding(ids, self.embed)
        for i, layer in enumerate(self.layers):
            attended = attention(i, *self._project(layer, hidden, table))
            if (kept_rows := getattr(attention, "kept_rows", None)) is not None:
                hidden, table = hidden[kept_rows], table[kept_rows]
            projected = self.whole(F.linear(attended.flatten(1), layer.out))
            hidden = add_residual(hidden, projected, layer.out_bias)
            gate_up_bias, down_bias = layer.mlp_biases
            normed = rms_norm(hidden, layer.norm_mid, eps)
            gate, up = F.linear(normed, layer.gate_up, gate_up_bias).chunk(2, -1)
            down = self.whole(F.linear(F.silu(gate) * up, layer.down))
            hidden = add_residual(hidden, down, down_bias)
        return rms_norm(hidden, self.norm, eps)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = F.linear(hidden, self.head)
        return (out if self.ranks is None else self.ranks.gather(out)).float()

    def _check_length(self, positions: torch.Tensor) -> None:
        """Refuse a prompt longer than the sliding window, which this forward does not implement."""
        if self.window is not None and (tokens := int(positions[-1]) + 1) > self.window:
            raise CanopyError(
                f"a prompt of {tokens} tokens is longer than this model's sliding window of "
                f"{self.window}; chunk reuse holds only inside it: shorten the prompt."
            )

    def _project(
        self, layer: Layer, hidden: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q, K (both rotated) and V of the rows."""
        shape = self.shape
        joined = F.linear(rms_norm(hidden, layer.norm_in, shape.eps), layer.qkv, layer.qkv_bias)
        joined = joined.view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = joined.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        if layer.head_norms is not None:
            q, k = (rms_norm(x, weight, shape.eps) for x, weight in zip((q, k), layer.head_norms))
            return rotate(q, table), rotate(k, table), v
        rotated = rotate(joined[:, : shape.heads + shape.kv_heads], table)
        return rotated[:, : shape.heads], rotated[:, shape.heads :], v


def add_residual(
    hidden: torch.Tensor, projected: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Add a projection to the residual stream; its bias is added once for all ranks."""
    return hidden + (projected if bias is None else projected + bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm in fp32, as transformers does it."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)
