"""A tail target in the user's terms, converted to the threshold ``xi`` in uncached tokens.

The target is a TTFT in milliseconds (with the linear model that requests carry), a percentile of
the observed requests, or a number of tokens. A leaf's own ``slo_ms`` takes precedence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Any

from sglang_canopy.policy.base import TAIL_TARGETS
from sglang_canopy.records import Leaf, Request
from sglang_canopy.reuse.ttft import tokens_within_ttft

_MAX_OBSERVED = 2048
"""Requests over which the percentile is taken."""
_MIN_RELATIVE_CHANGE = 0.1
"""Smallest relative change of the threshold that re-ranks leaves."""


def check_target(config: Any) -> None:
    """Raise ``ValueError`` naming two targets of a configuration, which exclude each other."""
    given_targets = [repr(key) for key in TAIL_TARGETS if getattr(config, key) is not None]
    if len(given_targets) > 1:
        raise ValueError(f"give only one of {' and '.join(given_targets)}")


class TailTarget:
    """Updates ``xi`` from finished requests."""

    def __init__(
        self, ttft_ms: float | None, ttft_percentile: float | None, threshold_tokens: float | None
    ) -> None:
        self._ttft_ms = ttft_ms
        self._percentile = ttft_percentile
        self._ttft_model: tuple[float, float] | None = None
        self._ranked_ttft_model: tuple[float, float] | None = None
        self._leaves_have_targets = False
        """Whether any leaf has its own target, for which only the TTFT model matters."""
        self._recent_uncached: deque[int] = deque()
        self._sorted_uncached: list[int] = []
        self._newest_threshold_tokens = threshold_tokens
        self.threshold_tokens = threshold_tokens
        """The policy's threshold ``xi``, in tokens; ``None`` while unknown."""
        self.rank_version = 0
        """Incremented if ``threshold_tokens``, or the TTFT model of leaves' own targets, moves by over a tenth."""

    def observe(self, request: Request) -> None:
        """Update the target from a finished request: its TTFT model, and its uncached tokens."""
        if request.ttft_model is not None:
            self._ttft_model = request.ttft_model
        if self._ttft_ms is not None and self._ttft_model is not None:
            self._newest_threshold_tokens = tokens_within_ttft(self._ttft_ms, self._ttft_model)
        elif self._percentile is not None and request.cached_tokens is not None:
            # TTFT grows with uncached tokens: both have the same percentiles.
            self._record_uncached(max(0, request.prompt_tokens - request.cached_tokens))
            percentile_index = int(self._percentile / 100.0 * (len(self._sorted_uncached) - 1))
            self._newest_threshold_tokens = float(self._sorted_uncached[percentile_index])
        previous, current = self.threshold_tokens, self._newest_threshold_tokens
        if current is not None and (
            previous is None or abs(current - previous) > _MIN_RELATIVE_CHANGE * max(previous, 1.0)
        ):
            self.threshold_tokens = current
            self.rank_version += 1
        elif self._leaves_have_targets and self._has_ttft_model_moved():
            self._ranked_ttft_model = self._ttft_model
            self.rank_version += 1

    def _has_ttft_model_moved(self) -> bool:
        ranked, current = self._ranked_ttft_model, self._ttft_model
        if ranked is None or current is None:
            return ranked is not current
        pairs = zip(ranked, current)
        return any(abs(now - then) > _MIN_RELATIVE_CHANGE * abs(then) for then, now in pairs)

    def _record_uncached(self, uncached_tokens: int) -> None:
        self._recent_uncached.append(uncached_tokens)
        insort(self._sorted_uncached, uncached_tokens)
        if len(self._recent_uncached) > _MAX_OBSERVED:
            oldest = self._recent_uncached.popleft()
            del self._sorted_uncached[bisect_left(self._sorted_uncached, oldest)]

    def leaf_threshold_tokens(self, leaf: Leaf) -> float | None:
        """Return the threshold in tokens for the conversation of ``leaf``."""
        if leaf.slo_ms is not None:
            if not self._leaves_have_targets:
                self._leaves_have_targets, self._ranked_ttft_model = True, self._ttft_model
            if self._ttft_model is not None:
                return tokens_within_ttft(leaf.slo_ms, self._ttft_model)
        return self.threshold_tokens
