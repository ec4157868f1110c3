"""What fusion needs of a decoder: its sizes, its rotation, and a forward of any rows at their positions.

A server gives SGLang's own model (``server/served_model.py``). Evaluation gives one of plain weights
(``benchmark/chunk/comparators/plain_model.py``), against which the other is tested.
"""

from __future__ import annotations

import abc
from typing import Protocol

import torch

from canopy_chunks.fuse.rope import Rope
from canopy_chunks.store.shape import Shape


class Ranks(Protocol):
    """The ranks of a model whose heads, inner width and vocabulary are split over several."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``part``."""

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """``[m, this rank's share of the vocabulary]`` -> ``[m, vocab]``."""


class Enough(Exception):
    """Raised by an :class:`Attention`: nothing after it is wanted of this forward."""


class Attention(Protocol):
    """What a forward does with the queries, keys and values of a layer's rows.

    kept: indices of the rows that go on, where the last call dropped some; else None.
    """

    kept: torch.Tensor | None

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """``q [m, heads, d]``, ``k, v [m, kv_heads, d]``, q and k rotated -> the attention of the
        rows that go on, ``[kept, heads, d]``."""


class Model(abc.ABC):
    """A decoder; ``identity`` keys the chunks made with it.

    ranks: set where this is one rank's part of it; the shape's heads are then its own.
    """

    shape: Shape
    rope: Rope
    identity: str
    ranks: Ranks | None

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Of hidden states, keys and values."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where it runs."""

    @abc.abstractmethod
    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """Rows ``ids [m]`` at ``positions [m]`` through all layers, each of which calls
        ``attention``: hidden states ``[rows that are left, hidden]`` after the last norm."""

    @abc.abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[m, hidden]`` of :meth:`forward` -> ``[m, vocab]`` fp32."""

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """A sum over heads or inner width, of which this rank has ``part``."""
        return part if self.ranks is None else self.ranks.sum(part)
