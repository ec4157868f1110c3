"""Accuracy of hints: one record per tenant and source.

Records are separate: one tenant's false hints do not reduce another tenant's trust, nor a gateway's
false hints its clients' trust. A record estimates the information in a hint: P(continues | hinted
over) against P(continues), and the frequency at which a return matches its own hint against another
return's hint. Old hints fade.

A *sender* of hints is a tenant's own clients, or a tenant and another source. Records
are kept for the most recent senders. A newcomer is trusted according to the first hints of earlier
tenants, so a client that invents a tenant per request soon gains nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang_canopy.records import CLIENT

_SLACK_SHARE = 0.5
"""Tolerance of a return hint, as a share of its seconds."""
_MIN_SLACK_S = 5.0
_MAX_PENDING_RETURNS = 100_000
"""Pending return hints; beyond this the earliest deadlines are dropped."""
_MAX_RECORD_COUNT = 4096
"""A record's counts are halved at this number, so that old hints fade."""
_PRIOR_RETURNS = 3.0
"""Weight of the newcomers' accuracy as a prior, in returns."""
_PRIOR_TIPS = 20.0
"""Weight of the prior that "over" has no information, in tips."""
_INFORMATIVE_WEIGHT = 0.5
"""Weights above this count as 1: measurements show no gain from such hints."""
_FIRST_OVER_HINTS = 8
"""Number of a sender's first "over" hints for which newcomers' accuracy counts as well."""
TRUSTED_SKILL = 0.25
"""Return times with less skill than this are ignored."""
_MAX_FIRST_WRONG_SHARE = 0.25
"""Share of wrong first "over" hints at which newcomers' are ignored."""
_OVER_TRUST_WEIGHT = 0.2
"""Conversations hinted over are evicted first below this weight."""
MAX_RECORDS = 64
"""Maximum number of records, one per sender: a tenant whose gateway hints too has two. The least
recent is dropped first."""
_MAX_FIRST_HINTS = 128
"""Counts of first hints are halved at this number of tenants."""
NO_RECORD = "*"
"""Key of senders without a record; no tenant's name has this character."""


class HintedTip(Protocol):
    """A tip that has or may receive a hint."""

    created_at: float
    tenant: str | None
    sender: Hashable
    """Tenant, or tenant and source, that gives the hints."""
    return_at: float | None
    hinted_s: float
    """``return_at``, in seconds after ``created_at``."""
    hinted_over: bool
    tenant_record: HintRecord | None
    """The record that counts this tip among its tenant's."""
    over_record: HintRecord | None
    """The record that counts this tip's "over"."""


class OtherSender(NamedTuple):
    """A sender other than the tenant's own clients."""

    tenant: str | None
    source: str


def sender_of(tenant: str | None, source: str) -> Hashable:
    """Return the sender of a hint: the tenant for its own clients, else an ``OtherSender``."""
    return tenant if source == CLIENT else OtherSender(tenant, source)


def return_slack_s(hinted_s: float) -> float:
    """Return the tolerance in seconds within which the hint "in ``hinted_s``" counts as true."""
    return max(_MIN_SLACK_S, _SLACK_SHARE * hinted_s)


@dataclass(slots=True)
class HintRecord:
    """Hints of one tenant from one source, and the number that proved true. Counts fade."""

    return_hints: int = 0
    true_return_hints: int = 0
    chance_return_hints: int = 0
    """Returns that would also have matched the previous return's hint."""
    over_hints: int = 0
    wrong_over_hints: int = 0
    tips: float = 0.0
    """A tenant's own record only: its finished requests since the record began, hinted or not."""
    continued_tips: float = 0.0
    over_tips: float = 0.0
    """Requests hinted to be over."""
    continued_over_tips: float = 0.0
    last_hinted_s: float | None = None
    """Hint of the return that was counted last."""
    first_over: HintedTip | None = None
    """Tip of the first "over", until that hint proves wrong."""

    def return_probability(self, newcomers_probability: float) -> float:
        """Return P(a return is close to its hinted time). ``newcomers_probability``: for newcomers."""
        true_hints = self.true_return_hints + _PRIOR_RETURNS * newcomers_probability
        return true_hints / (self.return_hints + _PRIOR_RETURNS)

    def return_skill(self, newcomers_probability: float) -> float:
        """Return the skill of return hints: 0 if another return's hint is equally often true, 1 if
        every hint is true and another return's never is. This is Cohen's kappa with the other hint
        as the second rater."""
        chance_share = (self.chance_return_hints + 0.5) / (self.return_hints + _PRIOR_RETURNS)
        true_share = self.return_probability(newcomers_probability)
        return max(0.0, (true_share - chance_share) / (1.0 - chance_share))

    def is_over_trusted(self, tenant_record: HintRecord, are_newcomers_trusted: bool) -> bool:
        """Return whether "this conversation is over" is applied outright. This requires that almost
        none of the conversations continue that would have continued without the hint. Wrong hints show
        late, so for the first few hints it also requires that newcomers are trusted."""
        if self.over_hints <= _FIRST_OVER_HINTS:
            return are_newcomers_trusted and self.wrong_over_hints <= _FIRST_OVER_HINTS // 4
        return self.over_weight(tenant_record) < _OVER_TRUST_WEIGHT

    def over_weight(self, tenant_record: HintRecord) -> float:
        """Return P(continues | hinted over) / P(continues), at most 1. ``tenant_record`` has the denominator,
        and its value is the prior of the numerator. Unknown hints and hints with little information
        weigh 1, as without a hint."""
        continuation = (tenant_record.continued_tips + 1.0) / (tenant_record.tips + 2.0)
        over_continued = self.continued_over_tips + _PRIOR_TIPS * continuation
        weight = over_continued / (self.over_tips + _PRIOR_TIPS) / continuation
        return weight if weight < _INFORMATIVE_WEIGHT else 1.0

    def count_tip(self) -> None:
        """Count a finished request of the tenant."""
        self.tips += 1.0
        if self.tips >= _MAX_RECORD_COUNT:
            self.tips /= 2.0
            self.continued_tips /= 2.0

    def count_over(self) -> None:
        """Count a request that was hinted to be over."""
        self.over_hints += 1
        self.over_tips += 1.0
        if self.over_tips >= _MAX_RECORD_COUNT:
            self.over_tips /= 2.0
            self.continued_over_tips /= 2.0

    def count_return(self, hinted_s: float, gap_s: float | None) -> bool:
        """Count a return hinted after ``hinted_s`` seconds; ``gap_s``: the actual gap, ``None`` if
        overdue. Returns whether the hint proved true."""
        came_true = _is_true(hinted_s, gap_s)
        self.return_hints += 1
        self.true_return_hints += came_true
        self.chance_return_hints += self.last_hinted_s is not None and _is_true(
            self.last_hinted_s, gap_s
        )
        self.last_hinted_s = hinted_s
        if self.return_hints >= _MAX_RECORD_COUNT:
            self.return_hints //= 2
            self.true_return_hints //= 2
            self.chance_return_hints //= 2
        return came_true


def _is_true(hinted_s: float, gap_s: float | None) -> bool:
    return gap_s is not None and abs(gap_s - hinted_s) <= return_slack_s(hinted_s)


@dataclass(slots=True)
class FirstHints:
    """First return and first "over" hint of each record, and the number that were true."""

    return_hints: int = 0
    true_return_hints: int = 0
    over_hints: int = 0
    wrong_over_hints: int = 0

    def add_return(self, came_true: bool) -> None:
        self.return_hints += 1
        self.true_return_hints += came_true
        if self.return_hints >= _MAX_FIRST_HINTS:
            self.return_hints //= 2
            self.true_return_hints //= 2

    def return_probability(self) -> float:
        """Return P(true) for a tenant without a record: initially two of three. A single tenant
        cannot change it much."""
        return (self.true_return_hints + 4.0) / (self.return_hints + 6.0)

    def add_over(self) -> None:
        self.over_hints += 1
        if self.over_hints >= _MAX_FIRST_HINTS:
            self.over_hints //= 2
            self.wrong_over_hints //= 2

    def is_over_trusted(self) -> bool:
        """Return whether first "over" hints are applied. A single tenant cannot change it."""
        return (self.wrong_over_hints + 0.5) / (self.over_hints + 6.0) < _MAX_FIRST_WRONG_SHARE


_NO_HINTS = HintRecord()


class _PendingReturn(NamedTuple):
    """A hinted return, by the time from which it is overdue."""

    overdue_at: float
    push_number: int
    tip: HintedTip


class HintRecords:
    """Records of all tenants and sources, and the return hints still pending."""

    def __init__(self) -> None:
        self._records: dict[Hashable, HintRecord] = {}
        self._first_hints = FirstHints()
        self._pending: list[_PendingReturn] = []
        self._push_count = 0

    def record(self, sender: Hashable) -> HintRecord:
        """Return the record of a ``sender``, created if missing, and mark it as most recent."""
        record = self._records.pop(sender, None)
        if record is None:
            record = HintRecord()
            if len(self._records) >= MAX_RECORDS:
                del self._records[next(iter(self._records))]
        self._records[sender] = record
        return record

    def trust_key(self, sender: Hashable) -> Hashable:
        """Return the sender, or ``NO_RECORD`` without a record. Equal keys have equal trust."""
        return sender if sender in self._records else NO_RECORD

    def count_tip(self, tip: HintedTip, over: bool) -> None:
        """Count the finished request of ``tip``; ``over``: a hint marked its conversation as over. Only
        tenants with hints are counted, so that tenants without hints displace no record."""
        if over and not tip.hinted_over:
            tip.hinted_over = True
            tip.over_record = self.record(tip.sender)
            if not tip.over_record.over_hints:
                tip.over_record.first_over = tip
                self._first_hints.add_over()
            tip.over_record.count_over()
            self.record(tip.tenant)
        tenant_record = self._records.get(tip.tenant)
        if tenant_record is not None and tip.tenant_record is None:
            tip.tenant_record = tenant_record
            tenant_record.count_tip()

    def add_return_hint(self, tip: HintedTip, return_in_s: float) -> None:
        """Record the hint that ``tip`` is continued ``return_in_s`` seconds after its birth."""
        if tip.return_at is not None or not 0 <= return_in_s < float("inf"):
            return
        tip.return_at, tip.hinted_s = tip.created_at + return_in_s, return_in_s
        self._push_count += 1
        overdue_at = tip.return_at + return_slack_s(return_in_s)
        heapq.heappush(self._pending, _PendingReturn(overdue_at, self._push_count, tip))
        if len(self._pending) > _MAX_PENDING_RETURNS:
            heapq.heappop(self._pending)

    def judge_hints(self, tip: HintedTip, now: float) -> None:
        """Check the hints of ``tip``, which was continued."""
        if tip.tenant_record is not None:
            tip.tenant_record.continued_tips += 1.0
        if tip.over_record is not None:
            tip.over_record.wrong_over_hints += 1
            if tip.over_record.first_over is tip:
                tip.over_record.first_over = None
                self._first_hints.wrong_over_hints += 1
            tip.over_record.continued_over_tips += 1.0
        if tip.return_at is not None:
            self._judge_return(tip, now - tip.created_at)

    def count_overdue(self, now: float) -> None:
        """Count overdue returns as false hints."""
        while self._pending and self._pending[0].overdue_at < now:
            tip = heapq.heappop(self._pending).tip
            if tip.return_at is not None:
                self._judge_return(tip, None)

    def _judge_return(self, tip: HintedTip, gap_s: float | None) -> None:
        tip.return_at = None
        record = self.record(tip.sender)
        is_first = not record.return_hints
        came_true = record.count_return(tip.hinted_s, gap_s)
        if is_first:
            self._first_hints.add_return(came_true)

    def return_probability(self, sender: Hashable) -> float:
        """Return P(a return is close to the time that the sender hinted)."""
        newcomers_probability = self._first_hints.return_probability()
        record = self._records.get(sender)
        if record is None:
            return newcomers_probability
        return record.return_probability(newcomers_probability)

    def return_skill(self, sender: Hashable) -> float:
        """Return the skill of the sender's return hints, from 0 to 1."""
        newcomers_probability = self._first_hints.return_probability()
        record = self._records.get(sender)
        if record is None:
            return newcomers_probability
        return record.return_skill(newcomers_probability)

    def is_return_trusted(self, sender: Hashable) -> bool:
        """Return whether the return times that the sender hints are applied."""
        return self.return_skill(sender) >= TRUSTED_SKILL

    def is_over_trusted(self, sender: Hashable) -> bool:
        """Return whether the sender's "over" hints are applied outright."""
        record = self._records.get(sender, _NO_HINTS)
        return record.is_over_trusted(
            self._tenant_record(sender), self._first_hints.is_over_trusted()
        )

    def over_weight(self, sender: Hashable) -> float:
        """Return the factor on the rank of a leaf hinted over, if not trusted outright."""
        return self._records.get(sender, _NO_HINTS).over_weight(self._tenant_record(sender))

    def _tenant_record(self, sender: Hashable) -> HintRecord:
        tenant = sender.tenant if isinstance(sender, OtherSender) else sender
        return self._records.get(tenant, _NO_HINTS)

    def applied_hints(self) -> Counter[tuple[str, str, bool]]:
        """Count tenants by kind of hint (``over``, ``return``), source (``CLIENT`` or other), and
        whether the hints are applied."""
        counts: Counter[tuple[str, str, bool]] = Counter()
        for sender, record in list(self._records.items()):
            source = sender.source if isinstance(sender, OtherSender) else CLIENT
            if record.over_hints:
                is_applied = self.is_over_trusted(sender) or self.over_weight(sender) < 1.0
                counts["over", source, is_applied] += 1
            if record.return_hints:
                counts["return", source, self.is_return_trusted(sender)] += 1
        return counts
