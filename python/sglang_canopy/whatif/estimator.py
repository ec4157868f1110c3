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

from sglang_canopy.whatif.sampled_caches import HASH_MULTIPLIER, ShadowResult

GROUP_COUNT = 32  # the upper five bits of ``block_number``, inlined for prompts of many blocks
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
        self._prompt_tokens = self._hit_tokens = self._served_missed_tokens = 0.0
        self._sampled_tokens = self._missed_tokens = self._control_tokens = 0.0
        self._unsampled_share = 0.0
        # Keys: names of shadow caches; in ``_group_leads`` also ``_MISSED``.
        self._saved_tokens: dict[Hashable, float] = defaultdict(float)
        self._squared_leads: dict[Hashable, float] = defaultdict(float)
        self._group_leads: dict[Hashable, list[float]] = defaultdict(lambda: [0.0] * GROUP_COUNT)

    def record_served(
        self, now: float, prompt_tokens: int, hit_tokens: int, missed_tokens: int
    ) -> None:
        """Add a served request. ``missed_tokens``: prompt tokens of its blocks that were not hit."""
        weight = self._current_weight(now)
        self._prompt_tokens += weight * prompt_tokens
        self._hit_tokens += weight * hit_tokens
        self._served_missed_tokens += weight * missed_tokens

    def record_sample(
        self,
        sample: ShadowResult,
        control_blocks: int,
        served_blocks: int,
        block_tokens: int,
        sample_stride: int,
    ) -> None:
        """Add the shadow caches' hits on the last request. ``control_blocks``, ``served_blocks``: leading
        sampled blocks that the control and the server hit. ``block_tokens``: tokens per block."""
        weight, sampled_block_tokens = self._weight, block_tokens * sample_stride
        prompt_tokens, blocks = sample.prompt_tokens, sample.blocks
        self._sampled_tokens += weight * prompt_tokens
        self._unsampled_share = max(self._unsampled_share, 1.0 - 1.0 / sample_stride)
        control_tokens = min(control_blocks * sampled_block_tokens, prompt_tokens)
        self._control_tokens += weight * control_tokens
        missed_tokens = max(0, prompt_tokens - served_blocks * sampled_block_tokens)
        self._missed_tokens += weight * missed_tokens
        for name, saved_tokens in sample.saved_tokens.items():
            self._saved_tokens[name] += weight * saved_tokens
            self._squared_leads[name] += (weight * (saved_tokens - control_tokens)) ** 2
            hit_blocks = sample.hit_blocks[name]
            if hit_blocks != control_blocks and sample_stride > 1:
                is_ahead = hit_blocks > control_blocks
                lead_tokens = weight * (sampled_block_tokens if is_ahead else -sampled_block_tokens)
                differing = slice(*sorted((hit_blocks, control_blocks)))
                self._add_to_groups(name, blocks[differing], lead_tokens)
        if missed_tokens and sample_stride > 1:
            prompt_blocks = -(-prompt_tokens // sampled_block_tokens)
            missed_blocks = blocks[served_blocks:prompt_blocks]
            self._add_to_groups(_MISSED, missed_blocks, weight * sampled_block_tokens)

    def served_ratio(self) -> float:
        """Return the share of the prompt tokens that hit."""
        return self._hit_tokens / (self._prompt_tokens or 1.0)

    def sampled_ratio(self, name: Hashable) -> float:
        """Return the share of the sampled tokens that a shadow cache hits."""
        return self._saved_tokens[name] / (self._sampled_tokens or 1.0)

    def lead(self, name: Hashable) -> float:
        """Return the hit ratio of a shadow cache minus the control's."""
        return (self._saved_tokens[name] - self._control_tokens) * self._ratio_per_token()

    def standard_error(self, name: Hashable) -> float:
        """Return the standard error of ``lead``: the requests are a sample of the traffic."""
        traffic_error = math.sqrt(self._squared_leads.get(name, 0.0)) * self._ratio_per_token()
        return math.hypot(traffic_error, self.sampling_error(name))

    def sampling_error(self, name: Hashable) -> float:
        """Return the standard error of ``lead`` due to block sampling alone."""
        groups = self._group_leads.get(name)
        if groups is None:
            return 0.0
        ratio = sum(groups) / (sum(self._group_leads[_MISSED]) or 1.0)
        pairs = zip(groups, self._group_leads[_MISSED])
        residuals = [lead - ratio * missed for lead, missed in pairs]
        squares = sum(residual * residual for residual in residuals)
        variance = DESIGN_EFFECT * squares * GROUP_COUNT / (GROUP_COUNT - 1)
        return math.sqrt(variance * self._unsampled_share) * self._ratio_per_token()

    def _ratio_per_token(self) -> float:
        """Return the change of the overall ratio per sampled token."""
        scale = self._served_missed_tokens / self._missed_tokens if self._missed_tokens else 1.0
        return scale / (self._prompt_tokens or 1.0)

    def _add_to_groups(self, name: Hashable, blocks: Sequence[int], tokens: float) -> None:
        groups = self._group_leads[name]
        # Bits that do not select the sample.
        for number in [block * HASH_MULTIPLIER >> 59 & 31 for block in blocks]:
            groups[number] += tokens

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

    def _rescale(self, factor: float) -> None:
        self._prompt_tokens *= factor
        self._hit_tokens *= factor
        self._served_missed_tokens *= factor
        self._sampled_tokens *= factor
        self._missed_tokens *= factor
        self._control_tokens *= factor
        for name in self._saved_tokens:
            self._saved_tokens[name] *= factor
        for name in self._squared_leads:
            self._squared_leads[name] *= factor * factor
        for name, groups in self._group_leads.items():
            self._group_leads[name] = [tokens * factor for tokens in groups]
