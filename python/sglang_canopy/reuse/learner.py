"""What a workload-aware policy believes: who comes back, when, and with how many new tokens.

Requests go in (``arrive`` once, ``finish`` once); labels come out, and per label a rank by age
(``Category.rank``) and the distribution of the next prompt's new tokens (``Category.grows``).
Everything is refitted every few requests from a sliding window, deterministically: no clock but
the requests' own stamps, no randomness.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.policy.base import Request
from sglang_canopy.reuse.bins import BINS, EDGES, TOKEN_BINS, age_bin, token_bin
from sglang_canopy.reuse.categories import Categories, Category, gap_bucket, turn_bucket
from sglang_canopy.reuse.shadow import ShadowIndex, Tip
from sglang_canopy.reuse.survival import exponential_rank, gittins_rank, survival_curve

_SHRINK = 20.0
"""Tips at risk that the coarser category's curve counts for in a finer one's."""
_STOPS = ("tool", "end", "length")
_RETURN_SLACK = 0.5
"""A hint "I return in x s" came true within this share of x (and at least 5 s) of the time."""
_OWN_GAP_STEP = 0.5
"""Weight of the newest gap in a conversation's moving average."""


def return_slack_s(hint_s: float) -> float:
    """Seconds after the hinted return at which the hint no longer counts."""
    return max(5.0, _RETURN_SLACK * hint_s)


@dataclass(slots=True)
class HintRecord:
    """How often clients' hints came true."""

    returns: int = 0
    returns_true: int = 0
    overs: int = 0
    overs_wrong: int = 0

    def return_probability(self) -> float:
        """P(the client returns about when it said), two of three before anything is known."""
        return (self.returns_true + 2.0) / (self.returns + 3.0)

    def trust_over(self) -> bool:
        """Whether "this conversation is over" has been true often enough to act on."""
        return self.overs_wrong <= 2.0 + 0.1 * self.overs


class ReuseModel:
    """Labels, curves and prompt growth, learnt online.

    ``window_s``: seconds that samples are kept; ``max_samples``: and how many at most;
    ``min_samples``: fewer in a category, and its parent's curve is used;
    ``max_categories``: bound on labels; ``own_gaps``: whether a conversation's past gaps
    refine its label; ``exponential``: fit the paper's exponential instead of a survival curve.
    """

    def __init__(
        self,
        *,
        window_s: float = 3600.0,
        max_samples: int = 100_000,
        min_samples: int = 20,
        max_categories: int = 64,
        own_gaps: bool = True,
        exponential: bool = False,
    ) -> None:
        self.min_samples = min_samples
        self.own_gaps = own_gaps
        self.exponential = exponential
        self.categories = Categories(max_categories)
        self.shadow = ShadowIndex(window_s, max_samples)
        self.hints = HintRecord()
        self.version = 0
        """Grows with every refit: ranks read before are stale."""
        self.samples = 0
        self._hinted: list[tuple[float, int, Tip]] = []
        self._since_fit = 0
        self._next_fit = min_samples

    def arrive(self, request: Request) -> str:
        """Sample what the request continues, open its own tip, and return its label."""
        before = self.shadow.follow(request)
        if before is not None:
            self._sample(before, request)
        self._settle_hints(request.time)
        tip = Tip(request.time, self.categories.root)
        tip.turn = max(1, request.turn)
        tip.history = request.prompt_tokens
        if before is not None:
            tip.started = before.started
            tip.turn = max(tip.turn, before.turn + 1)
            step = _OWN_GAP_STEP if before.own_gap_s is not None else 1.0
            tip.own_gap_s = (1.0 - step) * (before.own_gap_s or 0.0) + step * before.gap_s
        tip.category = self._categorise(tip, request)
        for old in self.shadow.add(tip, request):
            self._unsample(old)
        self._since_fit += 1
        if self._since_fit >= self._next_fit:
            self.fit(request.time)
        return tip.category.label

    def finish(self, request: Request) -> str:
        """Take in the stop reason, the output and the hints of a request that has ended."""
        tip = self.shadow.pending(request)
        if tip is None:
            return request.label or self.categories.overflow.label
        tip.category = self._categorise(tip, request)
        tip.history = request.prompt_tokens + request.output_tokens
        if len(request.path) * request.block_tokens > request.prompt_tokens:
            self.shadow.extend(tip, request, tip.history)
        if request.over and not tip.said_over:
            tip.said_over = True
            self.hints.overs += 1
        if request.return_in_s is not None and tip.return_at is None:
            tip.return_at = request.time + request.return_in_s
            deadline = tip.return_at + return_slack_s(request.return_in_s)
            heapq.heappush(self._hinted, (deadline, self.samples + len(self._hinted), tip))
        return tip.category.label

    def _categorise(self, tip: Tip, request: Request) -> Category:
        stop = request.stop if request.stop in _STOPS else "-"
        features = [request.category, stop, turn_bucket(tip.turn)]
        if self.own_gaps:
            features.append(gap_bucket(tip.own_gap_s))
        return self.categories.refine(*features)

    def _sample(self, tip: Tip, request: Request) -> None:
        tip.open = False
        tip.gap_s = max(0.0, request.time - tip.born)
        tip.gap_bin = age_bin(tip.gap_s)
        tip.growth_bin = token_bin(request.prompt_tokens - tip.history)
        category = tip.category
        category.events[tip.gap_bin] += 1.0
        category.growth[tip.growth_bin] += 1.0
        category.gap_sum_s += tip.gap_s
        self.samples += 1
        if tip.said_over:
            self.hints.overs_wrong += 1
        if tip.return_at is not None:
            self.hints.returns += 1
            off_s = abs(request.time - tip.return_at)
            self.hints.returns_true += off_s <= return_slack_s(tip.return_at - tip.born)
            tip.return_at = None

    def _unsample(self, tip: Tip) -> None:
        if tip.open:
            tip.open = False
            return
        category = tip.category
        category.events[tip.gap_bin] -= 1.0
        category.growth[tip.growth_bin] -= 1.0
        category.gap_sum_s -= tip.gap_s

    def _settle_hints(self, now: float) -> None:
        while self._hinted and self._hinted[0][0] < now:
            tip = heapq.heappop(self._hinted)[2]
            if tip.return_at is not None:
                tip.return_at = None
                self.hints.returns += 1

    def fit(self, now: float) -> None:
        """Refit every category from the window."""
        self._since_fit = 0
        self._next_fit = max(self.min_samples, 64, len(self.shadow) // 16)
        self._count_waiting(now)
        table = list(self.categories)
        for category in table:
            category.all_events = category.events[:]
            category.all_censored = category.censored[:]
            category.all_growth = category.growth[:]
        for category in reversed(table):
            parent = category.parent
            if parent is not None:
                _add(parent.all_events, category.all_events)
                _add(parent.all_censored, category.all_censored)
                _add(parent.all_growth, category.all_growth)
        for category in table:
            self._fit_category(category)
        self.version += 1

    def _count_waiting(self, now: float) -> None:
        for category in self.categories:
            category.censored = [0.0] * BINS
        at = BINS - 1
        for tip in self.shadow:
            age = now - tip.born
            while age < EDGES[at] and at > 0:
                at -= 1
            if tip.open:
                tip.category.censored[at] += 1.0

    def _fit_category(self, category: Category) -> None:
        parent = category.parent
        count = sum(category.all_events) + sum(category.all_censored)
        if count < self.min_samples:
            if parent is not None:
                category.curve, category.rank = parent.curve, parent.rank
                category.grows = parent.grows
            return
        prior = parent.curve if parent is not None else None
        weight = _SHRINK if parent is not None else 1.0
        category.curve = survival_curve(category.all_events, category.all_censored, prior, weight)
        category.rank = gittins_rank(category.curve)
        category.grows = _exceedance(category.all_growth, parent.grows if parent else None)

    def stats(self) -> Mapping[str, Any]:
        """Learnt curves by label, for an operator."""
        return {
            "samples": self.samples,
            "tips": len(self.shadow),
            "categories": {
                c.label: {
                    "continued": sum(c.all_events),
                    "waiting": sum(c.all_censored),
                    "returns": round(1.0 - c.curve[-1], 4),
                }
                for c in self.categories
                if c.all_events
            },
        }


def _add(into: list[float], other: list[float]) -> None:
    for i, value in enumerate(other):
        if value:
            into[i] += value


def _exceedance(counts: list[float], prior: list[float] | None) -> list[float]:
    """P(Q > edge) at each token edge, with ``_SHRINK`` samples of ``prior``."""
    weight = _SHRINK if prior is not None else 0.0
    total = sum(counts) + weight
    above = total
    result = []
    for i in range(TOKEN_BINS):
        # Growth in bin i counts as above edge i: the bin's values lie on or beyond it.
        share = sum(counts[i:]) + weight * (prior[i] if prior is not None else 0.0)
        result.append(share / total if total > 0.0 else 1.0)
    del above
    return result
