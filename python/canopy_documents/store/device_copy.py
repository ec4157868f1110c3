"""Copies between host and device that do not block the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def is_host(x: torch.Tensor) -> bool:
    """Return whether the CPU can read a tensor without waiting for a device."""
    return x.device.type == "cpu"


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy ``x`` to ``device``; from the host through pinned memory, without blocking."""
    if x.device == device:
        return x
    if device.type == "cuda" and is_host(x) and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(slots=True)
class HostCopy:
    """A tensor being copied to the host. ``event``: marks the end of the copy; None after that."""

    tensor: torch.Tensor
    event: Any = None

    @staticmethod
    def start(x: torch.Tensor) -> HostCopy:
        """Start to copy ``x`` on the current stream, after the work already queued there."""
        if is_host(x):
            return HostCopy(x)
        host = x.to("cpu", non_blocking=True)  # torch uses pinned memory for this
        event = None
        if x.is_cuda:
            event = torch.cuda.Event()
            event.record()
        return HostCopy(host, event)

    def get(self) -> torch.Tensor:
        """Return the copy. This is the only place where the host may wait for it."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        return self.tensor
