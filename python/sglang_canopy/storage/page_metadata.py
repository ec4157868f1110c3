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
from sglang_canopy.records import Request
from sglang_canopy.request.fields import MAX_KEEP_S

node_fields = operator.attrgetter(*(f.name for f in dataclasses.fields(PageMeta)[2:]))
"""What all pages of a node have in common: every field after ``offset`` and ``tokens``."""


def metadata_of(leaf: NodeLeaf, epoch: float) -> PageMeta:
    """``leaf``'s metadata in the disk tier's time."""
    meta = PageMeta.from_leaf(leaf, offset=leaf.offset, tokens=leaf.length, ttl_s=leaf.ttl_s)
    pin = leaf.pin_until
    if pin is not None and (meta.keep_until is None or pin > meta.keep_until):
        meta.keep_until = pin
    meta.created += epoch
    meta.last_access += epoch
    if meta.keep_until is not None:
        meta.keep_until += epoch
    if meta.return_at is not None:
        meta.return_at += epoch
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
    meta.apply_to(leaf)
    leaf.ttl_s = meta.ttl_s
    leaf.last_access = min(leaf.last_access - epoch, now)
    leaf.created = min(leaf.created - epoch, leaf.last_access)
    if leaf.return_at is not None:
        leaf.return_at -= epoch
    if leaf.keep_until is None:
        return None
    leaf.pin_until = leaf.keep_until - epoch
    leaf.keep_until = None
    return min(leaf.pin_until, leaf.last_access + MAX_KEEP_S)


def frozen_copy(request: LiveRequest, blocks: int, epoch: float) -> Request:
    """``request`` as it is now, for another thread, in the disk tier's time."""
    return Request(
        time=request.time + epoch,
        category=request.category,
        path=tuple(request.path[:blocks]),
        block_tokens=request.block_tokens,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        turn=request.turn,
        conversation=request.conversation,
        stop=request.stop,
        tenant=request.tenant,
        slo_ms=request.slo_ms,
        over=request.over,
        return_in_s=request.return_in_s,
        keep_until=None if request.keep_until is None else request.keep_until + epoch,
        ttft_model=request.ttft_model,
        cached_tokens=request.cached_tokens,
    )
