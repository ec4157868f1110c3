"""Counters of each tier's hits, insertions and evictions: plain integers, added at the event.

Independent of Prometheus: the scheduler's thread pays for an addition, and ``metrics.py`` reads the
sums from its own thread. Counts are in tokens; a token counts once for each tier that held it. The
number of rows (``CategoryCounts``) is bounded for any category names: the first names get a row. A row
of the second half goes only to a tenant that has fewer than ``MAX_TENANT_ROWS``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

DEVICE, HOST, DISK = range(3)
TIERS = ("device", "host", "disk")
"""Names of the tiers, fastest first; ``DEVICE``, ``HOST``, ``DISK`` index them."""

CAPACITY, TTL, TRIM, QUOTA = range(4)
REASONS = ("capacity", "ttl", "trim", "quota")
"""Reasons for eviction. ``capacity``: room was needed and the policy chose the tokens. ``ttl``:
their group's TTL expired. ``trim``: the policy evicted a tail and kept the head of the same leaf.
``quota``: their tenant exceeded its share."""

INVALID, QUEUE, GIVEN_UP = range(3)
REFUSALS = ("invalid", "queue", "given_up")
"""Reasons why requests ended without admission. ``invalid``: the prompt is too long, or a field is
not supported. ``queue``: SGLang's queue was full, or the wait too long. ``given_up``: the client
disconnected while the request waited."""

MAX_CATEGORIES = 64
OTHER = "other"
"""Category of all requests whose category has no row of its own."""
MAX_TENANT_ROWS = MAX_CATEGORIES // 4
"""A tenant with this many rows gets no row of the second half."""

_MAX_LABELS = 4096
_VICTIM_FORMAT = struct.Struct("<5q")


@dataclass(slots=True)
class TierCounts:
    """Counts of one category in one tier, in tokens since the start."""

    hit_tokens: int = 0
    """Prompt tokens of finished requests found in this tier."""
    entered_tokens: int = 0
    """Tokens inserted into the tier: computed, copied from above or loaded from below."""
    evicted_tokens: list[int] = field(default_factory=lambda: [0] * len(REASONS))
    demoted_tokens: int = 0
    """The part of ``evicted_tokens`` that remains in the tier below."""


@dataclass(slots=True)
class CategoryCounts:
    """Counts of one category's requests, in all and in each tier."""

    category: str
    tenant: str | None = None
    """Tenant whose request created the row."""
    requests: int = 0
    prompt_tokens: int = 0
    missed_tokens: int = 0
    """Prompt tokens of finished requests found in no tier."""
    tiers: tuple[TierCounts, TierCounts, TierCounts] = field(
        default_factory=lambda: (TierCounts(), TierCounts(), TierCounts())
    )


class EvictionDigest:
    """Running digest of the order of evictions from all tiers. Tensor-parallel ranks must evict alike:
    equal counts with different digests on two ranks are a fault."""

    __slots__ = ("count_and_digest",)

    def __init__(self) -> None:
        self.count_and_digest = (0, 0)
        """Number of evictions, and the digest; one tuple, so that every read is consistent."""

    def add(self, tier: int, offset: int, tokens: Sequence[int]) -> None:
        """Add the eviction from ``tier`` of ``tokens``, at ``offset`` tokens in their path."""
        count, digest = self.count_and_digest
        record = _VICTIM_FORMAT.pack(tier, offset, len(tokens), tokens[0], tokens[-1])
        self.count_and_digest = (count + 1, xxhash.xxh3_64_intdigest(record, seed=digest))


class Counters:
    """All counts of one live cache. Written only by the scheduler's thread; read by any."""

    __slots__ = (
        "_counts_by_category",
        "_counts_by_label",
        "records_compared",
        "records_disagreed",
        "refusal_counts",
        "victim_digest",
    )

    def __init__(self) -> None:
        self.records_compared = 0
        """Disk reads whose records tensor-parallel ranks compared."""
        self.records_disagreed = 0
        """Compared reads whose records differed, apart from times of use."""
        self.refusal_counts = [0] * len(REFUSALS)
        """Requests that ended without admission, by reason. They appear in no other count."""
        self.victim_digest = EvictionDigest()
        self._counts_by_category: dict[str, CategoryCounts] = {}
        self._counts_by_label: dict[str, CategoryCounts] = {}

    def category_counts(self, label: str, tenant: str | None = None) -> CategoryCounts:
        """Return the counts of a category, or of a policy's refinement of one (``chat|end|turn1``)."""
        return self._counts_by_label.get(label) or self._add_label(label, tenant)

    def all_counts(self) -> list[CategoryCounts]:
        """Return the counts of all categories, with ``OTHER`` if it counts anything."""
        return list(self._counts_by_category.values())

    def category_of(self, label: str) -> str:
        """Return the category under which ``label`` is counted, without creating a row."""
        name = label.partition("|")[0]
        return name if name in self._counts_by_category else OTHER

    def record_request(
        self,
        label: str,
        prompt_tokens: int,
        hit_tokens: tuple[int, int, int],
        tenant: str | None = None,
    ) -> None:
        """Count a finished request of ``tenant``; ``hit_tokens``: prompt tokens found in each tier."""
        counts = self.category_counts(label, tenant)
        counts.requests += 1
        counts.prompt_tokens += prompt_tokens
        device, host, disk = counts.tiers
        device.hit_tokens += hit_tokens[DEVICE]
        host.hit_tokens += hit_tokens[HOST]
        disk.hit_tokens += hit_tokens[DISK]
        counts.missed_tokens += max(0, prompt_tokens - sum(hit_tokens))

    def record_eviction(
        self,
        tier: int,
        label: str,
        tokens: int,
        reason: int,
        is_demoted: bool = False,
        tenant: str | None = None,
    ) -> None:
        """Count ``tokens`` evicted from ``tier`` for ``reason``. ``is_demoted``: the tier below still has
        them."""
        tier_counts = self.category_counts(label, tenant).tiers[tier]
        tier_counts.evicted_tokens[reason] += tokens
        if is_demoted:
            tier_counts.demoted_tokens += tokens

    def _add_label(self, label: str, tenant: str | None) -> CategoryCounts:
        name = label.partition("|")[0]
        if name not in self._counts_by_category and not self._has_room(tenant):
            # The label is not kept: clients can invent any number of names.
            return self._counts_by_category.get(OTHER) or self._add_category(OTHER, tenant)
        counts = self._counts_by_category.get(name) or self._add_category(name, tenant)
        if len(self._counts_by_label) < _MAX_LABELS:
            self._counts_by_label[label] = counts
        return counts

    def _add_category(self, name: str, tenant: str | None) -> CategoryCounts:
        counts = self._counts_by_category[name] = CategoryCounts(name, tenant)
        return counts

    def _has_room(self, tenant: str | None) -> bool:
        """Return whether a new category of ``tenant`` gets a row."""
        row_count = len(self._counts_by_category)
        if row_count < MAX_CATEGORIES // 2 or row_count >= MAX_CATEGORIES:
            return row_count < MAX_CATEGORIES
        rows = self._counts_by_category.values()
        return sum(row.tenant == tenant for row in rows) < MAX_TENANT_ROWS
