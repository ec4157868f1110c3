"""A node's metadata as its pages carry it, and back.

Times in the disk tier are seconds since 1970, so that they still mean something after a restart;
the tree's are the requests' own. The difference (``epoch``) travels with the requests, so all
ranks compute the same.
"""

from __future__ import annotations

import dataclasses
import operator

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.radix.leaf import NodeLeaf
from sglang_canopy.radix.live_request import LiveRequest
from sglang_canopy.records import Request, copy_record
from sglang_canopy.wire.stamp import MAX_KEEP_S

node_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(PageMeta)[2:]))
"""What all pages of a node have in common: every field after ``offset`` and ``tokens``."""


def metadata_of(leaf: NodeLeaf, epoch: float) -> PageMeta:
    """``leaf``'s metadata in the disk tier's time."""
    meta = PageMeta.from_leaf(leaf, leaf.ttl_s)
    pin = leaf.pin_until
    if pin is not None and (meta.keep_until is None or pin > meta.keep_until):
        meta.keep_until = pin
    meta.shift(epoch)
    return meta


def pages_of(leaf: NodeLeaf, pages: int, page_tokens: int, epoch: float) -> list[PageMeta]:
    """The metadata of each of a node's pages."""
    common = node_fields(metadata_of(leaf, epoch))
    return [
        PageMeta(leaf.offset + i * page_tokens, page_tokens, *common)  # fields in order
        for i in range(pages)
    ]


def restore(leaf: NodeLeaf, meta: PageMeta, now: float, epoch: float) -> float | None:
    """Give ``leaf`` what its pages carried. Returns until when its path is to be kept, if at all.

    A pin is for the disk: above it, nothing is kept for longer than a client may ask.
    """
    meta = dataclasses.replace(meta)
    meta.shift(-epoch)
    kept_until = leaf.keep_until
    copy_record(meta, leaf)
    leaf.ttl_s = meta.ttl_s
    leaf.last_access = min(leaf.last_access, now)
    leaf.created = min(leaf.created, leaf.last_access)
    leaf.pin_until, leaf.keep_until = meta.keep_until, kept_until  # the budget grants keeps
    return None if leaf.pin_until is None else min(leaf.pin_until, leaf.last_access + MAX_KEEP_S)


def frozen_copy(request: LiveRequest, blocks: int, epoch: float) -> Request:
    """``request`` as it is now, for another thread, in the disk tier's time."""
    return request.copy(
        time=request.time + epoch,
        path=tuple(request.path[:blocks]),
        keep_until=None if request.keep_until is None else request.keep_until + epoch,
        label=None,
    )
