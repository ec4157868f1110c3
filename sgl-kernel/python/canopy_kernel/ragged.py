"""A ragged batch: the queries, and the keys in a paged pool, of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class RequestSlices(NamedTuple):
    """A request's part of a batch."""

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class Rows:
    """Queries and keys of each request of a batch.

    positions: ``[m]`` int, true positions of all queries, sorted inside each request;
    query_starts: ``[b + 1]`` int32, prefix sums of queries per request;
    slots: ``[sum of key_counts]`` int, pool slot of every key, in position order;
    key_starts: ``[b + 1]`` int32, prefix sums of keys per request;
    max_queries: of one request;
    query_counts, key_counts: queries and keys per request as host numbers;
    host_positions: ``[m]``, the positions in host memory. The host waits for a device read of missing
    host values when they are needed.
    """

    positions: torch.Tensor
    query_starts: torch.Tensor
    slots: torch.Tensor
    key_starts: torch.Tensor
    max_queries: int
    query_counts: tuple[int, ...] = ()
    key_counts: tuple[int, ...] = ()
    host_positions: torch.Tensor | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def single(positions: torch.Tensor, slots: torch.Tensor) -> Rows:
        """Return a batch of one request, without transfers between host and device."""
        m, n = positions.numel(), slots.numel()
        ends = torch.arange(2, dtype=torch.int32, device=positions.device)
        return Rows(positions, ends * m, slots, ends * n, m, (m,), (n,))

    def host_counts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the numbers of queries and keys of each request, on the host."""
        if self.query_counts:
            return self.query_counts, self.key_counts
        if "host_counts" not in self._cache:
            self._cache["host_counts"] = tuple(
                tuple(starts.diff().tolist()) for starts in (self.query_starts, self.key_starts)
            )
        return self._cache["host_counts"]

    def request_slices(self) -> list[RequestSlices]:
        """Return the slices of each request."""
        slices, query, key = [], 0, 0
        for queries, keys in zip(*self.host_counts()):
            slices.append(RequestSlices(slice(query, query + queries), slice(key, key + keys)))
            query, key = query + queries, key + keys
        return slices

    def compute_once(self, key: Any, compute: Any) -> Any:
        """Return ``compute()``, computed once for all layers of a forward."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]
