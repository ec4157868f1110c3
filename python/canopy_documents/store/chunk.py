"""A chunk: tokens, the prefix they were encoded after, and their KV with keys before RoPE."""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_documents.store.device_copy import HostCopy


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    eps: float

    @property
    def kv_elements_per_token(self) -> int:
        """K and V of one token over all layers, in elements (multiply by the dtype's size)."""
        return 2 * self.layers * self.kv_heads * self.head_dim


class Scores(UserDict):  # type: ignore[type-arg]
    """Scores by name, on the host; scores from a device are copied when they are read."""

    def __setitem__(self, name: str, score: torch.Tensor) -> None:
        self.data[name] = HostCopy.start(score)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.data[name].get()  # type: ignore[no-any-return]


@dataclass(slots=True)
class Chunk:
    """Position-independent KV of one run of tokens.

    ids: the tokens; raw_k: ``[layers, n, kv_heads, d]`` keys before RoPE; v: the same shape;
    prefix: the tokens it was encoded after (``()`` for no prefix); scores: offline selectors'
    scores by name, ``[n]`` fp32; tenant: its owner.
    """

    ids: tuple[int, ...]
    raw_k: torch.Tensor
    v: torch.Tensor
    prefix: tuple[int, ...] = ()
    scores: MutableMapping[str, torch.Tensor] = field(default_factory=Scores)
    tenant: str | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self.raw_k.nbytes + self.v.nbytes

    def on_host(self) -> Chunk:
        """Return a new chunk with the KV in host memory; KV that is there is not copied."""
        k, v = self.raw_k.to("cpu"), self.v.to("cpu")
        return Chunk(self.ids, k, v, self.prefix, self.scores, self.tenant)

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K (before RoPE) and V ``[m, kv_heads, d]`` of one layer's ``tokens [m]`` only.

        tokens are sorted, distinct and on the host; a contiguous run is returned without a copy.
        """
        first = int(tokens[0]) if tokens.numel() else 0
        if tokens.numel() and int(tokens[-1]) + 1 - first == tokens.numel():
            run = slice(first, first + tokens.numel())
            return self.raw_k[layer][run], self.v[layer][run]
        return self.raw_k[layer][tokens], self.v[layer][tokens]


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk in a prompt, at position ``start``."""

    chunk: Chunk
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.chunk)


@dataclass(frozen=True, slots=True)
class FusedPrompt:
    """Tokens ``ids [n]`` and their known chunks, sorted and disjoint.

    The last token is always computed (it gives the logits), even in a chunk.
    """

    ids: torch.Tensor
    placed: tuple[PlacedChunk, ...]

    def __post_init__(self) -> None:
        end = 0
        for p in self.placed:
            assert p.start >= end, f"chunks overlap or are out of order at {p.start} < {end}"
            end = p.end
        assert end <= len(self), f"chunks end at {end}, the prompt at {len(self)}"

    def __len__(self) -> int:
        return self.ids.numel()

    @property
    def chunk_tokens(self) -> int:
        """The number of tokens in chunks."""
        return sum(len(p.chunk) for p in self.placed)

    @property
    def first_is_exact(self) -> bool:
        """Whether the first chunk was encoded after exactly the tokens that precede it."""
        if not self.placed:
            return False
        first = self.placed[0]
        return tuple(self.ids[: first.start].tolist()) == first.chunk.prefix

    def in_chunk(self) -> torch.Tensor:
        """Return ``[n]`` bool: whether a chunk holds the token's KV."""
        mask = torch.zeros(len(self), dtype=torch.bool)
        for p in self.placed:
            mask[p.start : p.end] = True
        return mask

    def tail_positions(self) -> torch.Tensor:
        """Return the positions after the last chunk, the question; at least the last token."""
        end = max((p.end for p in self.placed if len(p.chunk)), default=0)
        return torch.arange(min(end, len(self) - 1), len(self))


@dataclass(slots=True, frozen=True)
class ChunkSuffix:
    """The tokens of ``base`` from ``skip`` on, without a copy.

    For a prefix hit that ends inside a chunk. Only its rows are read.
    """

    base: Any
    """A :class:`Chunk`, or one in host memory."""
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
        return {name: score[..., self.skip :] for name, score in self.base.scores.items()}

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K before RoPE and V of these tokens of the suffix."""
        return self.base.rows(layer, tokens + self.skip)


def base_and_skip(chunk: Any) -> tuple[Any, int]:
    """Return the stored chunk and the offset in it, for a chunk or the suffix of one."""
    return (chunk.base, chunk.skip) if isinstance(chunk, ChunkSuffix) else (chunk, 0)
