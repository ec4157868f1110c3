"""Convert metadata between nodes and their pages on disk.

Times in the disk tier are Unix times, which stay valid after a restart; times in the tree are on the
requests' clock. Requests carry the difference (``epoch``), so that all ranks compute the same.
"""

from __future__ import annotations

import dataclasses
import operator

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.radix.live_request import LiveRequest, NodeLeaf
from sglang_canopy.records import Request, copy_record

node_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(PageMeta)[2:]))
"""Return the fields that all pages of a node share: all after ``offset`` and ``length``."""


def metadata_of(leaf: NodeLeaf, epoch: float) -> PageMeta:
    """Return the metadata of ``leaf`` in Unix time."""
    meta = PageMeta.from_leaf(leaf, leaf.ttl_s)
    meta.shift(epoch)
    return meta


def pages_of(leaf: NodeLeaf, pages: int, page_tokens: int, epoch: float) -> list[PageMeta]:
    """Return the metadata of each page of a node."""
    common = node_fields(metadata_of(leaf, epoch))
    return [
        PageMeta(leaf.offset + i * page_tokens, page_tokens, *common)  # fields in order
        for i in range(pages)
    ]


def restore(leaf: NodeLeaf, meta: PageMeta, now: float, epoch: float) -> None:
    """Copy the metadata of pages into ``leaf``, except the keep, which a budget grants."""
    meta = dataclasses.replace(meta)
    meta.shift(-epoch)
    kept_until = leaf.keep_until
    copy_record(meta, leaf)
    leaf.ttl_s = meta.ttl_s
    leaf.last_access = min(leaf.last_access, now)
    leaf.created = min(leaf.created, leaf.last_access)
    leaf.keep_until = kept_until


def frozen_copy(request: LiveRequest, blocks: int, epoch: float) -> Request:
    """Return a snapshot of ``request`` for another thread, in Unix time."""
    return request.copy(
        time=request.time + epoch,
        path=tuple(request.path[:blocks]),
        keep_until=None if request.keep_until is None else request.keep_until + epoch,
        label=None,
    )
