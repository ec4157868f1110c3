"""Memory of the pages in SGLang's host pool."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from sglang_canopy.errors import CanopyError


class HostLayout:
    """Writable memory of a host pool's pages, for every layout whose pool returns addresses."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.page_tokens: int = pool.page_size
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise CanopyError(
                f"--hicache-storage-backend canopy cannot use the host layout "
                f"{getattr(pool, 'layout', '?')!r} of {type(pool).__name__} ({error}); try "
                "--hicache-mem-layout page_first or page_first_direct"
            ) from None
        self.page_bytes = sum(sizes)
        self._types = {size: ctypes.c_char * size for size in set(sizes)}
        self._buffers = len(sizes)
        """Buffers of one page: K and V, or one per layer."""

    def views(self, host_indices: torch.Tensor, pages: int) -> list[list[memoryview]]:
        """Return the buffers of each page as writable views of the pool's memory."""
        pointers, sizes = self.pool.get_page_buffer_meta(host_indices)
        assert len(pointers) == pages * self._buffers, (len(pointers), pages, self._buffers)
        types = self._types
        flat = [
            memoryview(types[size].from_address(pointer)).cast("B")
            for pointer, size in zip(pointers, sizes)
        ]
        return [flat[i : i + self._buffers] for i in range(0, len(flat), self._buffers)]
