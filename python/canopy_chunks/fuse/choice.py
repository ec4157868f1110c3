"""Which tokens of a prompt are computed, without reading on the host what the device chose."""

from __future__ import annotations

import torch

from canopy_chunks.store.device_copy import HostCopy, is_host, to_device


class ChosenTokens:
    """The tokens of a prompt to compute: certain ones, and those that a selector picked.

    certain: ``[n]`` bool on the host; picked: sorted positions in chunks that are not among them, on
    the model's device. Reading these would hold up the scheduler until the device has caught up; how
    many there are is known without. They travel to the host meanwhile, and :meth:`mask` waits for them
    where it must.
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
            self._picked, self._copy = picked, HostCopy.of(picked)

    @property
    def total(self) -> int:
        """Tokens of the prompt."""
        return self._mask.numel()

    @property
    def is_on_host(self) -> bool:
        """Whether the host has every token already."""
        return self._copy is None

    @property
    def count(self) -> int:
        """How many tokens are computed."""
        return int(self._mask.sum()) + self._waiting

    def count_in(self, inside: torch.Tensor) -> int:
        """How many of them lie ``inside [n]`` (bool, on the host): in a chunk."""
        return int((self._mask & inside).sum()) + self._waiting

    @property
    def _waiting(self) -> int:
        """How many were picked that the host does not have yet."""
        return 0 if self._copy is None else self._copy.tensor.numel()

    def rows(self) -> torch.Tensor:
        """Their sorted positions, on the device that chose them. Nothing is waited for."""
        certain = self._mask.nonzero()[:, 0]
        if self._picked is None:
            return certain
        return torch.cat([to_device(certain, self._picked.device), self._picked]).sort()[0]

    def others(self, prefix: int) -> torch.Tensor:
        """Sorted positions from ``prefix`` on that are not computed, where :meth:`rows` are."""
        rows = self.rows()
        computed = torch.zeros(self.total, dtype=torch.uint8, device=rows.device)
        computed[:prefix] = 1
        computed.index_fill_(0, rows, 1)
        return computed.sort(stable=True).indices[: self.total - prefix - self.count]

    def mask(self) -> torch.Tensor:
        """``[n]`` bool on the host. Waits until what was picked on a device has arrived."""
        if self._copy is not None:
            mask = self._mask.clone()
            mask[self._copy.get()] = True
            self._mask, self._copy, self._picked = mask, None, None
        return self._mask
