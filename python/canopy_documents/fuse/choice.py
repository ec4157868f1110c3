"""The tokens of a prompt to compute. A choice made on a device is not read by the host."""

from __future__ import annotations

import torch

from canopy_documents.store.device_copy import HostCopy, is_host, to_device


class ChosenTokens:
    """The tokens of a prompt to compute: fixed tokens, and tokens picked by a selector.

    certain: ``[n]`` bool on the host. picked: sorted positions in chunks, disjoint from
    ``certain``, on the model's device. Their number is known at once, but reading them would block
    the scheduler until the device has caught up. They are copied to the host in the background;
    :meth:`mask` waits for the copy if necessary.
    """

    def __init__(self, certain: torch.Tensor, picked: torch.Tensor | None = None) -> None:
        self._mask = certain
        self._picked: torch.Tensor | None = None
        self._copy: HostCopy | None = None
        if picked is None:
            return
        if is_host(picked):
            self._mask = certain.clone()
            self._mask[picked] = True
        else:
            self._picked, self._copy = picked, HostCopy.start(picked)

    @property
    def total(self) -> int:
        """Number of tokens in the prompt."""
        return self._mask.numel()

    @property
    def is_on_host(self) -> bool:
        """Whether the host has the whole choice."""
        return self._copy is None

    @property
    def count(self) -> int:
        """The number of computed tokens."""
        return int(self._mask.sum()) + self._pending_count

    def count_in(self, inside: torch.Tensor) -> int:
        """Return the number of computed tokens within ``inside [n]`` (bool, on the host), such as a
        mask of chunks."""
        return int((self._mask & inside).sum()) + self._pending_count

    @property
    def _pending_count(self) -> int:
        """Number of picked tokens that are not on the host yet."""
        return 0 if self._copy is None else self._copy.tensor.numel()

    def rows(self) -> torch.Tensor:
        """Return the sorted positions to compute, on the device that chose them. Does not wait."""
        certain = self._mask.nonzero()[:, 0]
        if self._picked is None:
            return certain
        return torch.cat([to_device(certain, self._picked.device), self._picked]).sort()[0]

    def reused_rows(self, prefix: int) -> torch.Tensor:
        """Return the sorted positions from ``prefix`` on that are not computed, as :meth:`rows`."""
        rows = self.rows()
        computed = torch.zeros(self.total, dtype=torch.uint8, device=rows.device)
        computed[:prefix] = 1
        computed.index_fill_(0, rows, 1)
        return computed.sort(stable=True).indices[: self.total - prefix - self.count]

    def mask(self) -> torch.Tensor:
        """Return ``[n]`` bool on the host. Waits for the copy of tokens picked on a device."""
        if self._copy is not None:
            mask = self._mask.clone()
            mask[self._copy.get()] = True
            self._mask, self._copy, self._picked = mask, None, None
        return self._mask
