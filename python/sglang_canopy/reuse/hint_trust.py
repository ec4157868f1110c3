"""How often what was said about the future came true: a record for each tenant and source.

One tenant's false hints cost no other tenant its trust, and a gateway's are not its clients'. What
is learnt is how much a hint tells: P(continues | said to be over) against P(continues), and how
much more often a return comes when it was said than when another one was. Old hints fade.

Records are kept for those that hinted last. What newcomers say is trusted as far as the first hints
of tenants came true: a client that invents a tenant for each request soon gains nothing by it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_canopy.records import CLIENT

_SLACK = 0.5
_SLACK_MIN_S = 5.0
_BOUND = 100_000
"""Hints followed up at once; older ones count as settled."""
_REMEMBERED = 4096
"""After so many of a kind, a record's counts of them are halved: old ones fade."""
_PRIOR_RETURNS = 3.0
"""Returns of prior belief: as those of newcomers."""
_PRIOR_TIPS = 20.0
"""Tips of prior belief that a tenant's "over" says nothing."""
_TELLS_LITTLE = 0.5
"""A weight from here on counts as 1: measured, such hints win nothing."""
_AT_ONCE = 8
"""Ends that a tenant announces first: they say little of it yet, so newcomers' count as well."""
TELLS = 0.25
"""Return times are ignored where less of them is known and not guessed."""
_WRONG_AT_FIRST = 0.25
"""With so large a share of first ends wrong, those of newcomers are no longer acted on."""
_SURE = 0.2
"""With less weight than this what was said to be over goes first."""
MAX_TENANTS = 64
"""Records, of a tenant's own hints and of each other source for it; the one that has hinted least
recently goes first."""
_FIRST_HINTS = 128
"""After so many tenants' first hints, all counts are halved: old ones fade."""
OTHERS = "*"
"""Stands for everyone without a record: no tenant's name has this character."""


class Hinted(Protocol):
    """A tip that a hint was given for, or may be."""

    born: float
    tenant: str | None
    speaker: Hashable
    """Whose word its hints are."""
    return_at: float | None
    hinted_s: float
    """``return_at`` as said, in seconds after ``born``."""
    hinted_over: bool
    counted: HintRecord | None
    """The record that counts this tip among its tenant's."""
    counted_over: HintRecord | None
    """The record of whoever said that it is over."""


def speaker(tenant: str | None, source: str) -> Hashable:
    """Whose word a hint is: the tenant's own clients', or another source's for this tenant."""
    return tenant if source == CLIENT else (tenant, source)


def return_slack_s(hint_s: float) -> float:
    """Seconds around the hinted return within which the hint "in ``hint_s``" counts as true."""
    return max(_SLACK_MIN_S, _SLACK * hint_s)


@dataclass(slots=True)
class HintRecord:
    """The hints of one tenant from one source, and how many of them came true. Counts fade."""

    returns: int = 0
    returns_true: int = 0
    returns_by_chance: int = 0
    """Returns for which what was said of the one before would have been true as well."""
    overs: int = 0
    overs_wrong: int = 0
    tips: float = 0.0
    """Of the tenant's own record: its finished requests since then, hinted or not."""
    tips_continued: float = 0.0
    tips_over: float = 0.0
    """Requests that were said to be over."""
    tips_over_continued: float = 0.0
    last_hinted_s: float | None = None
    """What was said of the return that was counted last."""
    first_over: Hinted | None = None
    """The tip of the first end that was said, until it has shown to be none."""

    def return_probability(self, newcomers: float) -> float:
        """P(a client returns about when it said), which for ``newcomers`` is that."""
        return (self.returns_true + _PRIOR_RETURNS * newcomers) / (self.returns + _PRIOR_RETURNS)

    def return_skill(self, newcomers: float) -> float:
        """How much of what is said about returns is known, and not guessed: 0 where another
        return's time would have been true as often, 1 where all come true and guesses never.

        Cohen's kappa with the guess as the second rater.
        """
        guessed = (self.returns_by_chance + 0.5) / (self.returns + _PRIOR_RETURNS)
        true = self.return_probability(newcomers)
        return max(0.0, (true - guessed) / (1.0 - guessed))

    def over_trusted(self, tenant: HintRecord, newcomers: bool) -> bool:
        """Whether "this conversation is over" is acted on outright: where next to none continued
        of those that would have; of the first few, since wrong ones show late, as long as
        ``newcomers`` are believed."""
        if self.overs <= _AT_ONCE:
            return newcomers and self.overs_wrong <= _AT_ONCE // 4
        return self.over_weight(tenant) < _SURE

    def over_weight(self, tenant: HintRecord) -> float:
        """P(continues | said to be over) / P(continues), at most 1.

        ``tenant`` has the second. The first leans on it, so that hints that nothing is known of,
        and hints that tell little, weigh 1: as no hint.
        """
        continues = (tenant.tips_continued + 1.0) / (tenant.tips + 2.0)
        over = self.tips_over_continued + _PRIOR_TIPS * continues
        weight = over / (self.tips_over + _PRIOR_TIPS) / continues
        return weight if weight < _TELLS_LITTLE else 1.0

    def note_tip(self) -> None:
        """A request of the tenant has ended."""
        self.tips += 1.0
        if self.tips >= _REMEMBERED:
            self.tips /= 2.0
            self.tips_continued /= 2.0

    def note_over(self) -> None:
        """A request was said to be over."""
        self.overs += 1
        self.tips_over += 1.0
        if self.tips_over >= _REMEMBERED:
            self.tips_over /= 2.0
            self.tips_over_continued /= 2.0

    def note_return(self, hinted_s: float, gap_s: float | None) -> bool:
        """A return was said to come after ``hinted_s`` and came after ``gap_s`` seconds, or did not.

        Returns whether it came true.
        """
        came_true = _is_true(hinted_s, gap_s)
        self.returns += 1
        self.returns_true += came_true
        self.returns_by_chance += self.last_hinted_s is not None and _is_true(
            self.last_hinted_s, gap_s
        )
        self.last_hinted_s = hinted_s
        if self.returns >= _REMEMBERED:
            self.returns //= 2
            self.returns_true //= 2
            self.returns_by_chance //= 2
        return came_true


def _is_true(hinted_s: float, gap_s: float | None) -> bool:
    return gap_s is not None and abs(gap_s - hinted_s) <= return_slack_s(hinted_s)


@dataclass(slots=True)
class FirstHints:
    """The first return and the first end that each record counted, and how many were true."""

    returns: int = 0
    returns_true: int = 0
    overs: int = 0
    overs_wrong: int = 0

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

    def add_over(self) -> None:
        self.overs += 1
        if self.overs >= _FIRST_HINTS:
            self.overs //= 2
            self.overs_wrong //= 2

    def over_trusted(self) -> bool:
        """Whether the first ends of a tenant are acted on; it takes more than one tenant that was
        wrong to change that."""
        return (self.overs_wrong + 0.5) / (self.overs + 6.0) < _WRONG_AT_FIRST


_NO_HINTS = HintRecord()


class HintRecords:
    """The records of all tenants and sources, and the hints that are yet to come true or not."""

    def __init__(self) -> None:
        self._records: dict[Hashable, HintRecord] = {}
        self._first = FirstHints()
        self._open: list[tuple[float, int, Hinted]] = []
        self._count = 0

    def record(self, who: Hashable) -> HintRecord:
        """The record of a ``speaker`` to count in: made, or made the most recent."""
        record = self._records.pop(who, None)
        if record is None:
            record = HintRecord()
            if len(self._records) >= MAX_TENANTS:
                del self._records[next(iter(self._records))]
        self._records[who] = record
        return record

    def key(self, who: Hashable) -> Hashable:
        """``who``, or ``OTHERS`` for one without a record: equal keys, equal trust."""
        return who if who in self._records else OTHERS

    def note_tip(self, tip: Hinted, over: bool) -> None:
        """The request that ``tip`` stands for ended, ``over`` if somebody said so.

        Only tenants of whom hints were given are counted, so that others take no record from them.
        """
        if over and not tip.hinted_over:
            tip.hinted_over = True
            tip.counted_over = self.record(tip.speaker)
            if not tip.counted_over.overs:
                tip.counted_over.first_over = tip
                self._first.add_over()
            tip.counted_over.note_over()
            self.record(tip.tenant)
        own = self._records.get(tip.tenant)
        if own is not None and tip.counted is None:
            tip.counted = own
            own.note_tip()

    def note_return(self, tip: Hinted, in_s: float) -> None:
        """Somebody said that ``tip`` is continued ``in_s`` seconds after its birth."""
        if tip.return_at is not None or not 0 <= in_s < float("inf"):
            return
        tip.return_at, tip.hinted_s = tip.born + in_s, in_s
        self._count += 1
        heapq.heappush(self._open, (tip.return_at + return_slack_s(in_s), self._count, tip))
        if len(self._open) > _BOUND:
            heapq.heappop(self._open)

    def continued(self, tip: Hinted, now: float) -> None:
        """``tip`` was continued: check the hints that it had."""
        if tip.counted is not None:
            tip.counted.tips_continued += 1.0
        if tip.counted_over is not None:
            tip.counted_over.overs_wrong += 1
            if tip.counted_over.first_over is tip:
                tip.counted_over.first_over = None
                self._first.overs_wrong += 1
            tip.counted_over.tips_over_continued += 1.0
        if tip.return_at is not None:
            self._count_return(tip, now - tip.born)

    def count_overdue(self, now: float) -> None:
        """Count the returns that are overdue as not true."""
        while self._open and self._open[0][0] < now:
            tip = heapq.heappop(self._open)[2]
            if tip.return_at is not None:
                self._count_return(tip, None)

    def _count_return(self, tip: Hinted, gap_s: float | None) -> None:
        tip.return_at = None
        record = self.record(tip.speaker)
        first = not record.returns
        came_true = record.note_return(tip.hinted_s, gap_s)
        if first:
            self._first.add(came_true)

    def return_probability(self, who: Hashable) -> float:
        """P(a return comes about when ``who`` said)."""
        newcomers = self._first.return_probability()
        record = self._records.get(who)
        return newcomers if record is None else record.return_probability(newcomers)

    def return_skill(self, who: Hashable) -> float:
        """How much of what ``who`` says about returns is known and not guessed, from 0 to 1."""
        newcomers = self._first.return_probability()
        record = self._records.get(who)
        return newcomers if record is None else record.return_skill(newcomers)

    def return_trusted(self, who: Hashable) -> bool:
        """Whether the return times that ``who`` announces are acted on."""
        return self.return_skill(who) >= TELLS

    def over_trusted(self, who: Hashable) -> bool:
        """Whether the ends that ``who`` announces are to be acted on."""
        record = self._records.get(who, _NO_HINTS)
        return record.over_trusted(self._of_tenant(who), self._first.over_trusted())

    def over_weight(self, who: Hashable) -> float:
        """What a rank is multiplied by if ``who`` said "over" and is not trusted outright."""
        return self._records.get(who, _NO_HINTS).over_weight(self._of_tenant(who))

    def _of_tenant(self, who: Hashable) -> HintRecord:
        tenant = who[0] if isinstance(who, tuple) else who
        return self._records.get(tenant, _NO_HINTS)

    def heeded(self) -> Counter[tuple[str, str, bool]]:
        """How many tenants' hints are acted on: by what they say (``over``, ``return``), by whose
        word they are (``CLIENT`` and the other sources), and by whether they are."""
        counts: Counter[tuple[str, str, bool]] = Counter()
        for who, record in list(self._records.items()):
            source = who[1] if isinstance(who, tuple) else CLIENT
            if record.overs:
                acts = self.over_trusted(who) or self.over_weight(who) < 1.0
                counts["over", source, acts] += 1
            if record.returns:
                counts["return", source, self.return_trusted(who)] += 1
        return counts

    def stats(self) -> dict[str, Any]:
        """Sums over all records."""
        records = list(self._records.values())
        return {
            "returns": sum(r.returns for r in records),
            "returns_true": sum(r.returns_true for r in records),
            "overs": sum(r.overs for r in records),
            "overs_wrong": sum(r.overs_wrong for r in records),
            "tenants": len({who[0] if isinstance(who, tuple) else who for who in self._records}),
        }
