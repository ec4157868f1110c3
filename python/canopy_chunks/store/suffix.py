"""The suffix of a stored chunk, for a prefix hit that ends inside the chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from canopy_chunks.store.chunk import Chunk
from canopy_chunks.store.host_memory import HostChunk


@dataclass(slots=True, frozen=True)
class ChunkSuffix:
    """The tokens of ``base`` from ``skip`` on, without a copy; has the interface of ``Chunk``."""

    base: Chunk | HostChunk
    skip: int

    def __len__(self) -> int:
        return len(self.base) - self.skip

    @property
    def ids(self) -> tuple[int, ...]:
        return self.base.ids[self.skip :]

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens before the suffix: the chunk's prefix and its skipped tokens."""
        return self.base.prefix + self.base.ids[: self.skip]

    @property
    def scores(self) -> dict[str, torch.Tensor]:
        return {name: s[..., self.skip :] for name, s in self.base.scores.items()}

    @property
    def raw_k(self) -> torch.Tensor:
        return self.base.raw_k[:, self.skip :]

    @property
    def v(self) -> torch.Tensor:
        return self.base.v[:, self.skip :]

    @property
    def nbytes(self) -> int:
        return self.base.nbytes * len(self) // max(1, len(self.base))

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K before RoPE and V of these tokens of the suffix."""
        return self.base.rows(layer, tokens + self.skip)


def base_and_skip(chunk: Any) -> tuple[Any, int]:
    """Return the stored chunk and the offset in it, for a chunk or the suffix of one."""
    return (chunk.base, chunk.skip) if isinstance(chunk, ChunkSuffix) else (chunk, 0)
