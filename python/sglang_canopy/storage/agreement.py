"""Records that each tensor-parallel rank read from its own disk: all ranks use the first rank's.

Ranks must rank nodes alike, and their stores are never quite alike: each records a read at its own
clock and gets a use's report at a moment of its own. So the records are compared first, and
where it differs, what the first rank has is sent to all: as JSON, at most ``MAX_RUNS`` records.
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
"""Most nodes that one run of pages is split into, as its pages differ."""
CLOCK = "last_access"
"""The one field in which ranks may differ without a fault: a read is noted at the rank's clock."""

Metas = Sequence[PageMeta | None]
Run = tuple[int, PageMeta | None]
"""Pages in a row with the same metadata."""


def runs_of(metas: Metas) -> list[Run]:
    """``metas`` as runs of pages with equal records, at most ``MAX_RUNS``."""
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
    """What every rank is to use of ``metas``, and whether the ranks' records agreed.

    Collective: every rank calls it for the same pages, on its scheduler's thread.
    """
    text = _packed(runs_of(metas))
    same = xxhash.xxh3_64_intdigest(text) >> 2
    agrees = xxhash.xxh3_64_intdigest(_without_clock(text)) >> 2
    first = is_first_rank(cache)
    # The minimum of x and of -x tells whether all have the same x.
    seen = torch.tensor(
        [same, -same, agrees, -agrees, -len(text) if first else 0], dtype=torch.int64
    )
    cache._all_reduce(seen, torch.distributed.ReduceOp.MIN)
    low, high, agrees_low, agrees_high, length = seen.tolist()
    if low == -high:
        return list(metas), True
    # Of the first rank's bytes and everybody else's zeros, the maximum is the first rank's.
    sent = torch.zeros(-length, dtype=torch.int32)
    if first:
        sent[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cache._all_reduce(sent, torch.distributed.ReduceOp.MAX)
    try:
        runs = _unpacked(bytes(sent.tolist()))
    except CanopyError:  # no record of ours: all ranks do without, since all have these bytes
        return [None] * len(metas), False
    return [meta for pages, meta in runs for _ in range(pages)], agrees_low == -agrees_high


def is_first_rank(cache: Any) -> bool:
    """Whether this is the first rank of the groups over which ``cache._all_reduce`` goes."""
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
    """``meta`` without where its page is, which differs from page to page of a run."""
    return {k: v for k, v in meta.to_json().items() if k not in ("offset", "length")}


def _unpacked(text: bytes) -> list[Run]:
    return [
        (pages, None if meta is None else PageMeta.from_json(meta))
        for pages, meta in json.loads(text)
    ]


def _without_clock(text: bytes) -> bytes:
    """The same runs, as they are where the times of uses are left out."""
    runs: list[list[Any]] = []
    for pages, meta in json.loads(text):
        if meta is not None:
            meta.pop(CLOCK, None)
        if runs and runs[-1][1] == meta:
            runs[-1][0] += pages
        else:
            runs.append([pages, meta])
    return json.dumps(runs).encode()
