"""An 8-bit copy of a chunk's KV in the layers that a probe runs through.

A selector that looks at the reused KV needs all of it before it can say which tokens are computed
again, so that chunks on a slower tier would travel whole to lose a part of their tokens. With this
copy at hand it chooses first, and only the others' KV travels: (1 - r) N tokens of N
(CacheTune, section 4.2, which has its choice from offline scores).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

LEVELS = 127


@dataclass(frozen=True, slots=True)
class Int8Copy:
    """Stands in for a ``Chunk`` in a probe: K before RoPE and V of the first ``layers`` layers.

    k, v: ``[layers, n, kv_heads, d]`` int8; k_scale: ``[layers, 1, kv_heads, d]`` fp32, a scale a
    channel, since keys before RoPE have channels far larger than the others; v_scale:
    ``[layers, n, kv_heads, 1]``, a scale a token and head.
    """

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    dtype: torch.dtype

    @staticmethod
    def of(chunk: Any, layers: int, device: torch.device | None = None) -> Int8Copy:
        """Of the first ``layers`` layers of a chunk, on ``device`` (default: where the chunk is)."""
        raw_k, v = chunk.raw_k[:layers], chunk.v[:layers]
        if device is not None:
            raw_k, v = (x.to(device, non_blocking=True) for x in (raw_k, v))
        k8, k_scale = _quantise(raw_k, 1)
        v8, v_scale = _quantise(v, 3)
        return Int8Copy(chunk.ids, chunk.prefix, k8, v8, k_scale, v_scale, raw_k.dtype)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def scores(self) -> dict[str, torch.Tensor]:
        """None: whoever has scores needs no probe."""
        return {}

    @property
    def layers(self) -> int:
        """Layers it has."""
        return self.k.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return sum(x.nbytes for x in (self.k, self.v, self.k_scale, self.v_scale))

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """About K (before RoPE) and V ``[m, kv_heads, d]`` of ``tokens [m]``, a run of them."""
        first = int(tokens[0]) if tokens.numel() else 0
        run = slice(first, first + tokens.numel())
        assert not tokens.numel() or int(tokens[-1]) + 1 == run.stop, "tokens of a copy are a run"
        k = self.k[layer, run].float() * self.k_scale[layer]
        v = self.v[layer, run].float() * self.v_scale[layer, run]
        return k.to(self.dtype), v.to(self.dtype)


def _quantise(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` rounded to 8 bits with one scale for all along ``dim``."""
    wide = x.float()
    top = wide.abs().amax(dim=dim, keepdim=True) if x.shape[dim] else wide.sum(dim, keepdim=True)
    scale = (top / LEVELS).clamp_min(1e-12)
    return (wide / scale).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


class Int8Copies:
    """The copies that are kept, by chunk key: at most ``capacity_bytes``, the longest unused go first."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self._copies: OrderedDict[str, Int8Copy] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, key: str, copy: Int8Copy) -> None:
        """Keep a copy, unless it alone is too large."""
        self.drop(key)
        if copy.nbytes > self.capacity_bytes:
            return
        while self.used_bytes + copy.nbytes > self.capacity_bytes:
            self.drop(next(iter(self._copies)))
        self._copies[key] = copy
        self.used_bytes += copy.nbytes

    def get(self, key: str) -> Int8Copy | None:
        """The copy of a chunk: a use."""
        if key in self._copies:
            self._copies.move_to_end(key)
        return self._copies.get(key)

    def drop(self, key: str) -> None:
        """Forget a copy, if there is one."""
        found = self._copies.pop(key, None)
        if found is not None:
            self.used_bytes -= found.nbytes

    def stats(self) -> Mapping[str, int]:
        """Copies and their bytes."""
        return {"copies": len(self), "used_bytes": self.used_bytes}
