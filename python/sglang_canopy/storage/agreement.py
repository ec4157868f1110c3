"""Agreement of tensor-parallel ranks on the metadata of pages read from their own disks.

All ranks must rank nodes alike, but their stores differ slightly: each rank records reads on its own
clock and receives reports of uses at its own times. Records are therefore compared first. If they
differ, the first rank's are sent to all as JSON, at most ``MAX_RUNS`` records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from sglang_canopy.disk.page import PageMeta
from sglang_canopy.errors import CanopyError
from sglang_canopy.storage.page_metadata import node_fields

MAX_RUNS = 64
"""Maximum nodes into which one run of different pages is split."""
CLOCK = "last_access"
"""The only field that may differ between ranks: reads are recorded on the rank's clock."""

Metas = Sequence[PageMeta | None]
Run = tuple[int, PageMeta | None]
"""Number of consecutive pages with equal metadata, and the metadata."""


def runs_of(metas: Metas) -> list[Run]:
    """Group ``metas`` into at most ``MAX_RUNS`` runs of equal records."""
    runs: list[Run] = []
    before: Any = ()
    for meta in metas:
        fields = None if meta is None else node_fields(meta)
        if runs and (fields == before or len(runs) == MAX_RUNS):
            runs[-1] = (runs[-1][0] + 1, runs[-1][1])
        else:
            runs.append((1, meta))
            before = fields
    return runs


def first_ranks(metas: Metas, cache: Any) -> tuple[list[PageMeta | None], bool]:
    """Return the records that every rank uses for ``metas``, and whether the ranks agreed.

    Collective: every rank calls it for the same pages, on its scheduler thread.
    """
    text = _packed(runs_of(metas))
    same = xxhash.xxh3_64_intdigest(text) >> 2
    agrees = xxhash.xxh3_64_intdigest(_without_clock(text)) >> 2
    first = is_first_rank(cache)
    # All ranks have the same x if min(x) == -min(-x).
    seen = torch.tensor(
        [same, -same, agrees, -agrees, -len(text) if first else 0], dtype=torch.int64
    )
    cache._all_reduce(seen, torch.distributed.ReduceOp.MIN)
    low, high, agrees_low, agrees_high, length = seen.tolist()
    if low == -high:
        return list(metas), True
    # Other ranks contribute zeros, so the maximum is the first rank's bytes.
    sent = torch.zeros(-length, dtype=torch.int32)
    if first:
        sent[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cache._all_reduce(sent, torch.distributed.ReduceOp.MAX)
    try:
        runs = _unpacked(bytes(sent.tolist()))
    except CanopyError:  # invalid record: all ranks received it, so all use none
        return [None] * len(metas), False
    return [meta for pages, meta in runs for _ in range(pages)], agrees_low == -agrees_high


def is_first_rank(cache: Any) -> bool:
    """Whether this is the first rank of the groups that ``cache._all_reduce`` spans."""
    groups = [
        group
        for group in (cache.attn_cp_group, cache.attn_tp_group)
        if group is not None and torch.distributed.get_world_size(group=group) > 1
    ]
    return all(torch.distributed.get_rank(group=group) == 0 for group in groups or [cache.tp_group])


def _packed(runs: Sequence[Run]) -> bytes:
    return json.dumps(
        [(pages, None if meta is None else _portable(meta)) for pages, meta in runs]
    ).encode()


def _portable(meta: PageMeta) -> dict[str, Any]:
    """Return ``meta`` without the page's position, which differs within a run."""
    return {k: v for k, v in meta.to_json().items() if k not in ("offset", "length")}


def _unpacked(text: bytes) -> list[Run]:
    return [
        (pages, None if meta is None else PageMeta.from_json(meta))
        for pages, meta in json.loads(text)
    ]


def _without_clock(text: bytes) -> bytes:
    """Return the runs of ``text`` regrouped without the times of uses."""
    runs: list[list[Any]] = []
    for pages, meta in json.loads(text):
        if meta is not None:
            meta.pop(CLOCK, None)
        if runs and runs[-1][1] == meta:
            runs[-1][0] += pages
        else:
            runs.append([pages, meta])
    return json.dumps(runs).encode()
