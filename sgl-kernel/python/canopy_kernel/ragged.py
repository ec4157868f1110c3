"""A ragged batch: the queries, and the keys in a paged pool, of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Queries and keys of each request of a batch.

    positions: ``[m]`` int, true positions of all queries, sorted inside each request;
    query_starts: ``[b + 1]`` int32, prefix sums of queries per request;
    slots: ``[sum of lengths]`` int, pool slot of every key, in position order;
    key_starts: ``[b + 1]`` int32, prefix sums of keys per request;
    longest: maximum queries of a request;
    counts, lengths: queries and keys per request as host numbers;
    host_positions: ``[m]``, the positions in host memory. The host waits for a device read of missing
    host values when they are needed.
    """

    positions: torch.Tensor
    query_starts: torch.Tensor
    slots: torch.Tensor
    key_starts: torch.Tensor
    longest: int
    counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    host_positions: torch.Tensor | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def single(positions: torch.Tensor, slots: torch.Tensor) -> Rows:
        """Return a batch of one request, without transfers between host and device."""
        m, n = positions.numel(), slots.numel()
        ends = torch.arange(2, dtype=torch.int32, device=positions.device)
        return Rows(positions, ends * m, slots, ends * n, m, (m,), (n,))

    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of queries and keys of each request, on the host."""
        if self.counts:
            return self.counts, self.lengths
        if "sizes" not in self._cache:
            self._cache["sizes"] = tuple(
                tuple(starts.diff().tolist()) for starts in (self.query_starts, self.key_starts)
            )
        return self._cache["sizes"]

    def requests(self) -> list[tuple[slice, slice]]:
        """Return the query and key slices of each request."""
        slices, q, k = [], 0, 0
        for count, length in zip(*self.sizes()):
            slices.append((slice(q, q + count), slice(k, k + length)))
            q, k = q + count, k + length
        return slices

    def once(self, key: Any, make: Any) -> Any:
        """Return ``make()``, computed once for all layers of a forward."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]
