"""How often what clients say about their future came true: a record for each tenant.

One tenant's false hints cost no other tenant its trust. Records are kept for the tenants that
hinted last. Every other tenant's returns are trusted as often as the first hints of tenants came
true: a client that invents a tenant for each request soon gains nothing by it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Protocol

_SLACK = 0.5
_SLACK_MIN_S = 5.0
_BOUND = 100_000
"""Hints followed up at once; older ones count as settled."""
_REMEMBERED_TIPS = 4096
"""After so many tips of a tenant, its counts of them are halved: old ones fade."""
_PRIOR_TIPS = 20.0
"""Tips of prior belief that a tenant's "over" says nothing."""
_TELLS_LITTLE = 2.0 / 3.0
"""A weight from here on counts as 1: measured, such hints win nothing."""
MAX_TENANTS = 64
"""Tenants with a record of their own; the one that has hinted least recently goes first."""
_FIRST_HINTS = 128
"""After so many tenants' first hints, all counts are halved: old ones fade."""
OTHERS = "*"
"""Stands for every tenant without a record: no tenant's name has this character."""


class Hinted(Protocol):
    """A tip that a hint was given for, or may be."""

    born: float
    tenant: str | None
    return_at: float | None
    hinted_over: bool
    counted: HintRecord | None
    """The record that counts this tip among its tenant's."""


def return_slack_s(hint_s: float) -> float:
    """Seconds around the hinted return within which the hint "in ``hint_s``" counts as true."""
    return max(_SLACK_MIN_S, _SLACK * hint_s)


@dataclass(slots=True)
class HintRecord:
    """One tenant's hints, and how many of them came true."""

    returns: int = 0
    returns_true: int = 0
    overs: int = 0
    overs_wrong: int = 0
    tips: float = 0.0
    """Finished requests since the record was made, hinted or not; this and the next three fade."""
    tips_continued: float = 0.0
    tips_over: float = 0.0
    """Those of them that were said to be over."""
    tips_over_continued: float = 0.0

    def return_probability(self) -> float:
        """P(a client returns about when it said); two of three before anything is known."""
        return (self.returns_true + 2.0) / (self.returns + 3.0)

    def over_trusted(self) -> bool:
        """Whether "this conversation is over" has been true often enough to act on."""
        return self.overs_wrong <= 2 + 0.1 * self.overs

    def over_weight(self) -> float:
        """P(continues | said to be over) / P(continues), at most 1.

        Both are shares of this tenant's own tips. The first leans on the second, so that hints that
        nothing is known of, and hints that tell little, weigh 1: as no hint.
        """
        continues = (self.tips_continued + 1.0) / (self.tips + 2.0)
        over = self.tips_over_continued + _PRIOR_TIPS * continues
        weight = over / (self.tips_over + _PRIOR_TIPS) / continues
        return weight if weight < _TELLS_LITTLE else 1.0

    def note_tip(self, over: bool) -> None:
        """A request of the tenant has ended."""
        self.tips += 1.0
        self.tips_over += over
        if self.tips >= _REMEMBERED_TIPS:
            self.tips /= 2.0
            self.tips_continued /= 2.0
            self.tips_over /= 2.0
            self.tips_over_continued /= 2.0


@dataclass(slots=True)
class FirstHints:
    """The first hinted return of each tenant that got a record, and how many came true."""

    returns: int = 0
    returns_true: int = 0

    def add(self, came_true: bool) -> None:
        self.returns += 1
        self.returns_true += came_true
        if self.returns >= _FIRST_HINTS:
            self.returns //= 2
            self.returns_true //= 2

    def return_probability(self) -> float:
        """Of a tenant without a record; two of three before anything is known. It takes more than
        one tenant to change that much."""
        return (self.returns_true + 4.0) / (self.returns + 6.0)


_NO_HINTS = HintRecord()


class HintRecords:
    """The records of all tenants, and the hints that are yet to come true or not."""

    def __init__(self) -> None:
        self._records: dict[str | None, HintRecord] = {}
        self._first = FirstHints()
        self._open: list[tuple[float, int, Hinted]] = []
        self._count = 0

    def record(self, tenant: str | None) -> HintRecord:
        """The tenant's record to count in: made, or made the most recent."""
        record = self._records.pop(tenant, None)
        if record is None:
            record = HintRecord()
            if len(self._records) >= MAX_TENANTS:
                del self._records[next(iter(self._records))]
        self._records[tenant] = record
        return record

    def key(self, tenant: str | None) -> str | None:
        """``tenant``, or ``OTHERS`` for one without a record: equal keys, equal trust."""
        return tenant if tenant in self._records else OTHERS

    def note_tip(self, tip: Hinted, over: bool) -> None:
        """The request that ``tip`` stands for ended, ``over`` if a client said so.

        Only tenants that have given a hint are counted, so that others take no record from them.
        """
        if over and not tip.hinted_over:
            self.record(tip.tenant).overs += 1
        tip.hinted_over = tip.hinted_over or over
        record = self._records.get(tip.tenant)
        if record is not None and tip.counted is None:
            tip.counted = record
            record.note_tip(over)

    def note_return(self, tip: Hinted, in_s: float) -> None:
        """A client said that ``tip`` is continued ``in_s`` seconds after its birth."""
        if tip.return_at is not None or not 0 <= in_s < float("inf"):
            return
        tip.return_at = tip.born + in_s
        self._count += 1
        heapq.heappush(self._open, (tip.return_at + return_slack_s(in_s), self._count, tip))
        if len(self._open) > _BOUND:
            heapq.heappop(self._open)

    def continued(self, tip: Hinted, now: float) -> None:
        """``tip`` was continued: check the hints that it had."""
        if tip.hinted_over:
            self.record(tip.tenant).overs_wrong += 1
        if tip.counted is not None:
            tip.counted.tips_continued += 1.0
            tip.counted.tips_over_continued += tip.hinted_over
        if tip.return_at is not None:
            off_s = abs(now - tip.return_at)
            self._count_return(tip, off_s <= return_slack_s(tip.return_at - tip.born))

    def count_overdue(self, now: float) -> None:
        """Count the returns that are overdue as not true."""
        while self._open and self._open[0][0] < now:
            tip = heapq.heappop(self._open)[2]
            if tip.return_at is not None:
                self._count_return(tip, False)

    def _count_return(self, tip: Hinted, came_true: bool) -> None:
        tip.return_at = None
        record = self.record(tip.tenant)
        if not record.returns:
            self._first.add(came_true)
        record.returns += 1
        record.returns_true += came_true

    def return_probability(self, tenant: str | None) -> float:
        """P(a client of ``tenant`` returns about when it said)."""
        return self._records.get(tenant, self._first).return_probability()

    def over_trusted(self, tenant: str | None) -> bool:
        """Whether the ends that ``tenant`` announces are to be acted on."""
        return self._records.get(tenant, _NO_HINTS).over_trusted()

    def over_weight(self, tenant: str | None) -> float:
        """What a rank is multiplied by if ``tenant`` said "over" and is not trusted outright."""
        return self._records.get(tenant, _NO_HINTS).over_weight()

    def stats(self) -> dict[str, Any]:
        """Sums over the tenants that have a record."""
        records = list(self._records.values())
        return {
            "returns": sum(r.returns for r in records),
            "returns_true": sum(r.returns_true for r in records),
            "overs": sum(r.overs for r in records),
            "overs_wrong": sum(r.overs_wrong for r in records),
            "tenants": len(records),
        }
