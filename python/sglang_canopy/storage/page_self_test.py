"""Write one page of the host pool to disk when a scheduler has built its cache, read it back and compare.

The page is at the addresses that SGLang's pool returns for it, which is what the disk tier reads and writes.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.disk.store import DiskStore
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.storage.backend import HostLayout

logger = logging.getLogger(__name__)

POLICY = "canopy-lru"


def check_page(pool: Any) -> None:
    """Raise ``CanopyError`` if a page of the unused host ``pool`` read back from disk differs from the page written."""
    slots = pool.alloc(pool.page_size)
    try:
        slot = int(slots[0])
        pattern = _make_pattern(pool.get_data_page(slot))
        pool.set_from_flat_data_page(slot, pattern)
        with tempfile.TemporaryDirectory() as folder:
            was_read = _write_and_read(pool, slots, Path(folder))
        if was_read and not torch.equal(_as_bytes(pool.get_data_page(slot)), _as_bytes(pattern)):
            raise CanopyError(
                "a page of this SGLang's host pool read back from disk differs from the page written; "
                "install a tested SGLang (docs/guide/serving.md), or serve without a disk tier"
            )
    except (NotImplementedError, OSError):  # a pool without single pages, no temporary folder
        was_read = False
    finally:
        pool.free(slots)
    if not was_read:
        logger.info("canopy: no page was written and read back at start")


def _write_and_read(pool: Any, slots: torch.Tensor, folder: Path) -> bool:
    """Write a page and read it again after the pool lost it. Returns whether the disk did both."""
    layout = HostLayout(pool)
    page_bytes, views = layout.page_bytes, layout.page_views(slots, 1)
    policy = make_policy(POLICY)
    store = DiskStore(folder, page_bytes=page_bytes, capacity_bytes=4 * page_bytes, policy=policy)
    try:
        written = store.write(["page"], views, [PageMeta(0, pool.page_size)], [None])
        pool.set_from_flat_data_page(int(slots[0]), pool.get_dummy_flat_data_page())
        return all(written) and all(store.read(["page"], views))
    finally:
        store.close()


def _make_pattern(page: torch.Tensor) -> torch.Tensor:
    """Return a page of the same shape in which the bytes of two tokens differ."""
    numbers = torch.arange(page.numel() * page.element_size()) % 113  # finite in every type
    return numbers.to(torch.uint8).view(page.dtype).reshape(page.shape)


def _as_bytes(page: torch.Tensor) -> torch.Tensor:
    return page.contiguous().view(torch.uint8)
