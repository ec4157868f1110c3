"""Host memory that a CUDA device reads, without rounding up its size.

torch rounds its own pinned memory up to a power of two: 20,000 MiB take 32,768. This module
registers pages of the process with CUDA instead.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


class PinnedPages(mmap.mmap):
    """Private pages, registered until the last tensor over them is freed."""

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()  # before the pages are unmapped


def pinned(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised pinned memory; if CUDA cannot register it, torch's with a warning."""
    try:
        return registered(size, dtype, torch.cuda.cudart(), torch.cuda.synchronize)
    except (RuntimeError, OSError) as error:
        logger.warning(
            "canopy: %s; torch pins the documents' memory, which may take twice its size", error
        )
        return torch.empty(size, dtype=dtype, pin_memory=True)


def registered(
    size: tuple[int, ...], dtype: torch.dtype, runtime: Any, wait: Callable[[], None]
) -> torch.Tensor:
    """Return a tensor over its own pages, registered with ``runtime`` (``torch.cuda.cudart()``).

    ``wait`` is called before they are released, since a device may be reading them. Raises
    RuntimeError if CUDA refuses, OSError if there is no memory.
    """
    count = math.prod(size)
    if not count:
        return torch.empty(size, dtype=dtype)
    nbytes = count * dtype.itemsize
    pages = PinnedPages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=dtype, count=count)
    address = flat.data_ptr()
    code = int(runtime.cudaHostRegister(address, nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister of {nbytes:,} bytes failed with error {code}")

    def release() -> None:
        wait()
        runtime.cudaHostUnregister(address)

    pages.release = release
    return flat.view(size)
