"""Counters of each tier's hits, insertions and evictions: plain integers, added at the event.

Independent of Prometheus: the scheduler's thread pays for an addition, and ``metrics.py`` reads the
sums from its own thread. Counts are in tokens; a token counts once for each tier that held it. The
number of rows is bounded for any category names. While there is room, a tenant may have any number
of rows. Without room, a new name replaces an unused row, or a row of the tenant with the most rows
if that tenant exceeds its share.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter
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

EDGES_S = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Upper edges, in seconds, of the residency histogram's bins; one more bin has no edge.

Equal for every tier, the disk store's included.
"""

MAX_ADAPTERS = 64
"""LoRA adapters with a row of their own; adapters used later share ``OTHER``."""
MAX_CATEGORIES = 32
OTHER = "other"
"""Row of all categories without a row of their own."""
TENANT_ROWS = MAX_CATEGORIES // 4
"""Rows that a tenant may keep when other tenants need one."""
IDLE_REQUESTS = 10_000
"""A category's row may be replaced once this many requests were of other categories."""
PAST = "(earlier categories)"
"""Row with the sums of all replaced rows; clients cannot use this name."""

_MAX_LABELS = 4096
_VICTIM = struct.Struct("<5q")


@dataclass(slots=True)
class Residency:
    """Time that tokens stayed in a tier, from insertion to removal. A token counts once."""

    tokens: list[int] = field(default_factory=lambda: [0] * (len(EDGES_S) + 1))
    """Tokens by bin of ``EDGES_S``."""
    token_seconds: float = 0.0
    """Sum of the tokens' times, in token-seconds."""


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
    residency: Residency = field(default_factory=Residency)


@dataclass(slots=True)
class Row:
    """One category: its requests and their counts in each tier."""

    category: str
    tenant: str | None = None
    """Tenant whose request created the row."""
    used: int = 0
    """Number of the last request counted in the row."""
    requests: int = 0
    prompt_tokens: int = 0
    misses: int = 0
    """Prompt tokens of finished requests found in no tier."""
    tiers: tuple[TierRow, TierRow, TierRow] = field(
        default_factory=lambda: (TierRow(), TierRow(), TierRow())
    )


@dataclass(slots=True)
class AdapterRow:
    """One LoRA adapter since the start; counts are of finished requests."""

    requests: int = 0
    prompt_tokens: int = 0
    hits: tuple[int, ...] = (0,) * len(TIERS)
    """Prompt tokens found in each tier."""


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
        "_past",
        "_rows",
        "_served",
        "adapters",
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
        self.adapters: dict[str, AdapterRow] = {}
        self._rows: dict[str, Row] = {}
        self._of_label: dict[str, Row] = {}
        self._past: Row | None = None
        self._served = 0

    def row(self, label: str, tenant: str | None = None) -> Row:
        """Return the row of a category, or of a policy's refinement of one (``chat|end|turn1``)."""
        row = self._of_label.get(label)
        if row is None:
            row = self._new_label(label, tenant)
        return row

    def rows(self) -> list[Row]:
        """Return the rows of all categories, with ``OTHER`` and ``PAST`` if they count anything."""
        rows = list(self._rows.values())
        return rows if self._past is None else [*rows, self._past]

    def category_of(self, label: str) -> str:
        """Return the category under which ``label`` is counted, without creating a row."""
        name = label.partition("|")[0]
        return name if name in self._rows or self._has_room() else OTHER

    def served(
        self, label: str, prompt_tokens: int, hits: tuple[int, int, int], tenant: str | None = None
    ) -> None:
        """Count a finished request of ``tenant``; ``hits``: prompt tokens found in each tier."""
        row = self.row(label, tenant)
        if row.category == OTHER:
            row = self._new_label(label, tenant)  # a row may have become free
        self._served += 1
        row.used = self._served
        row.requests += 1
        row.prompt_tokens += prompt_tokens
        device, host, disk = row.tiers
        device.hits += hits[DEVICE]
        host.hits += hits[HOST]
        disk.hits += hits[DISK]
        hit = sum(hits)
        row.misses += max(0, prompt_tokens - hit)

    def served_adapter(self, name: str, prompt_tokens: int, hits: tuple[int, ...]) -> None:
        """Count the same request under the LoRA adapter ``name``."""
        row = self.adapters.get(name)
        if row is None:
            if len(self.adapters) >= MAX_ADAPTERS:
                name = OTHER
            row = self.adapters.setdefault(name, AdapterRow())
        row.requests += 1
        row.prompt_tokens += prompt_tokens
        row.hits = tuple(a + b for a, b in zip(row.hits, hits, strict=True))

    def evicted(
        self,
        tier: int,
        label: str,
        tokens: int,
        reason: int,
        seconds: float,
        demoted: bool = False,
        tenant: str | None = None,
    ) -> None:
        """Count ``tokens`` evicted from ``tier`` for ``reason`` after ``seconds`` in it.

        ``demoted``: the tier below still has them.
        """
        category_row = self._of_label.get(label) or self._new_label(label, tenant)
        row = category_row.tiers[tier]
        row.evicted[reason] += tokens
        if demoted:
            row.demoted += tokens
        stay = row.residency
        seconds = seconds if seconds > 0.0 else 0.0
        stay.tokens[bisect_left(EDGES_S, seconds)] += tokens
        stay.token_seconds += seconds * tokens

    def _new_label(self, label: str, tenant: str | None) -> Row:
        name = label.partition("|")[0]
        row = self._rows.get(name)
        if row is None:
            if not self._has_room() and not self._make_room(tenant):
                name = OTHER
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = Row(name, tenant, used=self._served)
        # Clients can invent any number of names, so the number of labels is bounded.
        if len(self._of_label) < _MAX_LABELS:
            self._of_label[label] = row
        return row

    def _has_room(self) -> bool:
        return len(self._rows) - (OTHER in self._rows) < MAX_CATEGORIES

    def _make_room(self, tenant: str | None) -> bool:
        """Replace the row of an unused category, or of a tenant with more than its share."""
        rows = [row for row in self._rows.values() if row.category != OTHER]
        oldest = min(rows, key=_last_use)
        if oldest.used + IDLE_REQUESTS > self._served:
            rows_by_tenant = Counter(row.tenant for row in rows)
            largest, count = rows_by_tenant.most_common(1)[0]
            if count <= max(TENANT_ROWS, rows_by_tenant[tenant] + 1):
                return False
            oldest = min((row for row in rows if row.tenant == largest), key=_last_use)
        if self._past is None:
            self._past = Row(PAST)
        _add(self._past, oldest)
        del self._rows[oldest.category]
        self._of_label.clear()
        return True


def _last_use(row: Row) -> int:
    return row.used


def _add(into: Row, row: Row) -> None:
    into.requests += row.requests
    into.prompt_tokens += row.prompt_tokens
    into.misses += row.misses
    for total, tier in zip(into.tiers, row.tiers):
        total.hits += tier.hits
        total.entered += tier.entered
        total.demoted += tier.demoted
        total.evicted = [a + b for a, b in zip(total.evicted, tier.evicted)]
        stay = total.residency
        stay.tokens = [a + b for a, b in zip(stay.tokens, tier.residency.tokens)]
        stay.token_seconds += tier.residency.token_seconds
