"""Agreement of ranks on the metadata of pages read from their own disks.

All ranks must rank nodes alike, but their stores differ slightly: each rank records reads on its own
clock and receives reports of uses at its own times. All use the first rank's records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_canopy.disk.page import FIELDS, PageMeta
from sglang_canopy.ranks import from_first, groups_of, true_on_all
from sglang_canopy.storage.page_metadata import node_fields

MAX_RUNS = 64
"""Maximum nodes into which one run of different pages is split."""
_CLOCK = list(FIELDS).index("last_access") - 2
"""Position in ``node_fields`` of the one field that may differ: a rank's clock records it."""

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
    """Return the first rank's records for the pages of ``metas``, and whether the ranks agreed.

    Collective: every rank calls it for the same pages.
    """
    mine = runs_of(metas)
    runs = from_first(groups_of(cache), mine)
    agreed = true_on_all(cache, _without_clock(runs) == _without_clock(mine))
    return [meta for pages, meta in runs for _ in range(pages)], agreed


def _without_clock(runs: Sequence[Run]) -> list[tuple[Any, ...] | None]:
    """Return each page's record without the time of its last use."""
    found: list[tuple[Any, ...] | None] = []
    for pages, meta in runs:
        fields = None if meta is None else node_fields(meta)
        found += [fields and (*fields[:_CLOCK], *fields[_CLOCK + 1 :])] * pages
    return found
