"""Metadata of nodes and of their pages on disk, and the agreement of ranks on what they read.

Times in the disk tier are Unix times, which stay valid after a restart; times in the tree are on the
requests' clock. Requests carry the difference (``epoch``), so that all ranks compute the same.

All ranks must rank nodes alike, but their stores differ slightly: each rank records reads on its own
clock and receives reports of uses at its own times. All use the first rank's records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_canopy.disk.page import PAGE_FIELDS, PageMeta, path_fields
from sglang_canopy.radix.live_request import LiveRequest, NodeLeaf
from sglang_canopy.ranks import all_over_ranks, broadcast_from_first, reduction_groups
from sglang_canopy.records import Request, copy_record

MAX_RUNS = 64
"""Maximum nodes into which one run of different pages is split."""
_LAST_ACCESS_INDEX = list(PAGE_FIELDS).index("last_access") - 2
"""Position in ``path_fields`` of the one field that may differ: a rank's clock records it."""

Metas = Sequence[PageMeta | None]


class PageRun(NamedTuple):
    """Consecutive pages with equal metadata."""

    pages: int
    meta: PageMeta | None


def metadata_of(leaf: NodeLeaf, epoch: float) -> PageMeta:
    """Return the metadata of ``leaf`` in Unix time."""
    meta = PageMeta.from_leaf(leaf, leaf.ttl_s)
    meta.shift(epoch)
    return meta


def page_metas(leaf: NodeLeaf, pages: int, page_tokens: int, epoch: float) -> list[PageMeta]:
    """Return the metadata of each page of a node."""
    common = path_fields(metadata_of(leaf, epoch))
    return [
        PageMeta(leaf.offset + i * page_tokens, page_tokens, *common)  # fields in order
        for i in range(pages)
    ]


def restore_leaf(leaf: NodeLeaf, meta: PageMeta, now: float, epoch: float) -> None:
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


def runs_of(metas: Metas) -> list[PageRun]:
    """Group ``metas`` into at most ``MAX_RUNS`` runs of equal records."""
    runs: list[PageRun] = []
    previous: Any = ()
    for meta in metas:
        fields = None if meta is None else path_fields(meta)
        if runs and (fields == previous or len(runs) == MAX_RUNS):
            runs[-1] = PageRun(runs[-1].pages + 1, runs[-1].meta)
        else:
            runs.append(PageRun(1, meta))
            previous = fields
    return runs


def take_first_ranks(metas: Metas, cache: Any) -> tuple[list[PageMeta | None], bool]:
    """Return the first rank's records for the pages of ``metas``, and whether the ranks agreed.
    Collective: every rank calls it for the same pages."""
    own_runs = runs_of(metas)
    runs = broadcast_from_first(reduction_groups(cache), own_runs)
    do_agree = all_over_ranks(cache, _without_clock(runs) == _without_clock(own_runs))
    return [meta for pages, meta in runs for _ in range(pages)], do_agree


def _without_clock(runs: Sequence[PageRun]) -> list[tuple[Any, ...] | None]:
    """Return each page's record without the time of its last use."""
    records: list[tuple[Any, ...] | None] = []
    for pages, meta in runs:
        fields = None if meta is None else path_fields(meta)
        index = _LAST_ACCESS_INDEX
        records += [fields and (*fields[:index], *fields[index + 1 :])] * pages
    return records
