"""A plain decoder's weights: what the fusion engine needs of a Llama-type model.

The forward pass is :mod:`.engine`'s own, because it must run any set of rows at their true positions
over any KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from canopy_chunks.rope import Rope
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. ``window`` is the sliding window in tokens, or None."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    eps: float
    window: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers, in elements (multiply by the dtype's bytes)."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. ``qkv [(heads + 2 kv_heads) head_dim, hidden]``, ``gate_up [2 inner, hidden]``.

    head_norms: of queries and of keys, ``[head_dim]`` each, before they are rotated; keys move to new
    positions with their norm, since a rotation leaves their length.
    """

    norm_in: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    norm_mid: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None = None


class Ranks(Protocol):
    """The ranks of a model whose heads, inner width and vocabulary are split over several."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``part``."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[m]`` ids -> ``[m, hidden]``."""

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """``[m, this rank's share of the vocabulary]`` -> ``[m, vocab]``."""


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, rotation and identity of a decoder; ``identity`` keys the chunks made with it.

    ranks: set where this is one rank's part of the weights; the shape's heads are then its own.
    """

    shape: Shape
    layers: tuple[Layer, ...]
    embed: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    rope: Rope
    identity: str
    ranks: Ranks | None = None

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A sum over heads or inner width, of which this rank has ``part``."""
        return part if self.ranks is None else self.ranks.sum(part)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def check_length(self, tokens: int) -> None:
        """Refuse a prompt that a sliding window would cut: its attention is not ours."""
        if self.shape.window is not None and tokens > self.shape.window:
            raise CanopyError(
                f"a prompt of {tokens} tokens is longer than this model's sliding window of "
                f"{self.shape.window}; chunk reuse holds only inside it: shorten the prompt."
            )
