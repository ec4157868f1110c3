"""Counters of each tier's hits, insertions and evictions: plain integers, added at the event.

Independent of Prometheus: the scheduler's thread pays for an addition, and ``metrics.py`` reads the
sums from its own thread. Counts are in tokens; a token counts once for each tier that held it. The
number of rows is bounded for any category names: the first names get rows. One tenant may take half of
them, and then none while it has more than its share.
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
"""Reasons for eviction.

``capacity``: room was needed and the policy chose the tokens. ``ttl``: their group's TTL expired.
``trim``: the policy evicted a tail and kept the head of the same leaf. ``quota``: their tenant
exceeded its share.
"""

INVALID, QUEUE, GIVEN_UP = range(3)
REFUSALS = ("invalid", "queue", "given_up")
"""Reasons why requests ended without admission.

``invalid``: the prompt is too long, or a field is not supported. ``queue``: SGLang's queue was
full, or the wait too long. ``given_up``: the client disconnected while the request waited.
"""

MAX_CATEGORIES = 64
OTHER = "other"
"""Row of all categories without a row of their own."""
TENANT_ROWS = MAX_CATEGORIES // 4
"""Rows of one tenant, beyond which its new categories get no further row of the second half."""

_MAX_LABELS = 4096
_VICTIM = struct.Struct("<5q")


@dataclass(slots=True)
class TierRow:
    """One category in one tier. All counts are tokens since the start."""

    hits: int = 0
    """Prompt tokens of finished requests found in this tier."""
    entered: int = 0
    """Tokens inserted into the tier: computed, copied from above or loaded from below."""
    evicted: list[int] = field(default_factory=lambda: [0] * len(REASONS))
    """Tokens evicted, by reason."""
    demoted: int = 0
    """The part of ``evicted`` that remains in the tier below."""


@dataclass(slots=True)
class Row:
    """One category: its requests and their counts in each tier."""

    category: str
    tenant: str | None = None
    """Tenant whose request created the row."""
    requests: int = 0
    prompt_tokens: int = 0
    misses: int = 0
    """Prompt tokens of finished requests found in no tier."""
    tiers: tuple[TierRow, TierRow, TierRow] = field(
        default_factory=lambda: (TierRow(), TierRow(), TierRow())
    )


class Victims:
    """Running digest of the order of evictions from all tiers.

    Tensor-parallel ranks must evict alike: equal counts with different digests on two ranks are a
    fault.
    """

    __slots__ = ("sum",)

    def __init__(self) -> None:
        self.sum = (0, 0)
        """Number of evictions, and the digest; one tuple, so that every read is consistent."""

    def add(self, tier: int, offset: int, tokens: Sequence[int]) -> None:
        """Add the eviction from ``tier`` of ``tokens``, at ``offset`` tokens in their path."""
        count, digest = self.sum
        what = _VICTIM.pack(tier, offset, len(tokens), tokens[0], tokens[-1])
        self.sum = (count + 1, xxhash.xxh3_64_intdigest(what, seed=digest))


class Counters:
    """All counts of one live cache. Written only by the scheduler's thread; read by any."""

    __slots__ = (
        "_of_label",
        "_rows",
        "records_compared",
        "records_disagreed",
        "refused",
        "victims",
    )

    def __init__(self) -> None:
        self.records_compared = 0
        """Disk reads whose records tensor-parallel ranks compared."""
        self.records_disagreed = 0
        """Compared reads whose records differed, apart from times of use."""
        self.refused = [0] * len(REFUSALS)
        """Requests that ended without admission, by reason. They appear in no other count."""
        self.victims = Victims()
        self._rows: dict[str, Row] = {}
        self._of_label: dict[str, Row] = {}

    def row(self, label: str, tenant: str | None = None) -> Row:
        """Return the row of a category, or of a policy's refinement of one (``chat|end|turn1``)."""
        row = self._of_label.get(label)
        if row is None:
            row = self._new_label(label, tenant)
        return row

    def rows(self) -> list[Row]:
        """Return the rows of all categories, with ``OTHER`` if it counts anything."""
        return list(self._rows.values())

    def category_of(self, label: str) -> str:
        """Return the category under which ``label`` is counted, without creating a row."""
        name = label.partition("|")[0]
        return name if name in self._rows else OTHER

    def record_request(
        self, label: str, prompt_tokens: int, hits: tuple[int, int, int], tenant: str | None = None
    ) -> None:
        """Count a finished request of ``tenant``; ``hits``: prompt tokens found in each tier."""
        row = self.row(label, tenant)
        row.requests += 1
        row.prompt_tokens += prompt_tokens
        device, host, disk = row.tiers
        device.hits += hits[DEVICE]
        host.hits += hits[HOST]
        disk.hits += hits[DISK]
        hit = sum(hits)
        row.misses += max(0, prompt_tokens - hit)

    def record_eviction(
        self,
        tier: int,
        label: str,
        tokens: int,
        reason: int,
        demoted: bool = False,
        tenant: str | None = None,
    ) -> None:
        """Count ``tokens`` evicted from ``tier`` for ``reason``. ``demoted``: the tier below still has
        them."""
        category_row = self._of_label.get(label) or self._new_label(label, tenant)
        row = category_row.tiers[tier]
        row.evicted[reason] += tokens
        if demoted:
            row.demoted += tokens

    def _new_label(self, label: str, tenant: str | None) -> Row:
        name = label.partition("|")[0]
        if name not in self._rows and not self._has_room(tenant):
            name = OTHER
        row = self._rows.setdefault(name, Row(name, tenant))
        # Clients can invent any number of names, so the number of labels is bounded.
        if len(self._of_label) < _MAX_LABELS:
            self._of_label[label] = row
        return row

    def _has_room(self, tenant: str | None) -> bool:
        """Return whether a new category of ``tenant`` gets a row."""
        count = len(self._rows)
        if count < MAX_CATEGORIES // 2 or count >= MAX_CATEGORIES:
            return count < MAX_CATEGORIES
        return sum(row.tenant == tenant for row in self._rows.values()) < TENANT_ROWS
