"""The decoder interface of fusion: sizes, rotation, and a forward of any rows at their positions.

A server supplies SGLang's own model (``server/served_model.py``). Evaluation supplies a model of
plain weights (``benchmark/documents/comparators/plain_model.py``), the reference for tests of the
server's model.
"""

from __future__ import annotations

import abc
from typing import Protocol

import torch

from canopy_documents.fuse.rope import Rotation
from canopy_documents.store.chunk import Shape


class Ranks(Protocol):
    """Tensor-parallel ranks of a model: heads, inner width and vocabulary are split over them."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' ``part``."""

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Map ``[m, this rank's share of the vocabulary]`` to ``[m, vocab]``."""


class ForwardEnd(Exception):
    """Raised by an :class:`Attention` to end the forward early."""


class Attention(Protocol):
    """Handles the queries, keys and values of a layer's rows in a forward."""

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of the rows, ``[m, heads, d]``.

        ``q [m, heads, d]``, ``k, v [m, kv_heads, d]``; q and k are rotated.
        """


class Model(abc.ABC):
    """A decoder; ``identity`` is part of the keys of chunks encoded with it.

    ranks: set if this is one rank's part of the model; the shape's heads are then this rank's own.
    """

    shape: Shape
    rope: Rotation
    identity: str
    ranks: Ranks | None

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states, keys and values."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """The model's device."""

    @abc.abstractmethod
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Run rows ``ids [m]`` at ``positions [m]`` through all layers; each layer calls
        ``attention``.

        Returns hidden states ``[m, hidden]`` after the last norm.
        """

    @abc.abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[m, hidden]`` of :meth:`forward` to ``[m, vocab]`` fp32."""

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Sum ``part``, this rank's share, over all ranks (over heads or inner width)."""
        return part if self.ranks is None else self.ranks.sum(part)
