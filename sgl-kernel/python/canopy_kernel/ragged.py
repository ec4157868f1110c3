"""A ragged batch: which queries and which keys of a paged pool belong to which request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Which keys and which queries belong to which request of a batch.

    positions: ``[m]`` int, true positions of all queries, sorted inside each request;
    query_starts: ``[b + 1]`` int32, prefix sums of queries a request;
    slots: ``[sum of lengths]`` int, pool slot of every key, in position order;
    key_starts: ``[b + 1]`` int32, prefix sums of keys a request;
    longest: the most queries any request has.
    counts, lengths: queries and keys a request as host numbers, and host_positions: ``[m]`` the
    positions in host memory. What is not given is read from the device where it is wanted, and
    the host waits for it.
    """

    positions: torch.Tensor
    query_starts: torch.Tensor
    slots: torch.Tensor
    key_starts: torch.Tensor
    longest: int
    counts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    host_positions: torch.Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def one(positions: torch.Tensor, slots: torch.Tensor) -> Rows:
        """A batch of one request. Nothing crosses between host and device."""
        m, n = positions.numel(), slots.numel()
        ends = torch.arange(2, dtype=torch.int32, device=positions.device)
        return Rows(positions, ends * m, slots, ends * n, m, (m,), (n,))

    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Queries and keys of each request, on the host."""
        if self.counts:
            return self.counts, self.lengths
        if "sizes" not in self._made:
            self._made["sizes"] = tuple(
                tuple(starts.diff().tolist()) for starts in (self.query_starts, self.key_starts)
            )
        return self._made["sizes"]

    def requests(self) -> list[tuple[slice, slice]]:
        """Query and key slices of each request."""
        found, q, k = [], 0, 0
        for count, length in zip(*self.sizes()):
            found.append((slice(q, q + count), slice(k, k + length)))
            q, k = q + count, k + length
        return found

    def once(self, key: Any, make: Any) -> Any:
        """What ``make()`` gives, made once for all layers of a forward."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]
