"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def is_host(x: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that the CPU reads without waiting for a device."""
    return x.device.type == "cpu"


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``. From the host by way of pinned memory, so that nothing is waited for."""
    if x.device == device:
        return x
    if device.type == "cuda" and is_host(x) and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(slots=True)
class HostCopy:
    """A tensor on its way to the host. ``event``: the copy is done; None: it is."""

    tensor: torch.Tensor
    event: Any = None

    @staticmethod
    def of(x: torch.Tensor) -> HostCopy:
        """Begin copying ``x`` on the current stream, after what is queued there."""
        if is_host(x):
            return HostCopy(x)
        host = x.to("cpu", non_blocking=True)  # torch takes pinned memory for this
        event = None
        if x.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return HostCopy(host, event)

    def get(self) -> torch.Tensor:
        """The copy, once it is there: the one place where the host may wait."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        return self.tensor
