"""Estimate hit ratios from sampled shadow caches, with standard errors.

One block in N is sampled, independently. A cache's lead over the control (the shadow cache of the
running policy) is a sum over blocks, estimated as N times the sum over sampled blocks. The tokens
the server missed are such a sum too, but known exactly, so a ratio estimator scales by them: it
varies less, and prefixes that every cache hits cancel out. The variance is estimated from random
groups of sampled blocks (Wolter, Introduction to Variance Estimation, chapter 2). A block always
belongs to the same group, which accounts for correlation between requests that share it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

from sglang_canopy.whatif.sampled_caches import MULTIPLIER, ShadowResult

GROUPS = 32  # the upper five bits of ``block_number``, inlined for prompts of many blocks
_MISSED = object()
DESIGN_EFFECT = 2.5
"""Inflation of the groups' variance: sampled blocks evict each other, so one surplus block takes
room from all. Measured over traces and samples (docs/research/eviction.md)."""
_MAX_LOG_WEIGHT = 25.0
"""Rescale the sums when the logarithm of a weight exceeds this."""


class HitRatioEstimator:
    """Sums of tokens in which a request's weight decays to 1/e within ``memory_s`` seconds."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._weight, self._log_weight, self._weight_time = 1.0, 0.0, 0.0
        self.reset()

    def reset(self) -> None:
        """Reset all sums."""
        self._prompts = self._hit = self._served_missed = 0.0
        self._sampled = self._missed = self._control = 0.0
        self._unsampled_share = 0.0
        self._saved: dict[Hashable, float] = defaultdict(float)
        self._squared_leads: dict[Hashable, float] = defaultdict(float)
        self._groups: dict[Hashable, list[float]] = defaultdict(lambda: [0.0] * GROUPS)

    def serve(self, now: float, prompt_tokens: int, hit: int, missed: int) -> None:
        """Add a served request. ``missed``: prompt tokens of its blocks that were not hit."""
        weight = self._current_weight(now)
        self._prompts += weight * prompt_tokens
        self._hit += weight * hit
        self._served_missed += weight * missed

    def sample(
        self, sample: ShadowResult, control: int, served: int, block_tokens: int, one_in: int
    ) -> None:
        """Add the shadow caches' hits on the last request.

        ``control``, ``served``: leading sampled blocks that the control and the server hit.
        ``block_tokens``: tokens per block.
        """
        weight, stands_for = self._weight, block_tokens * one_in
        prompt_tokens, blocks = sample.prompt_tokens, sample.blocks
        self._sampled += weight * prompt_tokens
        self._unsampled_share = max(self._unsampled_share, 1.0 - 1.0 / one_in)
        control_tokens = min(control * stands_for, prompt_tokens)
        self._control += weight * control_tokens
        missed = max(0, prompt_tokens - served * stands_for)
        self._missed += weight * missed
        for name, saved in sample.saved_tokens.items():
            self._saved[name] += weight * saved
            self._squared_leads[name] += (weight * (saved - control_tokens)) ** 2
            hit = sample.hit_blocks[name]
            if hit != control and one_in > 1:
                more = weight * (stands_for if hit > control else -stands_for)
                self._add_to_groups(name, blocks[min(hit, control) : max(hit, control)], more)
        if missed and one_in > 1:
            prompt_blocks = -(-prompt_tokens // stands_for)
            self._add_to_groups(_MISSED, blocks[served:prompt_blocks], weight * stands_for)

    def served_ratio(self) -> float:
        """Return the share of the prompt tokens that hit."""
        return self._hit / (self._prompts or 1.0)

    def sampled_ratio(self, name: Hashable) -> float:
        """Return the share of the sampled tokens that a shadow cache hits."""
        return self._saved[name] / (self._sampled or 1.0)

    def lead(self, name: Hashable) -> float:
        """Return the hit ratio of a shadow cache minus the control's."""
        return (self._saved[name] - self._control) * self._per_token()

    def error(self, name: Hashable) -> float:
        """Return the standard error of ``lead``: the requests are a sample of the traffic."""
        traffic = math.sqrt(self._squared_leads.get(name, 0.0)) * self._per_token()
        return math.hypot(traffic, self.sampling_error(name))

    def sampling_error(self, name: Hashable) -> float:
        """Return the standard error of ``lead`` due to block sampling alone."""
        groups = self._groups.get(name)
        if groups is None:
            return 0.0
        ratio = sum(groups) / (sum(self._groups[_MISSED]) or 1.0)
        residuals = [more - ratio * missed for more, missed in zip(groups, self._groups[_MISSED])]
        squares = sum(residual * residual for residual in residuals)
        variance = DESIGN_EFFECT * squares * GROUPS / (GROUPS - 1)
        return math.sqrt(variance * self._unsampled_share) * self._per_token()

    def _per_token(self) -> float:
        """Return the change of the overall ratio per sampled token."""
        share = self._served_missed / self._missed if self._missed else 1.0
        return share / (self._prompts or 1.0)

    def _add_to_groups(self, name: Hashable, blocks: Sequence[int], tokens: float) -> None:
        groups = self._groups[name]
        # Bits that do not select the sample.
        for group in [block * MULTIPLIER >> 59 & 31 for block in blocks]:
            groups[group] += tokens

    def _current_weight(self, now: float) -> float:
        """Return the weight of new tokens, which grows with time so that old sums need no decay."""
        if now > self._weight_time:
            self._log_weight += (now - self._weight_time) / self._memory_s
            self._weight_time = now
            if self._log_weight > _MAX_LOG_WEIGHT:
                self._rescale(math.exp(-self._log_weight))
                self._log_weight = 0.0
            self._weight = math.exp(self._log_weight)
        return self._weight

    def _rescale(self, by: float) -> None:
        self._prompts *= by
        self._hit *= by
        self._served_missed *= by
        self._sampled *= by
        self._missed *= by
        self._control *= by
        for name in self._saved:
            self._saved[name] *= by
        for name in self._squared_leads:
            self._squared_leads[name] *= by * by
        for name, groups in self._groups.items():
            self._groups[name] = [group * by for group in groups]
